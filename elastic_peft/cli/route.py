"""The command `route`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import AsJson, Revision, Subfolder
from .output import check_can_write, show


if TYPE_CHECKING:
    import torch
    from transformers import BatchEncoding

    from elastic_peft import RoutingRecord


Prompts = Annotated[
    list[Path],
    typer.Option(help="Text of a prompt, UTF-8; may be repeated, one a task.", exists=True, dir_okay=False),
]
Picture = Annotated[Path | None, typer.Option(help="Write a heat map there.", dir_okay=False)]
Page = Annotated[Path | None, typer.Option(help="Write a page that needs no other file.", dir_okay=False)]


def route(
    model: Annotated[str, typer.Option(help="Base model: a folder, or repository on the Hub.")],
    adapter: Annotated[str, typer.Option(help="Adapter: a folder, or repository on the Hub.")],
    prompt_file: Prompts,
    revision: Revision = None,
    subfolder: Subfolder = None,
    html: Page = None,
    png: Picture = None,
    as_json: AsJson = False,
) -> None:
    """Run prompts and show which heads the routers made sparse."""
    # What needs no model comes first: it may take minutes to load.
    check_can_write("--html", html)
    check_can_write("--png", png)
    if (html or png) and find_spec("matplotlib") is None:
        raise ImportError("`--html` and `--png` need matplotlib: pip install 'elastic_peft[report]'.")
    names = _names(prompt_file)
    texts = {file: _read_prompt(file) for file in prompt_file}

    from elastic_peft.report import layer_rows, routing_html, routing_png, routing_table, sequence_rows
    from elastic_peft.saved import read_config
    from elastic_peft.similarity import task_similarity

    read_config(adapter, revision=revision, subfolder=subfolder)
    prompts = dict(zip(names, _tokens(model, texts)))
    routed = _load(model, adapter, revision=revision, subfolder=subfolder)
    records, pooled = {}, {}
    for name, tokens in prompts.items():
        records[name], pooled[name] = _run(routed, name, tokens)
    first = next(iter(records.values()))
    if png is not None:
        routing_png({name: record.decisions for name, record in records.items()}, png, layers=first.layers)
    if html is not None:
        similarity = task_similarity(routed, pooled) if len(pooled) > 1 else None
        html.write_text(routing_html(records, similarity), encoding="utf-8")
    sequences = sequence_rows(records)
    if as_json:
        shown = [_json(row, record) for row, record in zip(sequences, records.values())]
        show({"mode_pair": first.mode_pair, "layers": first.layers, "prompts": shown}, as_json)
        return
    computed = list(dict.fromkeys(str(record.implementation) for record in records.values()))
    show({"mode_pair": first.mode_pair, "computed_by": computed}, as_json)
    typer.echo(f"\n{routing_table(sequences)}\n\n{routing_table(layer_rows(records))}")


def _json(row: dict[str, Any], record: RoutingRecord) -> dict[str, Any]:
    ratios = {"msr": row["MSR"], "esr": row["ESR"], "esr_last_layer": row["ESR, last layer"]}
    described = {"prompt": row["task"], "computed_by": record.implementation, "tokens": row["tokens"]}
    return {**described, **ratios, "sparse": record.decisions[0].tolist()}


def _names(files: list[Path]) -> list[str]:
    """The files' names, with as many of their folders as tell them apart."""
    paths = [file.resolve() for file in files]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise ValueError(f"`--prompt-file` must name each file once, got {str(files[index])!r} again.")
    if len({file.name for file in files}) == len(files):
        return [file.name for file in files]
    common = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(common)) for path in paths]


def _read_prompt(file: Path) -> str:
    try:
        prompt = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"`--prompt-file` must be UTF-8, got {str(file)!r}: {error}.") from error
    if not prompt:
        raise ValueError(f"`--prompt-file` must hold text, got {str(file)!r}: it is empty.")
    return prompt


def _tokens(model: str, texts: dict[Path, str]) -> list[BatchEncoding]:
    from transformers import AutoTokenizer

    with _loading(model):
        tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = {file: tokenizer(text, return_tensors="pt") for file, text in texts.items()}
    for file, encoding in tokens.items():
        if not encoding["input_ids"].numel():
            raise ValueError(f"`--prompt-file` must hold text, got {str(file)!r}: it has no tokens.")
    return list(tokens.values())


def _load(model: str, adapter: str, **place: str | None) -> Any:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    is_cuda = torch.cuda.is_available()
    dtype = "auto" if is_cuda else torch.float32  # CPUs are slow at bfloat16
    with _loading(model):
        base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, device_map="cuda" if is_cuda else "cpu")
    return PeftModel.from_pretrained(base, adapter, **place).eval()


@contextmanager
def _loading(model: str) -> Iterator[None]:
    """One sentence for whatever damaged or foreign files make transformers raise."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"`--model` {model!r} cannot be loaded: {type(error).__name__}: {error}") from error


def _run(routed: Any, name: str, tokens: BatchEncoding) -> tuple[RoutingRecord, dict[int, torch.Tensor]]:
    """What the routers decide for a prompt, and what they pool from it."""
    import torch

    from elastic_peft import last_routing
    from elastic_peft.context import routed_decoder
    from elastic_peft.similarity import pooled_keys

    layers = routed_decoder(routed).layers
    with typer.progressbar(length=len(layers), label=name, file=sys.stderr) as bar:
        hooks = [layer.register_forward_hook(lambda *_: bar.update(1)) for layer in layers]
        try:
            with torch.no_grad(), pooled_keys(routed) as pooled:
                routed(**tokens.to(routed.device), use_cache=False, logits_to_keep=1)
        finally:
            for hook in hooks:
                hook.remove()
    record = last_routing(routed)
    assert record is not None
    return record, pooled
