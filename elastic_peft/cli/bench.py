"""The command `bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .options import AsJson
from .output import show


STDERR = 2  # so that standard output holds the JSON alone
BENCHMARKS = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"


class Operator(StrEnum):
    """What can be measured."""

    prefill = "prefill"
    decode = "decode"
    train = "train"
    router = "router"


def bench(
    operator: Annotated[Operator, typer.Argument(help="What to measure.")],
    length: Annotated[list[int] | None, typer.Option(help="Tokens; may be repeated. Default: all.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the results. Default: with the sources.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure an operator on this machine's GPU, after its tests. Needs a checkout of the sources."""
    sweep = BENCHMARKS / "sweep.py"
    if not sweep.is_file():
        raise ValueError(f"`bench` must run in a checkout of the sources, got none: {sweep} is missing.")

    import torch

    if not torch.cuda.is_available():
        raise ValueError("`bench` must run where torch sees a CUDA GPU, got none.")
    output = output or BENCHMARKS / "results"
    lengths = ["--lengths", *map(str, length)] if length else []
    before = _written(output, operator)
    command = [sys.executable, str(sweep), operator.value, *lengths, "--output", str(output)]
    code = subprocess.run(command, check=False, stdout=STDERR if as_json else None).returncode
    if code:
        raise typer.Exit(code if code > 0 else 128 - code)  # a signal's number, as shells show it
    new = [file for file, time in _written(output, operator).items() if time != before.get(file)]
    if not new:
        raise ValueError(f"`--length` must be one that `{operator.value}` is measured at, got {length}.")
    if as_json:
        show(json.loads(new[0].read_text(encoding="utf-8")), as_json)


def _written(output: Path, operator: Operator) -> dict[Path, int]:
    """An operator's results, one file a GPU, and when each was written."""
    return {file: file.stat().st_mtime_ns for file in output.glob(f"*/{operator.value}.json")}
