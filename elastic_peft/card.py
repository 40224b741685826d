"""The model card of a saved adapter: what it does, how to load it, and the figures that lie beside it."""

from __future__ import annotations

import html
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from peft import PeftConfig
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open

from .config import ElasticConfig
from .static_router import is_static


RESULTS_NAME = "results.json"
PICTURE_NAME = "routing.png"
ROW_FIELDS = ("task", "set", "t", "msr", "esr")
RULER_FIELDS = {"task": str, "length": int, "mode_pair": str, "score": dict, "msr": float, "esr": float, "n": int}
PARTS = {
    "tasks": list,
    "ruler": list,
    "ablations": list,
    "seeds": list,
    "datasets": list,
    "versions": dict,
    "hardware": str,
    "commit": str,
    "command": str,
}
HEADINGS = {"msr": "MSR", "esr": "ESR", "nll": "NLL"}
# The template lies in the source tree; a wheel carries it inside the package.
_SOURCE = Path(__file__).parents[1] / "hub_cards"
TEMPLATE = (_SOURCE if _SOURCE.is_dir() else Path(__file__).parent / "cards") / "adapter_card.md"
#: Why a file of the Hub was not read, by the error's class.
UNREAD = {
    RepositoryNotFoundError: "there is no such repository, or it needs a token",
    RevisionNotFoundError: "it has no such revision",
    LocalEntryNotFoundError: "it is not in the cache, and the Hub cannot be reached",
    OfflineModeIsEnabled: "it is not in the cache, and the Hub cannot be reached",
    EntryNotFoundError: f"it has no {CONFIG_NAME} there",
}
MODES = {
    "FA": "full attention",
    "XA": "block-sparse attention (XAttention)",
    "SSA": "streaming attention to a sink and a local window",
}


def render_card(
    directory: str | Path,
    *,
    repo_id: str | None = None,
    subfolder: str | None = None,
    license: str | None = None,
) -> ModelCard:
    """The model card of a saved adapter, with the figures of `results.json` and the picture `routing.png` beside it.

    `results.json` holds `tasks`, a list of rows `{"task", "set", "t", "msr", "esr", "nll", "accuracy"}`; `nll` and
    `accuracy` may be missing, and map a way of running (`"full"`, `"routed"`, ...) to a figure: a number, or
    `{"mean", "std"}` over the seeds. It may hold `ruler`, rows as `recipes/evaluate.py` writes them, of which the card
    shows means over the tasks, and leaves out those of other mode pairs. Beside them it may hold `hardware`,
    `versions`, `commit`, `command`, `seeds`, `datasets` (trained on, as the Hub names them), and rows of any columns
    as `ablations`.

    Args:
        directory: folder of an adapter saved by `save_pretrained`.
        repo_id: where the adapter is loaded from; `None` takes the folder's name.
        subfolder: folder of the repository that it is loaded from.
        license: licence of the adapter's weights, as the Hub names it.

    Returns:
        The card; `card.save(path)` writes it.

    Raises:
        ValueError: no ELASTIC adapter in `directory`, `results.json` is not as described, or `repo_id` is no name of a
            repository.
    """
    directory = Path(directory)
    if repo_id is not None:
        validate_repo_id(repo_id)
    if not (directory / CONFIG_NAME).is_file():
        raise ValueError(f"`directory` must hold a saved adapter, got {str(directory)!r} without {CONFIG_NAME}.")
    config = read_config(directory)
    results = _read_results(directory / RESULTS_NAME)
    base_model = _model_id_on_the_hub(config.base_model_name_or_path, directory.resolve())
    adapter = repo_id or directory.resolve().name
    title = adapter.split("/")[-1]
    rows = results.get("tasks") or []
    ruler = _ruler_means(row for row in results.get("ruler") or [] if row["mode_pair"] == config.mode_pair)
    eval_results = [*(result for row in rows for result in _eval_results(row)), *_ruler_results(ruler)]
    data = ModelCardData(
        base_model=base_model,
        library_name="peft",
        pipeline_tag="text-generation" if config.task_type == "CAUSAL_LM" else None,
        license=license,
        datasets=results.get("datasets"),
        tags=[
            "transformers",
            "elastic-attention",
            "sparse-attention",
            "long-context",
            config.mode_pair.lower(),
            *([f"base_model:adapter:{base_model}"] if base_model else []),
        ],
        model_name=title if eval_results else None,
        eval_results=eval_results or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=title,
        adapter=adapter,
        subfolder=subfolder,
        base_model=base_model,
        license=license,
        auto_class="AutoModel" if config.task_type == "FEATURE_EXTRACTION" else "AutoModelForCausalLM",
        config=config,
        static=_is_static(directory),
        layers=sorted(config.num_key_value_heads or {}),
        modes=MODES,
        text=_text,
        code=_code,
        picture=PICTURE_NAME if (directory / PICTURE_NAME).is_file() else None,
        results=results if eval_results else {},
        seeds=results.get("seeds"),
        sparsity=_table([{HEADINGS.get(name, name): row[name] for name in ROW_FIELDS} for row in rows]),
        nll=_table([_by_way(row, "nll") for row in rows if "nll" in row]),
        accuracy=_table([_by_way(row, "accuracy") for row in rows if "accuracy" in row]),
        ruler=_table(ruler),
        ablations=_table(results.get("ablations") or []),
    )


def read_config(adapter: str | Path, *, revision: str | None = None, subfolder: str | None = None) -> ElasticConfig:
    """The configuration of a saved ELASTIC adapter, whose weights are there and readable.

    Args:
        adapter: folder of the adapter, or its repository on the Hub.
        revision: branch, tag or commit of the repository; `None` is `"main"`.
        subfolder: folder of the adapter in there.

    Returns:
        The configuration.

    Raises:
        ValueError: there is no adapter, or one of another kind; its configuration or its weights are damaged.
    """
    folder = Path(adapter, subfolder or "")
    # PEFT would look for a folder without a configuration on the Hub.
    if Path(adapter).exists():
        if not (folder / CONFIG_NAME).is_file():
            raise ValueError(f"`adapter` must hold a saved adapter, got {str(folder)!r} without {CONFIG_NAME}.")
        if revision is not None:
            raise ValueError(f"`revision` must not be given for a folder, got {revision!r}.")
    else:
        _check_is_repo_id(adapter)
    place: dict[str, Any] = {"revision": revision, "subfolder": subfolder}
    try:
        config = PeftConfig.from_pretrained(adapter, **place)
        if isinstance(config, ElasticConfig):
            config = ElasticConfig.from_pretrained(adapter, **place)  # checks the weights too
    except ValueError as error:
        if reason := next((words for kind, words in UNREAD.items() if isinstance(error.__cause__, kind)), None):
            raise ValueError(f"`adapter` {str(adapter)!r} cannot be read from the Hub: {reason}.") from error
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            raise ValueError(f"`adapter` must have a readable {CONFIG_NAME}, got {error!r}.") from error
        raise
    except (AttributeError, KeyError, TypeError) as error:
        # PEFT takes the form of the file for granted.
        raise ValueError(f"`adapter` must have a readable {CONFIG_NAME}, got {error!r}.") from error
    if not isinstance(config, ElasticConfig):
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise ValueError(f"`adapter` must be an ELASTIC adapter, got one of type {kind}.")
    heads = config.num_key_value_heads
    if (
        not isinstance(config.head_dim, int)
        or not heads
        or not all(isinstance(count, int) for count in heads.values())
    ):
        raise ValueError(
            f"`adapter` must note its base model's `head_dim` and `num_key_value_heads` in {CONFIG_NAME}, got "
            f"{config.head_dim!r} and {heads!r}."
        )
    return config


def _is_static(directory: Path) -> bool:
    """Whether the adapter's decisions are fixed, as those of a converted head pattern."""
    with safe_open(directory / SAFETENSORS_WEIGHTS_NAME, framework="pt") as weights:
        deviations = [name for name in weights.keys() if name.endswith("standardizer.deviation")]  # noqa: SIM118
        return bool(deviations) and all(is_static(weights.get_tensor(name)) for name in deviations)


def _check_is_repo_id(adapter: str | Path) -> None:
    try:
        validate_repo_id(str(adapter))
    except HFValidationError as error:
        raise ValueError(
            f"`adapter` must be a folder that exists or a repository on the Hub, got {str(adapter)!r}."
        ) from error


def _read_results(path: Path) -> dict[str, Any]:
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
    if "```" in (results.get("command") or ""):
        raise ValueError(f"`command` of `{path.name}` must not hold ```, got {results['command']!r}.")
    for part, check in (("tasks", _check_task_row), ("ruler", _check_ruler_row), ("ablations", _check_ablation_row)):
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
    if not all(isinstance(row.get(metric, {}), dict) for metric in ("nll", "accuracy")):
        raise ValueError(f"{name} must map ways of running to figures as `nll` and `accuracy`, got {row!r}.")
    if missing := [field for field in ROW_FIELDS if field not in row]:
        raise ValueError(f"{name} must hold {', '.join(ROW_FIELDS)}, got none for {', '.join(missing)}.")
    if not all(isinstance(row[field], str) and _slug(row[field]) for field in ("task", "set")):
        raise ValueError(f"{name} must name its task and its set, got {row['task']!r} and {row['set']!r}.")
    for field, value in _measured(row):
        if not _is_finite(value):
            raise ValueError(f"{name} must hold finite numbers, got {value!r} for {field}.")
    return row["task"], _slug(row["set"])


def _check_ruler_row(row: Mapping[str, Any], name: str) -> tuple[str, int, str]:
    """Returns what the row measures."""
    for field, kind in RULER_FIELDS.items():
        value = row.get(field)
        is_right = _is_number(value) if kind is float else isinstance(value, kind) and not isinstance(value, bool)
        if not is_right:
            raise ValueError(f"{name} must hold a {kind.__name__} as {field}, got {value!r}.")
    for way, score in row["score"].items():
        if not _is_number(score):
            raise ValueError(f"{name} must hold finite scores, got {score!r} for {way}.")
    return row["task"], row["length"], row["mode_pair"]


def _check_ablation_row(row: Mapping[str, Any], name: str) -> None:
    for column, value in row.items():
        if value is not None and not isinstance(value, str | bool) and not _is_finite(value):
            raise ValueError(f"{name} must hold texts and finite numbers, got {value!r} for {column}.")


def _measured(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every measured figure of a task's row, its mean where it has a spread, by a name for people."""
    for name in ("msr", "esr"):
        yield HEADINGS[name], _mean(row[name])
    for metric in ("nll", "accuracy"):
        for way, value in row.get(metric, {}).items():
            yield f"{HEADINGS.get(metric, metric)}, {way.replace('_', ' ')}", _mean(value)


def _eval_results(row: Mapping[str, Any]) -> Iterator[EvalResult]:
    for name, value in _measured(row):
        yield EvalResult(
            task_type="text-generation",
            task_name=row["task"],
            dataset_type=_slug(row["set"]),
            dataset_name=row["set"],
            dataset_config=row["task"],
            metric_type=_slug(name),
            metric_name=name,
            metric_value=value,
        )


def _ruler_means(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
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


def _ruler_results(table: Iterable[Mapping[str, Any]]) -> Iterator[EvalResult]:
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
                metric_value=line["routed"],
            )


def _model_id_on_the_hub(name: Any, directory: Path) -> str | None:
    """`name`, unless it is a folder: the Hub refuses a card that names one as base model.

    A relative path is one seen from where the adapter was made: here, or a folder that the adapter lies in.
    """
    if not isinstance(name, str):
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    starts = (Path.cwd(), directory, *directory.parents)
    return None if any(os.path.exists(start / name) for start in starts) else name


def _by_way(row: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """The part of a task's row that holds `metric`, with a column for each way of running."""
    values = {way.replace("_", " "): value for way, value in row[metric].items()}
    return {"task": row["task"], "set": row["set"], **values}


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table: one line a row, one column for each key, in the order in which the rows first name them."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [
        map(_text, columns),
        ["---"] * len(columns),
        *([_text(row.get(name)) for name in columns] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(value: Any) -> str:
    """`value` as one line of Markdown that cannot end a table's cell and holds no HTML; figures with four digits."""
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return f"{value['mean']:.4g} \N{PLUS-MINUS SIGN} {value['std']:.2g}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return html.escape(" ".join(str(value).split()), quote=False).replace("|", "&#124;")


def _code(value: str) -> str:
    """`value` as a string of Python, on one line."""
    return json.dumps(value, ensure_ascii=False).replace("```", r"\x60\x60\x60")


def _mean(value: Any) -> Any:
    return value["mean"] if isinstance(value, Mapping) and _is_finite(value) else value


def _is_finite(value: Any) -> bool:
    """Whether `value` is a finite number, or a mean and a spread of which both are."""
    if isinstance(value, Mapping):
        return set(value) == {"mean", "std"} and all(map(_is_number, value.values()))
    return _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _slug(text: str) -> str:
    """`text` as the Hub wants identifiers: letters and digits of any script, joined by underscores."""
    return re.sub(r"[\W_]+", "_", text.lower()).strip("_")
