"""What the commands print."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def show(fields: Mapping[str, Any], as_json: bool) -> None:
    """Prints named values, one a line, or as one JSON object."""
    if as_json:
        typer.echo(json.dumps(fields, indent=1))
        return
    width = max(map(len, fields))
    for name, value in fields.items():
        typer.echo(f"{name.replace('_', ' '):{width}}  {_text(value)}")


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
