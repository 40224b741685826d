"""Tables of what the reproduction compared, one row a training or a set."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

from reproduction.examples import ROBUST, SENSITIVE, TASKS
from reproduction.jobs import ONE_MASK, REFERENCE, SEEDS
from reproduction.results import Results, mean_msr


class Table(NamedTuple):
    """Rows under a title, and what they show in one sentence."""

    title: str
    shows: str
    rows: list[dict[str, Any]]


#: How the names of trainings begin that show other settings than the recipe's.
TRADES = ("trade-", "one-task-seed")
#: Ways of running a set beside `routed`: the result that measured them, further ones by seed, and the masks' name.
WAYS = {**ONE_MASK, "static_category": ("masks-category", "category")}


def seeds_of(results: Results, pair: str) -> list[int]:
    """Seeds with which a mode pair's adapter has been trained, less those measured on more or fewer examples."""
    runs = _trained(results, pair)
    return [seed for seed, run in runs.items() if _other_count(run, next(iter(runs.values()))) is None]


def _trained(results: Results, pair: str) -> dict[int, dict[str, Any]]:
    return {seed: results[f"{pair}-seed{seed}"] for seed in SEEDS if f"{pair}-seed{seed}" in results}


def trainings(results: Results, pair: str) -> list[dict[str, Any]]:
    """The results of a mode pair's adapter, one for each of `seeds_of`."""
    return [results[f"{pair}-seed{seed}"] for seed in seeds_of(results, pair)]


def ways_of(results: Results, pair: str) -> dict[str, list[dict[str, Any]]]:
    """The tables of each way of running a mode pair that can be compared with its routed adapters, and of those.

    Figures of a set are means over its first examples, so a way that measured more or fewer of them is left out.
    """
    routed = trainings(results, pair)
    return {
        way: tables
        for way, tables in _measured_ways(results, pair).items()
        if routed and all(_other_count(table, routed[0]) is None for table in tables)
    }


def left_out(results: Results, pair: str) -> list[str]:
    """A line for each way, and for each seed, that is not compared: measured on more or fewer examples."""
    runs = _trained(results, pair)
    if not runs:
        return []
    candidates = [(f"routed, seed {seed}", run) for seed, run in runs.items()]
    candidates += [(way, table) for way, tables in _measured_ways(results, pair).items() for table in tables]
    first = next(iter(runs.values()))
    counts = dict.fromkeys((what, _other_count(table, first)) for what, table in candidates)
    return [
        f"left out of {pair.upper()}: {what}, measured on {count[0]} examples and not on {count[1]}"
        for what, count in counts
        if count is not None
    ]


def _measured_ways(results: Results, pair: str) -> dict[str, list[dict[str, Any]]]:
    """The tables of each way of running a mode pair; static masks beside FA-SSA alone."""
    bounds = "bounds" if pair == "fa-ssa" else f"bounds-{pair}"
    ways = {
        "full": static_tables(results, "bounds", "full"),
        "all_retrieval": static_tables(results, bounds, "all_retrieval"),
        "all_sparse": static_tables(results, bounds, "all_sparse"),
        "routed": trainings(results, pair),
    }
    if pair == "fa-ssa":
        ways |= {way: static_tables(results, name, masks) for way, (name, masks) in WAYS.items()}
    return {way: tables for way, tables in ways.items() if tables}


def _other_count(table: Mapping[str, Any], first: Mapping[str, Any]) -> tuple[int, int] | None:
    """Examples that each of the tables measured, of the first set of which they measured different numbers."""
    pairs = ((row_of(table, row["set"])["n"], row["n"]) for row in first["tasks"])
    return next((counts for counts in pairs if counts[0] != counts[1]), None)


def full_attention(results: Results) -> dict[str, Any]:
    """The table of full attention."""
    return results["bounds"]["masks"]["full"]


def static_tables(results: Results, name: str, masks: str) -> list[dict[str, Any]]:
    """The tables of masks whose names begin with `masks`, of a result and of its further seeds, if there."""
    jobs = (name, *(f"{name}-seed{seed}" for seed in SEEDS[1:]))
    entries = (entry for job in jobs if job in results for entry in results[job]["masks"].items())
    return [table for mask, table in entries if mask.startswith(masks)]


def row_of(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A set's row of a table."""
    return next(row for row in table["tasks"] if row["set"] == name)


def column(tables: Iterable[Mapping[str, Any]], name: str, metric: str) -> list[float]:
    """One figure of a set from each table that holds the set."""
    return [row[metric] for table in tables for row in table["tasks"] if row["set"] == name]


def rise(table: Mapping[str, Any], full: Mapping[str, Any], name: str) -> float:
    """By how much a set's NLL is above full attention's, over the examples that both measured: the first ones."""
    pairs = zip(row_of(table, name)["nll_by_example"], row_of(full, name)["nll_by_example"])
    return mean(routed - dense for routed, dense in pairs)


def trade(table: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, float]:
    """A routed training in short: MSR of both kinds of sets, and how far NLL rose over full attention in the worst."""
    sensitive, robust = mean_msr(table, SENSITIVE), mean_msr(table, ROBUST)
    return {
        "MSR sensitive": sensitive,
        "MSR robust": robust,
        "apart": robust - sensitive,
        "worst rise, sensitive": max(rise(table, full, name) for name in SENSITIVE),
        "worst rise, robust": max(rise(table, full, name) for name in ROBUST),
        "mean rise": mean(rise(table, full, name) for name in TASKS),
    }


def settings(result: Mapping[str, Any]) -> dict[str, Any]:
    """What trainings differ in; targets of the robust sets are one number, or one for each set.

    Documents are crossed where they came with other tasks than their set's too.
    """
    config, arguments = result["recipe"]["config"], result["recipe"]["arguments"]
    targets = [f"{config['t_values'][TASKS[name]]:g}" for name in ROBUST]
    return {
        "window": config["window_size"],
        "pool": config["pool_size"] or "all",
        "t robust": targets[0] if len(set(targets)) == 1 else "/".join(targets),
        "steps": arguments["max_steps"],
        "answer tokens": result["job"]["answer_tokens"] or "all",
        "multiplier lr": f"{arguments['multiplier_learning_rate']:g}",
        "counterfactual": arguments.get("counterfactual_fraction"),
        "documents": "crossed" if result["job"].get("is_crossed") else None,
    }


def outcomes(results: Results, beginnings: tuple[str, ...]) -> list[dict[str, Any]]:
    """How each routed training came out whose name begins with one of `beginnings`."""
    if "bounds" not in results:
        return []
    full = full_attention(results)
    found = {
        name: run for name, run in results.items() if name.startswith(beginnings) and run["job"]["kind"] == "train"
    }
    return [{"training": name, **trade(run, full)} for name, run in found.items()]


def tried(results: Results) -> list[dict[str, Any]]:
    """The settings of the recipe, and of each training with others."""
    trained = [name for name, result in results.items() if result["job"]["kind"] == "train"]
    names = [name for name in trained if name == REFERENCE or name.startswith(TRADES)]
    return [{"training": name, **settings(results[name])} for name in names]


def margins(results: Results) -> list[dict[str, Any]]:
    """A row for each way of choosing masks: by how much the mean of its NLL on each set is above routing's mean."""
    ways = ways_of(results, "fa-ssa")

    def nll(way: str, name: str) -> float:
        return mean(column(ways[way], name, "nll"))

    return [
        {"masks": way, "measured": len(ways[way]), **{name: nll(way, name) - nll("routed", name) for name in TASKS}}
        for way in WAYS
        if way in ways
    ]


def conditions(results: Results) -> list[Table]:
    """Tables of one adapter in other conditions."""
    tables = []
    for name, result in results.items():
        if "lengths" in result:
            for length, ways in result["lengths"].items():
                shows = "Prompts of another length than those trained on."
                tables.append(Table(f"{name}: {length} tokens", shows, _side_by_side(ways)))
        if "bias" in result:
            tables.append(_dialled(results, name))
        if "together" in result:
            shows = f"All sets in one batch: {result['same_decisions']:.2%} of the decisions are those of single rows."
            ways = {way: result[way] for way in ("together", "alone")}
            tables.append(Table(f"{name}: mixed batches", shows, _side_by_side(ways, ("msr", "nll"))))
        if "sampled" in result:
            shows = "Decisions drawn as in training, not the most likely ones."
            rows = _side_by_side({"sampled": result["sampled"]}, ("msr", "nll"))
            tables.append(Table(f"{name}: sampled decisions", shows, rows))
        if "crossed" in result:
            shows = "The same documents with another task than their set's."
            adapter = result["job"]["needs"][0]
            title = f"Other tasks over the same documents: {adapter}"
            tables.append(Table(title, shows, _side_by_side(result["crossed"])))
    return tables


def _dialled(results: Results, name: str) -> Table:
    """The least and the greatest bias beside the adapter as trained, if its own result is there."""
    biases = {float(bias): table for bias, table in results[name]["bias"].items()}
    biases = {bias: biases[bias] for bias in (min(biases), max(biases))}
    adapter = results[name]["job"]["needs"][0]
    if adapter in results:
        biases[0.0] = results[adapter]
    ways = {f"at {bias:+g}" if bias else "at 0": biases[bias] for bias in sorted(biases)}
    shows = "The same adapter, dialled: what is added to the logit of the sparse mode."
    return Table(f"{name}: sparsity_bias", shows, _side_by_side(ways, ("msr", "nll")))


def _side_by_side(ways: Mapping[str, Any], metrics: Sequence[str] = ("nll",)) -> list[dict[str, Any]]:
    """A row for each set: the routed MSR if there is a `routed`, then each metric of each way."""
    rows = []
    for entry in next(iter(ways.values()))["tasks"]:
        name = entry["set"]
        row = {"set": name, "n": entry["n"]}
        if "routed" in ways:
            row["MSR"] = row_of(ways["routed"], name)["msr"]
        rows.append(row | {f"{m} {way}": row_of(table, name)[m] for way, table in ways.items() for m in metrics})
    return rows
