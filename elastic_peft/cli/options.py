"""Options that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the adapter's repository.")]
Subfolder = Annotated[str | None, typer.Option(help="Folder in the adapter's repository.")]
