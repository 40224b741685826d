"""What was measured of an adapter: `results.json` beside it, checked, as rows of tables and as the Hub's metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from huggingface_hub import EvalResult

from .checks import is_finite


RESULTS_NAME = "results.json"
ROW_FIELDS = ("task", "set", "t", "msr", "esr")
RULER_FIELDS = {"task": str, "length": int, "mode_pair": str, "score": dict, "msr": float, "esr": float, "n": int}
PARTS = {
    "tasks": list,
    "ruler": list,
    "ablations": list,
    "generalisation": list,
    "seeds": list,
    "datasets": list,
    "versions": dict,
    "ways": dict,
    "sets": dict,
    "notes": dict,
    "hardware": str,
    "commit": str,
    "command": str,
}
#: Parts that `notes` may explain.
NOTED = ("tasks", "ruler", "ablations", "generalisation")
#: Metrics that map each way of running to its figure.
WAYS_OF_RUNNING = ("nll", "accuracy")
HEADINGS = {"msr": "MSR", "esr": "ESR", "nll": "NLL"}


def read_results(path: Path) -> dict[str, Any]:
    """The contents of `results.json`, as `elastic_peft.card.render_card` describes them; empty without the file.

    Raises:
        ValueError: they are not as described.
    """
    if not path.is_file():
        return {}
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"`{path.name}` must be JSON, got {error}.") from error
    if not isinstance(results, dict):
        raise ValueError(f"`{path.name}` must hold an object, got a {type(results).__name__}.")
    for name, kind in PARTS.items():
        if not isinstance(results.get(name), kind | None):
            raise ValueError(f"`{name}` of `{path.name}` must be a {kind.__name__}, got {results[name]!r}.")
    if not results.get("tasks") and not results.get("ruler"):
        raise ValueError(f"`{path.name}` must hold at least one row under `tasks` or `ruler`, got none.")
    if unknown := set(results.get("notes") or {}).difference(NOTED):
        raise ValueError(
            f"`notes` of `{path.name}` must be about {', '.join(NOTED)}, got {', '.join(sorted(unknown))}."
        )
    for part in ("ways", "sets", "notes"):
        for name, description in (results.get(part) or {}).items():
            if not isinstance(description, str):
                raise ValueError(
                    f"`{part}` of `{path.name}` must describe each in words, got {description!r} for {name}."
                )
    if "```" in (results.get("command") or ""):
        raise ValueError(f"`command` of `{path.name}` must not hold ```, got {results['command']!r}.")
    checks: dict[str, Callable[[Mapping[str, Any], str], tuple | None]] = {
        "tasks": _check_task_row,
        "ruler": _check_ruler_row,
    }
    checks |= dict.fromkeys(("ablations", "generalisation"), _check_free_row)
    for part, check in checks.items():
        names: dict[Any, int] = {}
        for index, row in enumerate(results.get(part) or []):
            name = f"`{part}[{index}]` of `{path.name}`"
            if not isinstance(row, dict):
                raise ValueError(f"{name} must hold names and figures, got {row!r}.")
            measured = check(row, name)
            if measured is not None and names.setdefault(measured, index) != index:
                raise ValueError(f"{name} must not measure what another row does, got row {names[measured]} again.")
    return results


def _check_task_row(row: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Returns what the row measures."""
    if not all(isinstance(row.get(metric, {}), dict) for metric in WAYS_OF_RUNNING):
        raise ValueError(f"{name} must map ways of running to figures as `nll` and `accuracy`, got {row!r}.")
    if missing := [field for field in ROW_FIELDS if field not in row]:
        raise ValueError(f"{name} must hold {', '.join(ROW_FIELDS)}, got none for {', '.join(missing)}.")
    if not all(isinstance(row[field], str) and _slug(row[field]) for field in ("task", "set")):
        raise ValueError(f"{name} must name its task and its set, got {row['task']!r} and {row['set']!r}.")
    for field, value in _measured(row):
        if not _is_figure(value):
            raise ValueError(f"{name} must hold finite numbers, got {value!r} for {field}.")
    return row["task"], _slug(row["set"])


def _check_ruler_row(row: Mapping[str, Any], name: str) -> tuple[str, int, str]:
    """Returns what the row measures."""
    for field, kind in RULER_FIELDS.items():
        value = row.get(field)
        is_right = is_finite(value) if kind is float else isinstance(value, kind) and not isinstance(value, bool)
        if not is_right:
            raise ValueError(f"{name} must hold a {kind.__name__} as {field}, got {value!r}.")
    for way, score in row["score"].items():
        if not is_finite(score):
            raise ValueError(f"{name} must hold finite scores, got {score!r} for {way}.")
    return row["task"], row["length"], row["mode_pair"]


def _check_free_row(row: Mapping[str, Any], name: str) -> None:
    for column, value in row.items():
        if value is not None and not isinstance(value, str | bool) and not _is_figure(value):
            raise ValueError(f"{name} must hold texts and finite numbers, got {value!r} for {column}.")


def _measured(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every measured figure of a task's row, its mean where it has a spread, by a name for people."""
    for name in ("msr", "esr"):
        yield HEADINGS[name], _mean(row[name])
    for metric in WAYS_OF_RUNNING:
        for way, value in row.get(metric, {}).items():
            yield f"{HEADINGS.get(metric, metric)}, {way.replace('_', ' ')}", _mean(value)


def eval_results(row: Mapping[str, Any]) -> Iterator[EvalResult]:
    """The adapter's own figures in a task's row, not those of what it is compared with, for the Hub."""
    own = {metric: {"routed": row[metric]["routed"]} for metric in WAYS_OF_RUNNING if "routed" in row.get(metric, {})}
    for name, value in _measured({"msr": row["msr"], "esr": row["esr"], **own}):
        yield EvalResult(
            task_type="text-generation",
            task_name=row["task"],
            dataset_type=_slug(row["set"]),
            dataset_name=row["set"],
            dataset_config=row["task"],
            metric_type=_slug(name),
            metric_name=name,
            metric_value=float(f"{value:.4g}"),
        )


def ruler_means(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """RULER's table, a line for each length: means over its tasks; no figure of a way that did not run all of them."""
    by_length: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_length.setdefault(row["length"], []).append(row)
    table = []
    for length, group in sorted(by_length.items()):
        ways = dict.fromkeys(way for row in group for way in row["score"])
        complete = [way for way in ways if all(way in row["score"] for row in group)]
        table.append(
            {
                "length": length,
                "tasks": len(group),
                "prompts": sum(row["n"] for row in group),
                **{way.replace("_", " "): fmean(row["score"][way] for row in group) for way in complete},
                **{HEADINGS[ratio]: fmean(row[ratio] for row in group) for ratio in ("msr", "esr")},
            }
        )
    return table


def ruler_eval_results(table: Iterable[Mapping[str, Any]]) -> Iterator[EvalResult]:
    """The routed scores of `ruler_means`' lines, as the Hub's metadata holds them."""
    for line in table:
        if "routed" in line:
            yield EvalResult(
                task_type="text-generation",
                task_name="RULER",
                dataset_type="ruler",
                dataset_name=f"RULER, {line['length']} tokens",
                dataset_config=str(line["length"]),
                metric_type="score_routed",
                metric_name=f"mean score of {line['tasks']} tasks, routed",
                metric_value=float(f"{line['routed']:.4g}"),
            )


def by_way(row: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """The part of a task's row that holds `metric`, with a column for each way of running."""
    values = {way.replace("_", " "): value for way, value in row[metric].items()}
    return {"task": row["task"], "set": row["set"], **values}


def _mean(value: Any) -> Any:
    return value["mean"] if isinstance(value, Mapping) and _is_figure(value) else value


def _is_figure(value: Any) -> bool:
    """Whether `value` is a finite number, or a mean and a spread of which both are."""
    if isinstance(value, Mapping):
        return set(value) == {"mean", "std"} and all(map(is_finite, value.values()))
    return is_finite(value)


def _slug(text: str) -> str:
    """`text` as the Hub wants identifiers: letters and digits of any script, joined by underscores."""
    return re.sub(r"[\W_]+", "_", text.lower()).strip("_")
