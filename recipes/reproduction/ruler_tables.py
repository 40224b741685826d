"""What the jobs scored on RULER, as rows, as a table and in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from reproduction.results import Results
from reproduction.tables import Table

from elastic_peft.results import ruler_means


_RATIOS = ("MSR", "ESR")
#: Columns of means over the tasks that are no scores.
_OTHERS = ("length", "tasks", "prompts", *_RATIOS)


def ruler_rows(results: Results, pair: str) -> list[dict[str, Any]]:
    """The rows of every length at which a job scored RULER's tasks with a mode pair."""
    scored = (result for result in results.values() if result["job"]["kind"] == "ruler")
    return [row for result in scored for row in result["ruler"] if row["mode_pair"] == pair.upper()]


def ruler_note(rows: Sequence[Mapping[str, Any]]) -> str:
    """Whose scores they are, and at how many lengths the best static choice of heads is above routing."""
    text = (
        "By the first seed's adapter. Training held no prompt of RULER, but one of its sets, a number in prose, is "
        "like RULER's needles."
    )
    lengths = ruler_means(rows)
    better = [
        max(score for way, score in row.items() if way.startswith("static ")) > row["routed"]
        for row in lengths
        if any(way.startswith("static ") for way in row)
    ]
    if better:
        text += (
            " The static choices have as many sparse heads as FA-SSA's routers chose on the sets; the best of them "
            f"for each length, picked after scoring, is above routing at {sum(better)} of {len(better)}."
        )
    return text


def ruler_table(rows: Sequence[Mapping[str, Any]], pair: str) -> Table:
    """A row for each task and length: scores from 0 to 100 of each way of running."""
    shows = f"Scores from 0 to 100, higher is better; MSR and ESR are those of the routed adapter. {ruler_note(rows)}"
    cells = [
        {"length": row["length"], "task": row["task"], "prompts": row["n"], "MSR": row["msr"], "ESR": row["esr"]}
        | row["score"]
        for row in sorted(rows, key=lambda row: row["length"])
    ]
    return Table(f"RULER, {pair.upper()}", shows, cells)


def mean_rows(records: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row for each mode pair and length, as texts: means over the tasks, from each pair's `results.json`."""
    return [
        {"pair": pair.upper(), "tokens": str(row["length"])}
        | {name: f"{row[name]:.1f}" for name in row if name not in _OTHERS}
        | {ratio: f"{row[ratio]:.2f}" for ratio in _RATIOS}
        for pair, record in records.items()
        for row in ruler_means(record["ruler"])
    ]
