"""Pages that need no other file: tables and pictures in HTML."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .printable import printable


PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }}
body {{ max-width: 68rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }}
th, td {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid GrayText }}
th:first-child, td:first-child {{ text-align: left }}
div {{ overflow-x: auto }}
figure {{ margin: 2rem 0 }}
img {{ max-width: 100%; background: white; border-radius: 4px }}
</style>
<h1>{title}</h1>
{body}
</html>
"""


def html_page(title: str, parts: Iterable[str]) -> str:
    """A page that needs no other file, readable on light and dark screens.

    Args:
        title: of the page, and its heading.
        parts: its HTML, as `html_table` and `html_picture` return it.

    Returns:
        HTML.

    Raises:
        ValueError: `parts` is a text.
    """
    if isinstance(parts, str):  # it would be taken letter by letter
        raise ValueError(f"`parts` must be a sequence of texts, got the text {parts[:40]!r}.")
    return printable(PAGE.format(title=html.escape(title), body="\n".join(parts)))


def html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of `routing_table` in HTML.

    Args:
        rows: column name to value.

    Returns:
        HTML.

    Raises:
        ValueError: there are no rows.
    """

    def line(tag, values):
        return "<tr>" + "".join(f"<{tag}>{html.escape(value)}</{tag}>" for value in values) + "</tr>"

    _, header, cells = table_cells(rows)
    lines = [line("th", header), *(line("td", values) for values in cells)]
    return "<div><table>\n" + "\n".join(lines) + "\n</table></div>"


def html_picture(png: bytes, caption: str) -> str:
    """A picture inside the page.

    Args:
        png: the file's contents.
        caption: what it shows.

    Returns:
        HTML.
    """
    text, data = html.escape(caption), base64.b64encode(png).decode("ascii")
    return (
        f'<figure>\n<img alt="{text}" src="data:image/png;base64,{data}">\n<figcaption>{text}</figcaption>\n</figure>'
    )


def table_cells(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str], list[list[str]]]:
    """The names of a table's columns, in the order in which the rows first name them, their texts and each row's.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("`rows` must hold at least one row, got none.")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, list(map(printable, columns)), [[_cell_text(row.get(name)) for name in columns] for row in rows]


def _cell_text(value: Any) -> str:
    """A value in a table: floats with three decimals, zero without a sign, a dash for `None`."""
    if value is None:
        return "-"
    return f"{value:z.3f}" if isinstance(value, float) else printable(str(value))
