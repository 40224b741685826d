"""Tables of what the reproduction compared, one row a training or a set."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from reproduction.examples import ROBUST, SENSITIVE, TASKS
from reproduction.jobs import SEEDS
from reproduction.results import Results, mean_msr


def seeds_of(results: Results, pair: str) -> list[int]:
    """Seeds with which a mode pair's adapter has been trained."""
    return [seed for seed in SEEDS if f"{pair}-seed{seed}" in results]


def summaries(results: Results) -> list[dict[str, Any]]:
    """A line for each routed training: sparsity of both categories, and the worst rise of NLL over full attention."""
    rows = []
    for name, result in results.items():
        job = result["job"]
        if job["kind"] != "train" or job["is_blind"] or "bounds" not in results:
            continue
        full = results["bounds"]["masks"]["full"]
        sensitive, robust = mean_msr(result, SENSITIVE), mean_msr(result, ROBUST)
        rows.append(
            {
                "training": name,
                "MSR sensitive": sensitive,
                "MSR robust": robust,
                "apart": robust - sensitive,
                "worst sensitive": max(_rises(result, full, SENSITIVE)),
                "worst robust": max(_rises(result, full, ROBUST)),
                "mean rise": mean(_rises(result, full, tuple(TASKS))),
            }
        )
    return rows


def conditions(results: Results) -> dict[str, list[dict[str, Any]]]:
    """Tables of one adapter in other conditions, by title."""
    tables = {}
    for name, result in results.items():
        if "lengths" in result:
            for length, ways in result["lengths"].items():
                tables[f"{name}: {length} tokens"] = _side_by_side(ways)
        if "bias" in result:
            ways = {f"bias {bias}": table for bias, table in result["bias"].items()}
            tables[f"{name}: sparsity_bias"] = _side_by_side(ways, ("msr", "nll"))
        if "together" in result:
            title = f"{name}: mixed batches, {result['same_decisions']:.4f} of the decisions as in single rows"
            tables[title] = _side_by_side({way: result[way] for way in ("together", "alone")}, ("msr", "nll"))
        if "sampled" in result:
            tables[f"{name}: sampled decisions"] = _side_by_side({"sampled": result["sampled"]}, ("msr", "nll"))
        if "unseen" in result:
            tables[f"{name}: instructions never trained on"] = _side_by_side(result["unseen"])
    left_out = [_left_out(results, name) for name in TASKS if f"without-{name}" in results and "bounds" in results]
    return {**tables, "Each set when it was left out of training": left_out} if left_out else tables


def _left_out(results: Results, name: str) -> dict[str, Any]:
    columns = {
        "left out": [results[f"without-{name}"]],
        "trained on": [results[f"fa-ssa-seed{seed}"] for seed in seeds_of(results, "fa-ssa")],
    }
    row: dict[str, Any] = {"set": name}
    for way, tables in columns.items():
        row |= {f"{metric} {way}": mean(column(tables, name, metric)) for metric in ("msr", "nll") if tables}
    return {**row, "nll full": column([results["bounds"]["masks"]["full"]], name, "nll")[0]}


def _side_by_side(ways: Mapping[str, Any], metrics: Sequence[str] = ("nll",)) -> list[dict[str, Any]]:
    """A row for each set: the routed MSR if there is a `routed`, then each metric of each way."""
    rows = []
    for entry in next(iter(ways.values()))["tasks"]:
        name = entry["set"]
        row = {"set": name, "n": entry["n"]}
        if "routed" in ways:
            row["MSR"] = column([ways["routed"]], name, "msr")[0]
        rows.append(row | {f"{m} {way}": column([table], name, m)[0] for way, table in ways.items() for m in metrics})
    return rows


def rise(row: Mapping[str, Any], full: Mapping[str, Any]) -> float:
    """By how much a set's NLL is above full attention's."""
    return row["nll"] - column([full], row["set"], "nll")[0]


def _rises(result: Mapping[str, Any], full: Mapping[str, Any], sets: Sequence[str]) -> list[float]:
    return [rise(row, full) for row in result["tasks"] if row["set"] in sets]


def column(tables: Iterable[Mapping[str, Any]], name: str, metric: str) -> list[float]:
    """One figure of a set from each table that holds the set."""
    return [row[metric] for table in tables for row in table["tasks"] if row["set"] == name]
