"""Gathers what the jobs measured: `results.json` of each mode pair, and tables of what was compared.

    cd recipes
    python -m reproduction.collect --output ../out/reproduction --commit COMMIT

Writes `{output}/{pair}/results.json`, where it leaves `ruler` as it is, `{output}/static_masks.json` for
`recipes/evaluate.py --static`, and the tables, `{output}/tables.md`. What no job has measured yet is left out, and
so is, with a line that says so, what was measured on other examples than the routed adapters.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from reproduction.examples import TASKS
from reproduction.findings import TOLERATED, bars, generalisation
from reproduction.jobs import REFERENCE
from reproduction.results import Results, read_all
from reproduction.tables import (
    WAYS,
    Table,
    column,
    conditions,
    full_attention,
    left_out,
    margins,
    outcomes,
    seeds_of,
    trade,
    trainings,
    tried,
    ways_of,
)

from elastic_peft.report import routing_table


PAIRS = ("fa-ssa", "fa-xa", "xa-ssa")
COMMAND = "python -m reproduction.run --model SmolLM2-135M-Instruct --data tasks_4k.npz --output out"
#: Way of running to what it is.
DESCRIPTIONS = {
    "full": "full attention in every head",
    "all_retrieval": "every head in the retrieval mode",
    "all_sparse": "every head in the sparse mode",
    "routed": "each head of each prompt as its router decides",
    "static_random": "the same heads sparse for every prompt, as many as routed ones on average; here drawn at "
    "random, mean and deviation of five draws",
    "static_retrieval": "the same, heads ranked by how well they retrieve, as in DuoAttention",
    "static_loss": "the same, heads ranked by what each costs alone",
    "static_learned": "the same, heads ranked by gates that were trained without seeing the prompt, as in PruLong",
    "static_category": "the same, learned for the question-answering sets and for the others apart, which takes to "
    "know the kind of every prompt",
}
STRAYED = (
    "Not where MSR moved towards the other kind of sets by over half of what is between them, or NLL over full grew "
    f"by over {TOLERATED:g}."
)
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
    for line in (line for pair in PAIRS for line in left_out(results, pair)):
        print(line)
    for pair in trained_pairs(results):
        record = pair_results(results, pair, args.commit)
        file = args.output / pair / "results.json"
        file.parent.mkdir(exist_ok=True)
        if file.exists():  # recipes/evaluate.py adds these
            record["ruler"] = json.loads(file.read_text(encoding="utf-8")).get("ruler", [])
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (args.output / "static_masks.json").write_text(json.dumps(static_masks(results)), encoding="utf-8")
    tables = [(table.title, table.shows, routing_table(table.rows)) for table in all_tables(results)]
    text = "\n".join(f"## {title}\n\n{shows}\n\n```\n{table}\n```\n" for title, shows, table in tables)
    (args.output / "tables.md").write_text(f"# Tables of the reproduction\n\n{text}", encoding="utf-8")
    for title, shows, table in tables:
        print(f"{title}\n{shows}\n{table}\n")


def trained_pairs(results: Results) -> list[str]:
    """The mode pairs with at least one trained adapter."""
    return [pair for pair in PAIRS if seeds_of(results, pair)]


def all_tables(results: Results) -> list[Table]:
    """Every table that has rows."""
    asked = "Means over the training seeds; NLL in nats a token, of masks with the routed adapter's mean MSR."
    tables = [Table("What FA-SSA is asked", asked, bars(results))]
    for pair in trained_pairs(results):
        seeds = seeds_of(results, pair)
        title = f"{pair.upper()}, {'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}: NLL"
        shows = "Nats a token, lower is better; MSR and ESR are those of the routed adapters."
        tables.append(Table(title, shows, _nll_rows(set_rows(results, pair))))
    above = "Nats a token, at the routed adapter's mean MSR; below 0 the masks are better than routing."
    tables.append(Table("NLL of static masks above routing", above, margins(results)))
    judged = generalisation(results)
    for condition in dict.fromkeys(row["condition"] for row in judged):
        rows = [{key: value for key, value in row.items() if key != "condition"} for row in judged]
        rows = [row for row, of in zip(rows, judged) if of["condition"] == condition]
        tables.append(Table(f"Does routing follow the task? {condition}", STRAYED, rows))
    rises = "Rise: NLL above full attention, nats a token; the worst set of each kind, and the mean of all."
    pairs = tuple(f"{pair}-seed" for pair in PAIRS)
    return [
        table
        for table in (
            *tables,
            Table("Each seed", rises, outcomes(results, pairs)),
            Table("Other settings than the recipe's", rises, outcomes(results, (REFERENCE, "trade-"))),
            Table("What those settings are", f"The first row, {REFERENCE}, is the recipe.", tried(results)),
            Table("Ablations", f"The recipe, and one change of it a row. {rises}", _means(ablations(results))),
            *conditions(results),
        )
        if table.rows
    ]


def static_masks(results: Results) -> dict[str, list[list[int]]]:
    """The masks for every set, by way of choosing them: 1 = sparse, a row a layer."""
    chosen = ((way, WAYS[way][0], mask) for way, mask in ONE_MASK.items())
    return {way: results[name]["masks"][mask]["mask"] for way, name, mask in chosen if name in results}


def pair_results(results: Results, pair: str, commit: str | None) -> dict[str, Any]:
    """A mode pair's `results.json`: means over its seeds with the spread; static masks beside FA-SSA alone."""
    routed, tasks = trainings(results, pair), set_rows(results, pair)
    ways = tasks[0]["nll"]
    record = {
        "hardware": routed[0]["hardware"],
        "versions": {name: version for name, version in routed[0]["versions"].items() if version},
        "commit": commit,
        "command": COMMAND,
        "seeds": seeds_of(results, pair),
        "examples": routed[0]["tasks"][0]["n"],
        "ways": {way: DESCRIPTIONS[way] for way in ways},
        "tasks": tasks,
        "ablations": ablations(results) if pair == "fa-ssa" else [],
        "ruler": [],
    }
    return record | ({"bars": bars(results), "generalisation": generalisation(results)} if pair == "fa-ssa" else {})


def set_rows(results: Results, pair: str) -> list[dict[str, Any]]:
    """A row for each set: MSR, ESR, and NLL and accuracy of each way of running that can be compared."""
    ways = ways_of(results, pair)
    routed = ways["routed"]
    rows = []
    for name, task in TASKS.items():
        row: dict[str, Any] = {"task": task, "set": name, "t": routed[0]["targets"][task]}
        row |= {ratio: _figure(column(routed, name, ratio)) for ratio in ("msr", "esr", "esr_last_layer")}
        for metric in ("nll", "accuracy"):
            row[metric] = {way: _figure(column(tables, name, metric)) for way, tables in ways.items()}
        rows.append(row)
    return rows


def ablations(results: Results) -> list[dict[str, Any]]:
    """A row for each change to the recipe, after one of the recipe itself, mean over its seeds with the spread."""
    if "bounds" not in results:
        return []
    changed = {name: run for name, run in results.items() if name.startswith("ablation-")}
    full = full_attention(results)
    recipe = [trade(run, full) for run in trainings(results, "fa-ssa")]
    rows = (
        [{"changed": "nothing", **{key: _figure([row[key] for row in recipe]) for key in recipe[0]}}] if recipe else []
    )
    return rows + [{"changed": name.removeprefix("ablation-"), **trade(run, full)} for name, run in changed.items()]


def _figure(values: Sequence[float]) -> float | dict[str, float]:
    return {"mean": mean(values), "std": stdev(values)} if len(values) > 1 else values[0]


def _means(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows without their spread."""

    def plain(value: Any) -> Any:
        return value["mean"] if isinstance(value, Mapping) else value

    return [{key: plain(value) for key, value in row.items()} for row in rows]


def _nll_rows(tasks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return _means({"set": row["set"], "MSR": row["msr"], "ESR": row["esr"], **row["nll"]} for row in tasks)


if __name__ == "__main__":
    main()
