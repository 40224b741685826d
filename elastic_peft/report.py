"""What was routed and measured, for people: plain tables, pictures and a page."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from .context import RoutingRecord
from .report_figures import DPI, routing_png, similarity_figure, training_figure
from .report_page import html_page, html_picture, html_table, table_cells


__all__ = [
    "html_page",
    "html_picture",
    "html_table",
    "layer_rows",
    "routing_html",
    "routing_png",
    "routing_table",
    "sequence_rows",
    "similarity_figure",
    "training_figure",
]


#: What was routed: one record, or several by the name of a task or prompt.
Routing: TypeAlias = RoutingRecord | Mapping[str, RoutingRecord]


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
    columns, header, cells = table_cells(rows)
    widths = [max(map(len, column)) for column in zip(header, *cells)]
    numeric = [all(isinstance(row.get(name), int | float | None) for row in rows) for name in columns]

    def line(values):
        aligned = (v.rjust(w) if right else v.ljust(w) for v, w, right in zip(values, widths, numeric))
        return "  ".join(aligned).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, cells)])


def sequence_rows(routing: Routing) -> list[dict[str, Any]]:
    """A row for each sequence: its tokens and sparsity ratios.

    Args:
        routing: a record, as `last_routing` returns it; or records by the name of a task or prompt.

    Returns:
        Rows for `routing_table`.
    """
    if isinstance(routing, RoutingRecord):
        return [{"sequence": index, **row} for index, row in enumerate(_ratios(routing))]
    return [{"task": name, **row} for name, record in routing.items() for row in _ratios(record)]


def layer_rows(routing: Routing) -> list[dict[str, Any]]:
    """A row for each routed layer: its heads, and which share of them is sparse, mean over sequences.

    Args:
        routing: a record, as `last_routing` returns it; or records by the name of a task or prompt.

    Returns:
        Rows for `routing_table`: `layer`, `heads` and `MSR`, or `MSR, name` for each name.

    Raises:
        ValueError: no records.
    """
    first = _first(routing)
    if isinstance(routing, RoutingRecord):
        records = {"MSR": routing}
    else:  # named `layer`, a column must not take another's place
        records = {f"MSR, {name}": record for name, record in routing.items()}
    shares = zip(*(record.decisions.float().mean(dim=(0, 2)).tolist() for record in records.values()))
    heads = first.decisions.shape[2]
    return [{"layer": index, "heads": heads, **dict(zip(records, row))} for index, row in zip(first.layers, shares)]


def _first(routing: Routing) -> RoutingRecord:
    if isinstance(routing, RoutingRecord):
        return routing
    if not routing:
        raise ValueError("`routing` must hold at least one record, got none.")
    return next(iter(routing.values()))


def _ratios(record: RoutingRecord) -> list[dict[str, Any]]:
    columns = {
        "tokens": record.lengths,
        "MSR": record.msr,
        "ESR": record.esr,
        "ESR, last layer": record.esr_last_layer,
    }
    return [dict(zip(columns, row)) for row in zip(*(column.tolist() for column in columns.values()))]


def routing_html(routing: Routing, similarity: Mapping[str, Any] | None = None) -> str:
    """A page on what was routed: the ratios of each sequence and layer, and a heat map of the heads.

    Args:
        routing: as `last_routing` returns it; or records by the name of a task or prompt, for a panel of each.
        similarity: between these tasks, as `elastic_peft.similarity.task_similarity` returns it.

    Returns:
        HTML that needs no other file, readable on light and dark screens.

    Raises:
        ValueError: no records, or of models with other layers or heads; `similarity` of another number of tasks.
        ImportError: matplotlib is not installed.
    """
    first = _first(routing)
    if isinstance(routing, RoutingRecord):
        panels = {f"sequence {index}": decisions[None] for index, decisions in enumerate(routing.decisions)}
        implementations = [routing.implementation]
    else:
        panels = {name: record.decisions for name, record in routing.items()}
        implementations = [record.implementation for record in routing.values()]
    picture = io.BytesIO()
    routing_png(panels, picture, layers=first.layers)
    sizes = f"sink of {first.sink_size:,} and window of {first.window_size:,} tokens"
    computed = ", ".join(dict.fromkeys(map(str, implementations)))
    parts = [
        f"<p>{first.mode_pair}, {sizes}, computed by {computed}</p>",
        html_table(sequence_rows(routing)),
        html_picture(picture.getvalue(), "How often each key-value head of each layer ran sparse."),
    ]
    if similarity is not None:
        alike = io.BytesIO()
        similarity_figure(similarity, list(panels)).savefig(alike, format="png", dpi=DPI)
        parts.append(
            html_picture(alike.getvalue(), "How alike the tasks look to the routers: means over layers and heads.")
        )
    parts += ["<p>Share of sparse heads in each layer:</p>", html_table(layer_rows(routing))]
    return html_page("Routing", parts)
