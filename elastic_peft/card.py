"""The model card of a saved adapter: what it does, how to load it, and the figures that lie beside it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from peft import PeftConfig
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open

from .config import ElasticConfig
from .static_router import is_static


RESULTS_NAME = "results.json"
PICTURE_NAME = "routing.png"
ROW_FIELDS = ("task", "set", "t", "msr", "esr")
HEADINGS = {"msr": "MSR", "esr": "ESR", "nll": "NLL"}
# The template lies in the source tree; a wheel carries it inside the package.
_SOURCE = Path(__file__).parents[1] / "hub_cards"
TEMPLATE = (_SOURCE if _SOURCE.is_dir() else Path(__file__).parent / "cards") / "adapter_card.md"
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
    `{"mean", "std"}` over the seeds. Beside `tasks` it may hold `hardware`, `versions`, `commit`, `command`, `seeds`,
    `datasets` (trained on, as the Hub names them), and rows of any columns as `ruler` and as `ablations`.

    Args:
        directory: folder of an adapter saved by `save_pretrained`.
        repo_id: where the adapter is loaded from; `None` takes the folder's name.
        subfolder: folder of the repository that it is loaded from.
        license: licence of the adapter's weights, as the Hub names it.

    Returns:
        The card; `card.save(path)` writes it.

    Raises:
        ValueError: no ELASTIC adapter in `directory`, or `results.json` is not as described.
    """
    directory = Path(directory)
    config = _read_config(directory)
    results = _read_results(directory / RESULTS_NAME)
    base_model = _model_id_on_the_hub(config.base_model_name_or_path)
    adapter = repo_id or directory.resolve().name
    title = adapter.split("/")[-1]
    rows = results.get("tasks", [])
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
        model_name=title if rows else None,
        eval_results=[result for row in rows for result in _eval_results(row)] or None,
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
        figure=_figure,
        picture=PICTURE_NAME if (directory / PICTURE_NAME).is_file() else None,
        results=results,
        seeds=results.get("seeds"),
        sparsity=_table([{HEADINGS.get(name, name): row[name] for name in ROW_FIELDS} for row in rows]),
        nll=_table([_by_way(row, "nll") for row in rows if "nll" in row]),
        accuracy=_table([_by_way(row, "accuracy") for row in rows if "accuracy" in row]),
        ruler=_table(results.get("ruler", [])),
        ablations=_table(results.get("ablations", [])),
    )


def _read_config(directory: Path) -> ElasticConfig:
    # PEFT would look for a folder without a configuration on the Hub.
    if not (directory / CONFIG_NAME).is_file():
        raise ValueError(f"`directory` must hold a saved adapter, got {str(directory)!r} without {CONFIG_NAME}.")
    config = PeftConfig.from_pretrained(directory)
    if not isinstance(config, ElasticConfig):
        raise ValueError(f"`directory` must hold an ELASTIC adapter, got a {type(config).__name__}.")
    return config


def _is_static(directory: Path) -> bool:
    """Whether the adapter's decisions are fixed, as those of a converted head pattern."""
    with safe_open(directory / SAFETENSORS_WEIGHTS_NAME, framework="pt") as weights:
        deviations = [name for name in weights.keys() if name.endswith("standardizer.deviation")]  # noqa: SIM118
        return bool(deviations) and all(is_static(weights.get_tensor(name)) for name in deviations)


def _read_results(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"`{path.name}` must be JSON, got {error}.") from error
    rows = results.get("tasks") if isinstance(results, dict) else None
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"`{path.name}` must hold a list of at least one row under `tasks`, got {rows!r}.")
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or not all(
            isinstance(row.get(metric, {}), dict) for metric in ("nll", "accuracy")
        ):
            raise ValueError(f"`tasks` of `{path.name}` must hold rows of names and figures, got {row!r}.")
        name = f"`tasks[{index}]` of `{path.name}`"
        if missing := [field for field in ROW_FIELDS if field not in row]:
            raise ValueError(f"{name} must hold {', '.join(ROW_FIELDS)}, got none for {', '.join(missing)}.")
        if not all(isinstance(row[field], str) and row[field] for field in ("task", "set")):
            raise ValueError(f"{name} must name its task and its set, got {row['task']!r} and {row['set']!r}.")
        for field, value in _measured(row):
            if not _is_finite(value):
                raise ValueError(f"{name} must hold finite numbers, got {value!r} for {field}.")
    return results


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


def _model_id_on_the_hub(name: str | None) -> str | None:
    """`name`, unless it is a folder: the Hub refuses a card that names one as base model."""
    if not name or Path(name).exists():
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _by_way(row: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """The part of a task's row that holds `metric`, with a column for each way of running."""
    values = {way.replace("_", " "): value for way, value in row[metric].items()}
    return {"task": row["task"], "set": row["set"], **values}


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table: one line a row, one column for each key, in the order in which the rows first name them."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([_figure(row.get(name)) for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return f"{value['mean']:.4g} \N{PLUS-MINUS SIGN} {value['std']:.2g}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _mean(value: Any) -> Any:
    return value["mean"] if isinstance(value, Mapping) and _is_finite(value) else value


def _is_finite(value: Any) -> bool:
    """Whether `value` is a finite number, or a mean and a spread of which both are."""
    if isinstance(value, Mapping):
        return set(value) == {"mean", "std"} and all(map(_is_finite, value.values()))
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _slug(text: str) -> str:
    """`text` as the Hub wants identifiers."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
