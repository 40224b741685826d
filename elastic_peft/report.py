"""What was routed and measured, for people: a plain table, a heat map and a page."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from .context import RoutingRecord


if TYPE_CHECKING:
    from matplotlib.axes import Axes


PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }}
body {{ max-width: 64rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }}
th, td {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid GrayText }}
img {{ max-width: 100%; background: white; border-radius: 4px }}
</style>
<h1>{title}</h1>
<p>{summary}</p>
{sequences}
<img alt="Which key-value heads of which layers ran sparse" src="data:image/png;base64,{picture}">
{layers}
</html>
"""


def routing_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table in plain text, for a terminal: one line a row, one column for each key.

    Args:
        rows: column name to value. Columns come in the order in which the rows first name them.

    Returns:
        The table, without a final line break. Numbers are aligned to the right, floats have three decimals, and a
        value that is missing or `None` is a dash.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("`rows` must hold at least one row, got none.")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells)]
    numeric = [all(isinstance(row.get(name), int | float | None) for row in rows) for name in columns]

    def line(values):
        aligned = (v.rjust(w) if right else v.ljust(w) for v, w, right in zip(values, widths, numeric))
        return "  ".join(aligned).rstrip()

    return "\n".join([line(columns), "  ".join("-" * width for width in widths), *map(line, cells)])


def routing_png(
    decisions_by_task: Mapping[str, torch.Tensor],
    path: str | Path | BinaryIO,
    *,
    layers: Sequence[int] | None = None,
    title: str | None = None,
) -> None:
    """A heat map of how often each layer and key-value head runs in the sparse mode, one panel a task.

    Args:
        decisions_by_task: task name to bool `[N, L, H]`, True = sparse: N sequences, L routed layers, H key-value
            heads; N may differ between tasks.
        path: the PNG file to write, or an open binary file.
        layers: the L layer indices; `None` counts from 0.
        title: heading of the picture.

    Raises:
        ValueError: no task; decisions of another dtype or shape; `layers` of another number than L.
        ImportError: matplotlib is not installed.
    """
    layers = _check_decisions(decisions_by_task, layers)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("`routing_png` needs matplotlib: pip install 'elastic_peft[report]'.") from error

    num_heads = next(iter(decisions_by_task.values())).shape[2]
    panel_height = max(0.24 * num_heads, 0.7) + 0.35
    size = (min(max(0.27 * len(layers) + 2.0, 6.0), 18.0), panel_height * len(decisions_by_task) + 1.2)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(decisions_by_task), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (task, decisions) in zip(axes, decisions_by_task.items()):
        _draw_panel(ax, task, decisions)
    # At most about 20 labels, on round steps.
    step = next(s for s in (1, 2, 4, 5, 10, 20, 50, 100) if len(layers) <= 20 * s or s == 100)
    axes[-1].set_xticks(range(0, len(layers), step), [str(index) for index in layers[::step]])
    axes[-1].set_xlabel("layer")
    figure.supylabel("key-value head", fontsize="medium")
    bar = figure.colorbar(axes[0].images[0], ax=list(axes), ticks=[0, 0.25, 0.5, 0.75, 1], pad=0.015, aspect=30)
    bar.set_label("how often sparse")
    if title is not None:
        figure.suptitle(title)
    figure.savefig(path, format="png", dpi=150)


def sequence_rows(record: RoutingRecord) -> list[dict[str, Any]]:
    """A row for each sequence of a record: its tokens and sparsity ratios.

    Args:
        record: as `last_routing` returns it.

    Returns:
        Rows for `routing_table`.
    """
    columns = {
        "tokens": record.lengths,
        "MSR": record.msr,
        "ESR": record.esr,
        "ESR, last layer": record.esr_last_layer,
    }
    values = zip(*(column.tolist() for column in columns.values()))
    return [{"sequence": index, **dict(zip(columns, row))} for index, row in enumerate(values)]


def layer_rows(record: RoutingRecord) -> list[dict[str, Any]]:
    """A row for each routed layer of a record: its heads, and which share of them is sparse over all sequences.

    Args:
        record: as `last_routing` returns it.

    Returns:
        Rows for `routing_table`.
    """
    shares = record.decisions.float().mean(dim=(0, 2)).tolist()
    heads = record.decisions.shape[2]
    return [{"layer": index, "heads": heads, "MSR": share} for index, share in zip(record.layers, shares)]


def routing_html(record: RoutingRecord) -> str:
    """A page on what was routed: the ratios of each sequence and layer, and a heat map of the heads.

    Args:
        record: as `last_routing` returns it.

    Returns:
        HTML that needs no other file, readable on light and dark screens.

    Raises:
        ImportError: matplotlib is not installed.
    """
    picture = io.BytesIO()
    by_sequence = {f"sequence {index}": decisions[None] for index, decisions in enumerate(record.decisions)}
    routing_png(by_sequence, picture, layers=record.layers)
    sizes = f"sink of {record.sink_size:,} and window of {record.window_size:,} tokens"
    return PAGE.format(
        title="Routing",
        summary=f"{record.mode_pair}, {sizes}, computed by {record.implementation}",
        sequences=_html_table(sequence_rows(record)),
        picture=base64.b64encode(picture.getvalue()).decode("ascii"),
        layers=_html_table(layer_rows(record)),
    )


def _html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    def line(tag, values):
        return "<tr>" + "".join(f"<{tag}>{html.escape(value)}</{tag}>" for value in values) + "</tr>"

    lines = [line("th", rows[0]), *(line("td", map(_cell, row.values())) for row in rows)]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _check_decisions(decisions_by_task, layers) -> Sequence[int]:
    if not decisions_by_task:
        raise ValueError("`decisions_by_task` must hold at least one task, got none.")
    shape = next(iter(decisions_by_task.values())).shape[1:]
    for task, decisions in decisions_by_task.items():
        name = f"`decisions_by_task[{task!r}]`"
        if decisions.dtype != torch.bool or decisions.ndim != 3 or not decisions.numel():
            raise ValueError(f"{name} must be bool [N, L, H], got {decisions.dtype} {tuple(decisions.shape)}.")
        if decisions.shape[1:] != shape:
            raise ValueError(
                f"{name} must have the {shape[0]} layers and {shape[1]} heads of the other tasks, "
                f"got {tuple(decisions.shape)}."
            )
    layers = range(shape[0]) if layers is None else layers
    if len(layers) != shape[0]:
        raise ValueError(f"`layers` must name the {shape[0]} routed layers, got {len(layers)}.")
    return layers


def _draw_panel(ax: Axes, task: str, decisions: torch.Tensor) -> None:
    frequency = decisions.float().mean(dim=0).T.cpu().numpy()  # [H, L]
    # cividis keeps its order for every kind of colour vision and in grey.
    ax.imshow(frequency, vmin=0, vmax=1, cmap="cividis", aspect="auto", interpolation="nearest")
    inputs = "input" if len(decisions) == 1 else "inputs"
    ax.set_title(f"{task}: {len(decisions)} {inputs}, MSR {frequency.mean():.2f}", loc="left", fontsize="medium")
    ax.set_yticks(range(frequency.shape[0]))
    for boundary in range(1, frequency.shape[1]):
        ax.axvline(boundary - 0.5, color="white", linewidth=0.4)
    for boundary in range(1, frequency.shape[0]):
        ax.axhline(boundary - 0.5, color="white", linewidth=0.4)
