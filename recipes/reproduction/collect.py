"""Gathers what the jobs measured: `results.json` of each mode pair, and tables of what was compared.

    cd recipes
    python -m reproduction.collect --output ../out/reproduction --commit COMMIT

Writes anew `{output}/{pair}/results.json`, the masks `{output}/static_masks.json` for `recipes/evaluate.py --static`,
and the tables, `{output}/tables.md`. What no job has measured yet is left out, and so is, with a line that says so,
what was measured on other examples than the routed adapters.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from reproduction.examples import TASKS
from reproduction.findings import bars
from reproduction.generalisation import judgements
from reproduction.generalisation_tables import explain, long_rows, pivot
from reproduction.jobs import REFERENCE, UNCHANGED
from reproduction.results import Results, read_all, static_masks
from reproduction.ruler_tables import ruler_note, ruler_rows, ruler_table
from reproduction.tables import (
    TRADES,
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
from reproduction.words import CHOSEN, COMMAND, CROSSED_DOCUMENTS, DESCRIPTIONS, JUDGED, REPEATED, RISES, SETS

from elastic_peft.report import routing_table


PAIRS = ("fa-ssa", "fa-xa", "xa-ssa")


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
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (args.output / "static_masks.json").write_text(json.dumps(static_masks(results)), encoding="utf-8")
    text = tables_text(results)
    (args.output / "tables.md").write_text(text, encoding="utf-8")
    print(text)


def trained_pairs(results: Results) -> list[str]:
    """The mode pairs with at least one trained adapter."""
    return [pair for pair in PAIRS if seeds_of(results, pair)]


def tables_text(results: Results) -> str:
    """Every table that has rows, as Markdown."""
    parts = ["# Tables of the reproduction\n"]
    for table in all_tables(results):
        parts.append(f"## {table.title}\n\n{table.shows}\n\n```\n{routing_table(table.rows)}\n```\n")
    return "\n".join(parts)


def all_tables(results: Results) -> list[Table]:
    """Every table that has rows."""
    asked = (
        "Means over the training seeds; NLL in nats a token. Static masks have the mean MSR of the first seed's "
        "adapter: the mean over their draws or seeds, less the routed adapters' mean."
    )
    tables = [Table("What FA-SSA is asked", asked, bars(results))]
    for pair in trained_pairs(results):
        seeds = seeds_of(results, pair)
        title = f"{pair.upper()}, {'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}: NLL"
        shows = "Nats a token, lower is better; MSR and ESR are those of the routed adapters."
        tables.append(Table(title, shows, _nll_rows(set_rows(results, pair))))
    above = (
        "Nats a token: the mean over the measured masks, all with the mean MSR of the first seed's adapter, less the "
        f"mean over the routed adapters, {len(seeds_of(results, 'fa-ssa'))}; below 0 the masks are better."
    )
    tables.append(Table("NLL of static masks above routing", above, margins(results)))
    for condition, rows in long_rows(judgements(results)).items():
        tables.append(Table(f"Does routing follow the task? {condition}", JUDGED, rows))
    pairs = tuple(f"{pair}-seed" for pair in PAIRS)
    return [
        table
        for table in (
            *tables,
            Table("Each seed", RISES, outcomes(results, pairs)),
            Table("Other settings than the recipe's", RISES, outcomes(results, (REFERENCE, *TRADES))),
            Table(
                "What those settings are",
                f"The first row, {REFERENCE}, is the recipe. {CROSSED_DOCUMENTS}",
                tried(results),
            ),
            ablations(results),
            *conditions(results),
            *(ruler_table(ruler_rows(results, pair), pair) for pair in trained_pairs(results)),
        )
        if table.rows
    ]


def pair_results(results: Results, pair: str, commit: str | None) -> dict[str, Any]:
    """A mode pair's `results.json`: means over its seeds with the spread; static masks beside FA-SSA alone."""
    routed, tasks = trainings(results, pair), set_rows(results, pair)
    judged = judgements(results) if pair == "fa-ssa" else []
    ablated = ablations(results)
    record = {
        "hardware": routed[0]["hardware"],
        "versions": {name: version for name, version in routed[0]["versions"].items() if version},
        "commit": commit,
        "command": COMMAND,
        "seeds": seeds_of(results, pair),
        "examples": routed[0]["tasks"][0]["n"],
        "ways": {way: _describe(way, len(tables)) for way, tables in ways_of(results, pair).items()},
        "sets": SETS,
        "tasks": tasks,
        "bars": bars(results) if pair == "fa-ssa" else [],
        "generalisation": pivot(judged),
        "ablations": ablated.rows if pair == "fa-ssa" else [],
        "ruler": ruler_rows(results, pair),
    }
    return record | {"notes": _notes(record, explain(judged), ablated.shows)}


def _describe(way: str, count: int) -> str:
    if way not in REPEATED:
        return DESCRIPTIONS[way]
    return f"{DESCRIPTIONS[way]}; {f'mean over {count} {REPEATED[way]}s' if count > 1 else f'one {REPEATED[way]}'}"


def _notes(record: Mapping[str, Any], generalisation: str, ablated: str) -> dict[str, str]:
    """What a reader must know of each part that there is."""
    notes = {
        "tasks": f"{record['examples']} evaluation prompts of each set, at most 4096 tokens with the answer. {CHOSEN}",
        "ruler": ruler_note(record["ruler"]),
        "generalisation": generalisation,
        "ablations": ablated,
    }
    return {part: note for part, note in notes.items() if record[part]}


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


def ablations(results: Results) -> Table:
    """A row for each change of the recipe, after one of none; no rows without that one."""
    if "bounds" not in results or UNCHANGED not in results:
        return Table("Ablations", "", [])
    full = full_attention(results)
    runs = {name: run for name, run in results.items() if name.startswith("ablation-")}
    rows = [{"changed": name.removeprefix("ablation-"), **trade(run, full)} for name, run in runs.items()]
    steps = results[UNCHANGED]["recipe"]["arguments"]["max_steps"]
    shows = f"Trainings of half the recipe's steps, {steps}, one seed each; one change a row, in the first none."
    return Table("Ablations", f"{shows} {RISES}", rows)


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
