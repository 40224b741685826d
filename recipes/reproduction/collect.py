"""Gathers what the jobs measured: `results.json` of each mode pair, and tables of what was compared.

    cd recipes
    python -m reproduction.collect --output ../out/reproduction --commit COMMIT

Writes `{output}/{pair}/results.json` and prints the tables. What no job has measured yet is left out.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from reproduction.examples import ROBUST, SENSITIVE, TASKS
from reproduction.jobs import SEEDS, all_jobs
from reproduction.results import mean_msr, read_result, result_file

from elastic_peft.report import routing_table


PAIRS = ("fa-ssa", "fa-xa", "xa-ssa")
COMMAND = "python -m reproduction.run --model SmolLM2-135M-Instruct --data tasks_4k.npz --output out"
#: Ways of running a set beside `routed`: the result that measured them, and the name of its masks.
WAYS = {
    "static_random": ("masks-random", "random"),
    "static_retrieval": ("masks-retrieval", "retrieval"),
    "static_loss": ("masks-loss", "loss"),
    "static_learned": ("masks-learned", "learned"),
    "static_category": ("masks-category", "category"),
}
ONE_MASK = ("static_random", "static_retrieval", "static_loss", "static_learned")

Results = Mapping[str, dict[str, Any]]


def main(arguments: list[str] | None = None) -> None:
    """Writes the files and prints the tables; see the module's description and `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--commit", help="commit that the results come from")
    args = parser.parse_args(arguments)
    results = read_all(args.output)
    for pair in PAIRS:
        seeds = seeds_of(results, pair)
        if not seeds:
            continue
        record = pair_results(results, pair, args.commit)
        file = args.output / pair / "results.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"{pair}, seeds {', '.join(map(str, seeds))}: NLL\n{routing_table(_flat(record['tasks']))}\n")
    print(f"One line a training\n{routing_table(summaries(results))}\n")
    for title, rows in conditions(results).items():
        print(f"{title}\n{routing_table(rows)}\n")


def read_all(output: Path) -> dict[str, dict[str, Any]]:
    """Every result there is, by job, the most important first."""
    names = [job.name for job in all_jobs()]
    return {name: read_result(output, name) for name in names if result_file(output, name).exists()}


def seeds_of(results: Results, pair: str) -> list[int]:
    """Seeds with which a mode pair's adapter has been trained."""
    return [seed for seed in SEEDS if f"{pair}-seed{seed}" in results]


def pair_results(results: Results, pair: str, commit: str | None) -> dict[str, Any]:
    """A mode pair's `results.json`: means over its seeds with the spread; static masks beside FA-SSA alone."""
    seeds = seeds_of(results, pair)
    routed = [results[f"{pair}-seed{seed}"] for seed in seeds]
    ways = {"full": _tables(results, "bounds", "full")}
    ways["all_sparse"] = _tables(results, "bounds" if pair == "fa-ssa" else f"bounds-{pair}", "all_sparse")
    ways["routed"] = routed
    if pair == "fa-ssa":
        ways |= {way: _tables(results, name, masks) for way, (name, masks) in WAYS.items()}
    targets = routed[0]["targets"]
    tasks = []
    for name, task in TASKS.items():
        row: dict[str, Any] = {"task": task, "set": name, "t": targets[task]}
        row |= {ratio: _figure(_column(routed, name, ratio)) for ratio in ("msr", "esr", "esr_last_layer")}
        for metric in ("nll", "accuracy"):
            columns = {way: _column(tables, name, metric) for way, tables in ways.items()}
            row[metric] = {way: _figure(values) for way, values in columns.items() if values}
        tasks.append(row)
    return {
        "hardware": routed[0]["hardware"],
        "versions": routed[0]["versions"],
        "commit": commit,
        "command": COMMAND,
        "seeds": seeds,
        "examples": routed[0]["tasks"][0]["n"],
        "tasks": tasks,
        "ablations": [row for row in summaries(results) if row["training"].startswith("ablation-")]
        if pair == "fa-ssa"
        else [],
        "ruler": [],
    }


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
        row |= {f"{metric} {way}": mean(_column(tables, name, metric)) for metric in ("msr", "nll") if tables}
    return {**row, "nll full": _column([results["bounds"]["masks"]["full"]], name, "nll")[0]}


def _side_by_side(ways: Mapping[str, Any], metrics: Sequence[str] = ("nll",)) -> list[dict[str, Any]]:
    """A row for each set: the routed MSR if there is a `routed`, then each metric of each way."""
    rows = []
    for entry in next(iter(ways.values()))["tasks"]:
        name = entry["set"]
        row = {"set": name, "n": entry["n"]}
        if "routed" in ways:
            row["MSR"] = _column([ways["routed"]], name, "msr")[0]
        rows.append(row | {f"{m} {way}": _column([table], name, m)[0] for way, table in ways.items() for m in metrics})
    return rows


def rise(row: Mapping[str, Any], full: Mapping[str, Any]) -> float:
    """By how much a set's NLL is above full attention's."""
    return row["nll"] - _column([full], row["set"], "nll")[0]


def _rises(result: Mapping[str, Any], full: Mapping[str, Any], sets: Sequence[str]) -> list[float]:
    return [rise(row, full) for row in result["tasks"] if row["set"] in sets]


def _tables(results: Results, name: str, masks: str) -> list[dict[str, Any]]:
    """The tables of a result's masks whose names begin with `masks`."""
    entries = results[name]["masks"] if name in results else {}
    return [table for mask, table in entries.items() if mask.startswith(masks)]


def _column(tables: Iterable[Mapping[str, Any]], name: str, metric: str) -> list[float]:
    """One figure of a set from each table that holds the set."""
    return [row[metric] for table in tables for row in table["tasks"] if row["set"] == name]


def _figure(values: Sequence[float]) -> float | dict[str, float]:
    return {"mean": mean(values), "std": stdev(values)} if len(values) > 1 else values[0]


def _flat(tasks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows for a terminal: means, and the NLL of each way."""

    def plain(value: Any) -> Any:
        return value["mean"] if isinstance(value, Mapping) else value

    return [
        {"set": row["set"], "MSR": plain(row["msr"]), "ESR": plain(row["esr"])}
        | {way: plain(value) for way, value in row["nll"].items()}
        for row in tasks
    ]


if __name__ == "__main__":
    main()
