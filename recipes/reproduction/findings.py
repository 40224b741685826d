"""What is asked of the figures, and whether they reach it."""

from statistics import mean, stdev
from typing import Any

from reproduction.examples import ROBUST, SENSITIVE
from reproduction.jobs import ONE_MASK
from reproduction.results import Results, mean_msr
from reproduction.tables import column, full_attention, rise, trainings, ways_of


#: The bars of FA-SSA: mean MSR of the sensitive sets, how far the robust sets' is above it, how far any set's NLL may
#: be above full attention, and how far each static mask's NLL on the sensitive sets must be above routing's.
MIN_MSR, MIN_APART, MAX_SENSITIVE, MAX_ROBUST, MIN_MARGIN = 0.65, 0.15, 0.03, 0.12, 0.1


def bars(results: Results) -> list[dict[str, Any]]:
    """A row for each bar of FA-SSA: what is asked, what was measured, with its spread, and how many reach it alone.

    Means over the training seeds; of static masks the mean over their draws or seeds, less the routed adapters' mean.
    """
    routed = trainings(results, "fa-ssa")
    if not routed or "bounds" not in results:
        return []
    full = full_attention(results)

    def bar(what: str, values: list[float], asked: float, is_least: bool) -> dict[str, Any]:
        measured = mean(values)
        reached = [value >= asked if is_least else value <= asked for value in (measured, *values)]
        return {
            "bar": what,
            "asked": f"{'at least' if is_least else 'at most'} {asked:g}",
            "measured": measured,
            "std": stdev(values) if len(values) > 1 else None,
            "reached": "yes" if reached[0] else "no",
            "alone": f"{sum(reached[1:])} of {len(values)}",
        }

    sensitive = [mean_msr(run, SENSITIVE) for run in routed]
    apart = [mean_msr(run, ROBUST) - msr for run, msr in zip(routed, sensitive)]
    rows = [
        bar("mean MSR of the question-answering sets", sensitive, MIN_MSR, True),
        bar("mean MSR of the other sets above theirs", apart, MIN_APART, True),
    ]
    for sets, limit in ((SENSITIVE, MAX_SENSITIVE), (ROBUST, MAX_ROBUST)):
        rows += [
            bar(f"{name}: NLL over full", [rise(run, full, name) for run in routed], limit, False) for name in sets
        ]
    nll = mean(mean(column(routed, name, "nll")) for name in SENSITIVE)
    for way, tables in ways_of(results, "fa-ssa").items():
        if way in ONE_MASK:
            above = [mean(column([table], name, "nll")[0] for name in SENSITIVE) - nll for table in tables]
            rows.append(bar(f"{way}: NLL over routed, mean of the question-answering sets", above, MIN_MARGIN, True))
    return rows
