"""Commands that compute: `route`, `bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import AsJson, Revision, Subfolder
from .output import check_can_write, show


if TYPE_CHECKING:
    from elastic_peft import RoutingRecord


STDERR = 2  # so that standard output holds the JSON alone
BENCHMARKS = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"

Picture = Annotated[Path | None, typer.Option(help="Write a heat map there.", dir_okay=False)]
Page = Annotated[Path | None, typer.Option(help="Write a page that needs no other file.", dir_okay=False)]


class Operator(StrEnum):
    """What can be measured."""

    prefill = "prefill"
    decode = "decode"
    train = "train"
    router = "router"


def route(
    model: Annotated[str, typer.Option(help="Base model: a folder, or repository on the Hub.")],
    adapter: Annotated[str, typer.Option(help="Adapter: a folder, or repository on the Hub.")],
    prompt_file: Annotated[Path, typer.Option(help="Text of the prompt, UTF-8.", exists=True, dir_okay=False)],
    revision: Revision = None,
    subfolder: Subfolder = None,
    html: Page = None,
    png: Picture = None,
    as_json: AsJson = False,
) -> None:
    """Run a prompt and show which heads the routers made sparse."""
    # What needs no model comes first: it may take minutes to load.
    check_can_write("--html", html)
    check_can_write("--png", png)
    if (html or png) and find_spec("matplotlib") is None:
        raise ImportError("`--html` and `--png` need matplotlib: pip install 'elastic_peft[report]'.")
    prompt = _read_prompt(prompt_file)

    from elastic_peft.report import layer_rows, routing_html, routing_png, routing_table, sequence_rows
    from elastic_peft.saved import read_config

    read_config(adapter, revision=revision, subfolder=subfolder)
    record = _record(model, adapter, prompt, revision=revision, subfolder=subfolder)
    if png is not None:
        routing_png({prompt_file.name: record.decisions}, png, layers=record.layers)
    if html is not None:
        html.write_text(routing_html(record), encoding="utf-8")
    (sequence,) = sequence_rows(record)
    fields = {"mode_pair": record.mode_pair, "computed_by": record.implementation, "tokens": sequence["tokens"]}
    ratios = {"msr": sequence["MSR"], "esr": sequence["ESR"], "esr_last_layer": sequence["ESR, last layer"]}
    if as_json:
        show({**fields, **ratios, "layers": record.layers, "sparse": record.decisions[0].tolist()}, as_json)
        return
    show({**fields, **{name: f"{value:.3f}" for name, value in ratios.items()}}, as_json)
    typer.echo(f"\n{routing_table(layer_rows(record))}")


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


def _read_prompt(file: Path) -> str:
    try:
        prompt = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"`--prompt-file` must be UTF-8, got {error}.") from error
    if not prompt:
        raise ValueError("`--prompt-file` must hold text, got an empty file.")
    return prompt


def _record(model: str, adapter: str, prompt: str, **place: str | None) -> RoutingRecord:
    """What the routers of `adapter` decide for `prompt`."""
    import torch
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from elastic_peft import last_routing
    from elastic_peft.context import routed_decoder

    try:
        AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"`--model` {model!r} cannot be loaded: {error}") from error
    tokens = AutoTokenizer.from_pretrained(model)(prompt, return_tensors="pt")
    if not tokens["input_ids"].numel():
        raise ValueError("`--prompt-file` must hold text, got one without tokens.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = AutoModelForCausalLM.from_pretrained(model, dtype="auto", device_map=device)
    routed: Any = PeftModel.from_pretrained(base, adapter, **place).eval()
    layers = routed_decoder(routed).layers
    with typer.progressbar(length=len(layers), label="Prompt", file=sys.stderr) as bar, torch.no_grad():
        for layer in layers:
            layer.register_forward_hook(lambda *_: bar.update(1))
        routed(**tokens.to(device), use_cache=False, logits_to_keep=1)
    record = last_routing(routed)
    assert record is not None
    return record
