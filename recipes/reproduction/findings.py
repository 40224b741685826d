"""What the figures say: which bars are reached, and whether routing follows the task or the prompt's template."""

from collections.abc import Iterator, Mapping
from statistics import mean, stdev
from typing import Any, NamedTuple

from reproduction.examples import ROBUST, SENSITIVE, TASKS
from reproduction.jobs import REFERENCE
from reproduction.results import Results, mean_msr
from reproduction.tables import WAYS, column, full_attention, rise, trainings, ways_of


#: The bars of FA-SSA: mean MSR of the sensitive sets, how far the robust sets' is above it, how far any set's NLL may
#: be above full attention, and how far each static mask's NLL on the sensitive sets must be above routing's.
MIN_MSR, MIN_APART, MAX_SENSITIVE, MAX_ROBUST, MIN_MARGIN = 0.65, 0.15, 0.03, 0.12, 0.1
#: Tokens of the prompts that adapters are trained on.
TRAINED_LENGTH = 4096
#: Routing has left the task when its NLL over full attention grew by more nats than this.
TOLERATED = 0.1
#: What the jobs are called that train on other tasks over the same documents too, and how their conditions end.
CROSSED, OTHER_TASKS = "crossed", ", other tasks over the same documents in training"


class Figures(NamedTuple):
    """A set's MSR, and its NLL above full attention."""

    msr: float
    rise: float


def bars(results: Results) -> list[dict[str, Any]]:
    """A row for each bar of FA-SSA: what is asked, what was measured, means over the seeds with the spread."""
    routed = trainings(results, "fa-ssa")
    if not routed or "bounds" not in results:
        return []
    full = full_attention(results)

    def bar(what: str, values: list[float], asked: float, is_least: bool) -> dict[str, Any]:
        measured = mean(values)
        return {
            "bar": what,
            "asked": f"{'at least' if is_least else 'at most'} {asked:g}",
            "measured": measured,
            "std": stdev(values) if len(values) > 1 else None,
            "reached": "yes" if (measured >= asked if is_least else measured <= asked) else "no",
        }

    sensitive = [mean_msr(run, SENSITIVE) for run in routed]
    apart = [mean_msr(run, ROBUST) - msr for run, msr in zip(routed, sensitive)]
    rows = [
        bar("mean MSR of the sensitive sets", sensitive, MIN_MSR, True),
        bar("mean MSR of the robust sets above theirs", apart, MIN_APART, True),
    ]
    for sets, limit in ((SENSITIVE, MAX_SENSITIVE), (ROBUST, MAX_ROBUST)):
        rows += [
            bar(f"{name}: NLL over full", [rise(run, full, name) for run in routed], limit, False) for name in sets
        ]
    nll = mean(mean(column(routed, name, "nll")) for name in SENSITIVE)
    for way, tables in ways_of(results, "fa-ssa").items():
        if way in WAYS and way != "static_category":  # that is two masks
            above = [mean(column([table], name, "nll")[0] for name in SENSITIVE) - nll for table in tables]
            rows.append(bar(f"{way}: NLL over routed, mean of the sensitive sets", above, MIN_MARGIN, True))
    return rows


def generalisation(results: Results) -> list[dict[str, Any]]:
    """A row for each set in each condition that training did not hold, and what its routing follows there.

    Routing follows the task if the set's MSR moved towards that of the other kind of sets by no more than half of what
    is between the kinds, and its NLL over full attention grew by no more than `TOLERATED`. Trainings with other tasks
    over the same documents are compared with their own kind, and left out where none of it holds every set.
    """
    if REFERENCE not in results or "bounds" not in results:
        return []
    as_trained_by = {kind: as_trained(results, kind) for kind in ("fa-ssa", CROSSED) if trainings(results, kind)}
    rows = []
    for condition, name, figures, instead in _conditions(results):
        trained = as_trained_by.get(CROSSED if OTHER_TASKS in condition else "fa-ssa")
        if trained is None:
            continue
        half = (mean(trained[other].msr for other in ROBUST) - mean(trained[other].msr for other in SENSITIVE)) / 2
        towards_others = (figures.msr - trained[name].msr) * (1 if name in SENSITIVE else -1)
        strays = {"MSR": towards_others > half, "NLL": figures.rise - trained[name].rise > TOLERATED}
        left = " and ".join(metric for metric, is_out in strays.items() if is_out)
        rows.append(
            {
                "set": name,
                "condition": condition,
                "MSR trained": trained[name].msr,
                "MSR": figures.msr,
                "NLL over full, trained": trained[name].rise,
                "NLL over full": figures.rise,
                "follows": f"{instead} ({left})" if left else "task",
            }
        )
    return rows


def _conditions(results: Results) -> Iterator[tuple[str, str, Figures, str]]:
    """Condition, set, figures, and what the routing follows where it does not follow the task."""
    for prefix, words in (("", ""), ("varied-", ", more words in training"), (f"{CROSSED}-", OTHER_TASKS)):
        for name, figures in left_out(results, prefix).items():
            yield f"left out of training{words}", name, figures, "template"
        for name, figures in unseen_phrasings(results, f"{prefix or 'unseen-'}phrasings").items():
            yield f"unseen phrasings{words}", name, figures, "template"
    for length, sets in by_length(results).items():
        if length != TRAINED_LENGTH:
            for name, figures in sets.items():
                yield f"{length} tokens", name, figures, "length"


def as_trained(results: Results, kind: str = "fa-ssa") -> dict[str, Figures]:
    """Figures of each set by the adapters `{kind}-seed*`, means over the seeds."""
    runs = trainings(results, kind)
    full = full_attention(results)
    return {
        name: Figures(mean(column(runs, name, "msr")), mean(rise(run, full, name) for run in runs)) for name in TASKS
    }


def left_out(results: Results, prefix: str = "") -> dict[str, Figures]:
    """Figures of each set by the adapter that was trained without it, by jobs whose names have that prefix."""
    full = full_attention(results)
    jobs = {name: f"{prefix}without-{name}" for name in TASKS}
    runs = {name: results[job] for name, job in jobs.items() if job in results}
    return {name: _figures(run, full, name) for name, run in runs.items()}


def unseen_phrasings(results: Results, job: str = "unseen-phrasings") -> dict[str, Figures]:
    """Figures of each set whose instructions were phrased as that job's training never saw."""
    ways = results.get(job, {}).get("unseen")
    return _of_sets(ways) if ways else {}


def by_length(results: Results) -> dict[int, dict[str, Figures]]:
    """Figures of each set by tokens of its prompts, in order; that of training is the reference adapter's."""
    full = full_attention(results)
    tables = {TRAINED_LENGTH: {name: _figures(results[REFERENCE], full, name) for name in TASKS}}
    for length, ways in results.get(f"{REFERENCE}-lengths", {}).get("lengths", {}).items():
        tables[int(length)] = _of_sets(ways)
    return dict(sorted(tables.items()))


def _of_sets(ways: Mapping[str, Any]) -> dict[str, Figures]:
    names = [row["set"] for row in ways["routed"]["tasks"]]
    return {name: _figures(ways["routed"], ways["full"], name) for name in names}


def _figures(table: Mapping[str, Any], full: Mapping[str, Any], name: str) -> Figures:
    return Figures(column([table], name, "msr")[0], rise(table, full, name))
