"""What the commands print and write."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer


def show(fields: Mapping[str, Any], as_json: bool) -> None:
    """Prints named values, one a line, or as one JSON object."""
    fields = _plain(fields)
    if as_json:
        typer.echo(json.dumps(fields, indent=1, allow_nan=False))
        return
    width = max(map(len, fields))
    for name, value in fields.items():
        typer.echo(f"{name.replace('_', ' '):{width}}  {_text(value)}")


def check_can_write(option: str, file: Path | None) -> None:
    """Raises ValueError where `file`, given as `option`, cannot be written; before the work, not after it."""
    if file is None:
        return
    if not file.parent.is_dir():
        raise ValueError(f"`{option}` must be in a folder that exists, got {str(file)!r}.")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"`{option}` must be a file that can be written, got {str(file)!r}.")


def _plain(value: Any) -> Any:
    """`value` with printable texts, and a text for each number that JSON does not have: "inf", "-inf", "nan"."""
    from elastic_peft.printable import printable

    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


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
