"""The model card of a saved adapter: what it does, how to load it, and the figures that lie beside it."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from peft.utils import CONFIG_NAME

from .printable import printable
from .results import (
    HEADINGS,
    RESULTS_NAME,
    ROW_FIELDS,
    by_way,
    eval_results,
    read_results,
    ruler_eval_results,
    ruler_means,
)
from .saved import has_fixed_decisions, read_config


PICTURE_NAME = "routing.png"
# The template lies in the source tree; a wheel carries it inside the package.
_SOURCE = Path(__file__).parents[1] / "hub_cards"
TEMPLATE = (_SOURCE if _SOURCE.is_dir() else Path(__file__).parent / "cards") / "adapter_card.md"
MODES = {
    "FA": "full attention",
    "XA": "block-sparse attention (XAttention)",
    "SSA": "streaming attention to a sink and a local window",
}
#: Characters of figures after the point; scores of RULER, from 0 to 100, have one less.
DECIMALS = 3
#: Characters a reader does not see, or that reorder those around them; tabs are kept.
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


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
    shows means over the tasks, and leaves out those of other mode pairs. Beside them it may hold `ways` (a way of
    running to what it is), `sets` (a set to what it holds), `hardware`, `versions`, `commit`, `command`, `seeds` (the
    adapter's own first), `datasets` (trained on, as the Hub names them), and rows of any columns as `ablations` and as
    `generalisation`: prompts unlike those trained on. `notes` maps `tasks`, `ruler`, `ablations` and `generalisation`
    to what a reader must know of them, in paragraphs.

    Args:
        directory: folder of an adapter saved by `save_pretrained`.
        repo_id: where the adapter is loaded from; `None` takes `directory` if that is a path down from the current
            folder, and the folder's name otherwise.
        subfolder: folder of the repository that it is loaded from.
        license: licence of the adapter's weights, as the Hub names it.

    Returns:
        The card; `card.save(path)` writes it.

    Raises:
        ValueError: no ELASTIC adapter in `directory`, `results.json` is not as described, or `repo_id` is no name of a
            repository.

    Numerics:
        Figures have three decimals, smaller ones two significant digits.
    """
    directory = Path(directory)
    if repo_id is not None:
        validate_repo_id(repo_id)
    if not (directory / CONFIG_NAME).is_file():
        raise ValueError(f"`directory` must hold a saved adapter, got {str(directory)!r} without {CONFIG_NAME}.")
    config = read_config(directory)
    results = read_results(directory / RESULTS_NAME)
    base_model = _model_id_on_the_hub(config.base_model_name_or_path, directory.resolve())
    adapter = repo_id or _folder(directory)
    title = adapter.split("/")[-1]
    rows = results.get("tasks") or []
    ruler = ruler_means(row for row in results.get("ruler") or [] if row["mode_pair"] == config.mode_pair)
    figures = [*(figure for row in rows for figure in eval_results(row)), *ruler_eval_results(ruler)]
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
        model_name=title if figures else None,
        eval_results=figures or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=title,
        adapter=adapter,
        is_folder=repo_id is None,
        subfolder=subfolder,
        base_model=base_model,
        license=license,
        auto_class="AutoModel" if config.task_type == "FEATURE_EXTRACTION" else "AutoModelForCausalLM",
        config=config,
        static=has_fixed_decisions(directory),
        layers=sorted(config.num_key_value_heads or {}),
        modes=MODES,
        text=_text,
        paragraphs=_paragraphs,
        code=_code,
        lines=_lines,
        picture=PICTURE_NAME if (directory / PICTURE_NAME).is_file() else None,
        results=results if figures else {},
        notes=results.get("notes") or {},
        seeds=results.get("seeds"),
        sparsity=_table([_ratios(row) for row in rows]),
        nll=_table([by_way(row, "nll") for row in rows if "nll" in row]),
        accuracy=_table([by_way(row, "accuracy") for row in rows if "accuracy" in row]),
        ruler=_table(ruler, DECIMALS - 1),
        ablations=_table(results.get("ablations") or []),
        generalisation=_table(results.get("generalisation") or []),
    )


def _folder(directory: Path) -> str:
    """Where an adapter is loaded from that has no repository; no absolute path, which means nothing elsewhere."""
    is_below = directory.parts and not directory.is_absolute() and ".." not in directory.parts
    return directory.as_posix() if is_below else directory.resolve().name


def _ratios(row: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a task's row that says how sparse it ran; its target is a setting."""
    cells = {HEADINGS.get(name, name): row[name] for name in ROW_FIELDS}
    return cells | ({"t": f"{row['t']:g}"} if isinstance(row["t"], float) else {})


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


def _table(rows: Sequence[Mapping[str, Any]], decimals: int = DECIMALS) -> str:
    """A Markdown table: one line a row, one column for each key, in the order in which the rows first name them."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [
        map(_text, columns),
        ["---"] * len(columns),
        *([_cell(row.get(name), decimals) for name in columns] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any, decimals: int) -> str:
    """`value` as `_text` writes it, figures with so many decimals; one that these would show as 0 with two digits."""
    if isinstance(value, Mapping):
        return f"{value['mean']:z.{decimals}f} \N{PLUS-MINUS SIGN} {value['std']:.{decimals}f}"
    if not isinstance(value, float):
        return _text(value)
    return f"{value:.2g}" if 0 < abs(value) < 10**-decimals else f"{value:z.{decimals}f}"


def _text(value: Any) -> str:
    """`value` as one line of Markdown that cannot end a table's cell and holds no HTML."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:g}"
    return html.escape(_visible(" ".join(str(value).split())), quote=False).replace("|", "&#124;")


def _paragraphs(text: str) -> str:
    """The same for each paragraph of a text."""
    return "\n\n".join(_text(paragraph) for paragraph in re.split(r"\n\s*\n", text.strip()))


def _code(value: str) -> str:
    """`value` as a string of Python, on one line."""
    return _visible(json.dumps(value, ensure_ascii=False)).replace("```", r"\x60\x60\x60")


def _visible(text: str) -> str:
    """`text` that a file can hold and a reader sees: lone surrogates and control characters come as escapes."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), printable(text))


def _lines(text: str) -> str:
    """The same for some lines."""
    return "\n".join(map(_visible, text.removesuffix("\n").split("\n")))
