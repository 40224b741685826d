"""Names as they can be printed, drawn and written to a file."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` that UTF-8 can hold: lone surrogates come as escapes, `\\udcff`, as in the text's `repr`.

    Python gives the bytes of a file's name that are no UTF-8 as such surrogates, and JSON may hold them.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
