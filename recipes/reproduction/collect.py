"""Gathers what the jobs measured: `results.json` of each mode pair, and tables of what was compared.

    cd recipes
    python -m reproduction.collect --output ../out/reproduction --commit COMMIT

Writes `{output}/{pair}/results.json`, where it leaves `ruler` as it is, and `{output}/static_masks.json` for
`recipes/evaluate.py --static`; prints the tables. What no job has measured yet is left out.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from reproduction.examples import TASKS
from reproduction.results import Results, read_all
from reproduction.tables import column, conditions, seeds_of, summaries

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
#: The masks that one choice of heads makes for every set.
ONE_MASK = {
    "static_random": "random0",
    "static_retrieval": "retrieval",
    "static_loss": "loss",
    "static_learned": "learned",
}


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
        if file.exists():  # recipes/evaluate.py adds these
            record["ruler"] = json.loads(file.read_text(encoding="utf-8"))["ruler"]
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"{pair}, seeds {', '.join(map(str, seeds))}: NLL\n{routing_table(_flat(record['tasks']))}\n")
    (args.output / "static_masks.json").write_text(json.dumps(static_masks(results)), encoding="utf-8")
    tables = {
        "One line a training": summaries(results),
        "NLL of static masks above routing": margins(results),
        **conditions(results),
    }
    for title, rows in tables.items():
        if rows:
            print(f"{title}\n{routing_table(rows)}\n")


def static_masks(results: Results) -> dict[str, list[list[int]]]:
    """The masks for every set, by way of choosing them: 1 = sparse, a row a layer."""
    chosen = ((way, WAYS[way][0], mask) for way, mask in ONE_MASK.items())
    return {way: results[name]["masks"][mask]["mask"] for way, name, mask in chosen if name in results}


def margins(results: Results) -> list[dict[str, Any]]:
    """A row for each way of choosing masks: by how much its NLL on each set is above routing's, means over seeds."""
    routed = [results[f"fa-ssa-seed{seed}"] for seed in seeds_of(results, "fa-ssa")]
    rows = []
    for way, (name, masks) in WAYS.items():
        tables = _tables(results, name, masks)
        if tables and routed:
            margin = {key: mean(column(tables, key, "nll")) - mean(column(routed, key, "nll")) for key in TASKS}
            rows.append({"masks": way, **margin})
    return rows


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
        row |= {ratio: _figure(column(routed, name, ratio)) for ratio in ("msr", "esr", "esr_last_layer")}
        for metric in ("nll", "accuracy"):
            columns = {way: column(tables, name, metric) for way, tables in ways.items()}
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


def _tables(results: Results, name: str, masks: str) -> list[dict[str, Any]]:
    """The tables of a result's masks whose names begin with `masks`."""
    entries = results[name]["masks"] if name in results else {}
    return [table for mask, table in entries.items() if mask.startswith(masks)]


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
