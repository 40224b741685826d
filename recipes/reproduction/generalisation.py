"""Whether routing follows the task where prompts are unlike those trained on, or something else, as their template."""

from collections.abc import Iterator, Mapping
from statistics import mean
from typing import Any, NamedTuple

from reproduction.examples import ROBUST, SENSITIVE, TASKS
from reproduction.jobs import REFERENCE
from reproduction.results import Results
from reproduction.tables import column, full_attention, rise, trainings


#: Tokens of the prompts that adapters are trained on.
TRAINED_LENGTH = 4096
#: NLL is lost where it is above full attention by more nats than this, and has grown by more than this.
TOLERATED = 0.1
LEFT_OUT, UNSEEN = "left out of training", "unseen phrasings"


class Training(NamedTuple):
    """How adapters were trained: in words, how their jobs' names begin, and those of the adapters on every set."""

    words: str
    prefix: str
    on_every_set: str


RECIPE = Training("the recipe", "", "fa-ssa")
ONE_TASK = Training("one task a document", "one-task-", "one-task")
VARIED = Training("one task a document and more wordings of the instructions", "varied-", "one-task")


class Figures(NamedTuple):
    """A set's MSR, and its NLL above full attention."""

    msr: float
    rise: float


class Judgement(NamedTuple):
    """A set on prompts unlike those trained on, by a kind of training; what its routing follows; is NLL lost?"""

    set: str
    prompts: str
    training: Training
    trained: Figures
    measured: Figures
    follows: str
    loses: bool


def judgements(results: Results) -> list[Judgement]:
    """A judgement for each set on prompts that training did not hold.

    Routing follows the task if the set's MSR moved towards that of the other kind of sets by no more than half of what
    is between the kinds. Each training is compared with the adapters of its own kind that saw every set, means over
    their seeds, and left out where there are none.
    """
    if REFERENCE not in results or "bounds" not in results:
        return []
    judged = []
    for training in (RECIPE, ONE_TASK, VARIED):
        if not trainings(results, training.on_every_set):
            continue
        trained = as_trained(results, training.on_every_set)
        half = (mean(trained[name].msr for name in ROBUST) - mean(trained[name].msr for name in SENSITIVE)) / 2
        for prompts, measured, instead in _unlike(results, training):
            for name, figures in measured.items():
                before = trained[name]
                towards_others = (figures.msr - before.msr) * (1 if name in SENSITIVE else -1)
                follows = instead if towards_others > half else "task"
                loses = min(figures.rise, figures.rise - before.rise) > TOLERATED
                judged.append(Judgement(name, prompts, training, before, figures, follows, loses))
    return judged


def _unlike(results: Results, training: Training) -> Iterator[tuple[str, dict[str, Figures], str]]:
    """Prompts, figures of each set, and what the routing follows where it does not follow the task."""
    yield LEFT_OUT, left_out(results, training.prefix), "template"
    yield UNSEEN, unseen_phrasings(results, training.prefix), "template"
    if training is RECIPE:
        for length, sets in by_length(results).items():
            if length != TRAINED_LENGTH:
                yield f"{length // 1024}K tokens", sets, "length"


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


def unseen_phrasings(results: Results, prefix: str = "") -> dict[str, Figures]:
    """Figures of each set whose instructions were phrased as that job's training never saw."""
    ways = results.get(f"{prefix or 'unseen-'}phrasings", {}).get("unseen")
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
