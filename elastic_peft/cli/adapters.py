"""Commands on adapters' files: `inspect`, `convert`, `card`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import AsJson, Revision, Subfolder
from .output import show


if TYPE_CHECKING:
    from elastic_peft import ElasticConfig


Output = Annotated[Path, typer.Argument(help="Folder of the adapter, made if needed.", file_okay=False)]


def inspect(
    adapter: Annotated[str, typer.Argument(help="Folder of an adapter, or repository on the Hub.")],
    revision: Revision = None,
    subfolder: Subfolder = None,
    as_json: AsJson = False,
) -> None:
    """Show what an adapter routes, and how."""
    from elastic_peft.saved import read_config

    config = read_config(adapter, revision=revision, subfolder=subfolder)
    weights = _weights(adapter, revision, subfolder)
    show({"adapter": adapter, **_summary(config), **weights}, as_json)


def paper(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of the checkpoint.", exists=True, file_okay=False)],
    output: Output,
    base_model: Annotated[str | None, typer.Option(help="Base model to note in the adapter.")] = None,
    as_json: AsJson = False,
) -> None:
    """Take the routers out of a checkpoint of the paper's authors."""
    from elastic_peft.convert import convert_paper

    config = convert_paper(checkpoint, output, base_model=base_model)
    show({"adapter": str(output), **_summary(config)}, as_json)


def duo(
    pattern: Annotated[Path, typer.Argument(help="Gates by layer and head, a TSV.", exists=True, dir_okay=False)],
    output: Output,
    base_model: Annotated[str, typer.Option(help="Base model that the pattern was made for.")],
    sparsity: Annotated[float | None, typer.Option(help="Share of heads to make sparse.")] = None,
    threshold: Annotated[float | None, typer.Option(help="Instead: the gate from which on heads are full.")] = None,
    sink_size: Annotated[int | None, typer.Option(help="Tokens; default: config.json beside the pattern.")] = None,
    window_size: Annotated[int | None, typer.Option(help="Tokens; default: config.json beside the pattern.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a DuoAttention pattern an adapter with fixed decisions."""
    from elastic_peft.convert import convert_duo

    config = convert_duo(
        pattern,
        output,
        base_model=base_model,
        sparsity=sparsity,
        threshold=threshold,
        sink_size=sink_size,
        window_size=window_size,
    )
    show({"adapter": str(output), **_summary(config)}, as_json)


def card(
    directory: Annotated[Path, typer.Argument(help="Folder of an adapter.", exists=True, file_okay=False)],
    repo_id: Annotated[
        str | None, typer.Option(help="Repository to load it from. Default: the folder's name.")
    ] = None,
    subfolder: Subfolder = None,
    license: Annotated[str | None, typer.Option(help="Licence of the weights, as the Hub names it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write an adapter's model card, README.md, into its folder."""
    from huggingface_hub.constants import REPOCARD_NAME

    from elastic_peft.card import render_card

    path = directory / REPOCARD_NAME
    rendered = render_card(directory, repo_id=repo_id, subfolder=subfolder, license=license)
    rendered.save(path)
    show({"card": str(path), "metadata": rendered.data.to_dict()} if as_json else {"card": str(path)}, as_json)


def _summary(config: ElasticConfig) -> dict[str, Any]:
    xattn = {"xattn_block_size": config.xattn_block_size, "xattn_threshold": config.xattn_threshold}
    heads = config.num_key_value_heads or {}
    return {
        "base_model": config.base_model_name_or_path,
        "mode_pair": config.mode_pair,
        "sink_size": config.sink_size,
        "window_size": config.window_size,
        **(xattn if "XA" in config.mode_pair else {}),
        "decode": config.decode,
        "sparsity_bias": config.sparsity_bias,
        "t_values": config.t_values,
        "routed_layers": len(heads),
        "key_value_heads": sum(heads.values()),
        "head_dim": config.head_dim,
        "pool_size": config.pool_size,
        "router_expansion": config.router_expansion,
        "standardize_input": config.standardize_input,
        "format_version": config.format_version,
    }


def _weights(adapter: str, revision: str | None, subfolder: str | None) -> dict[str, Any]:
    """Of an adapter's weights: how many, their bytes, and whether each layer's input standardisation is calibrated."""
    from huggingface_hub import hf_hub_download
    from peft.utils import SAFETENSORS_WEIGHTS_NAME
    from safetensors.torch import load_file

    if Path(adapter).is_dir():
        path = Path(adapter, subfolder or "", SAFETENSORS_WEIGHTS_NAME)
    else:
        path = Path(hf_hub_download(adapter, SAFETENSORS_WEIGHTS_NAME, revision=revision, subfolder=subfolder))
    tensors = load_file(path)
    calibrated = [bool(tensor) for name, tensor in tensors.items() if name.endswith(".calibrated")]
    return {
        "calibrated": all(calibrated) if calibrated else None,
        "parameters": sum(tensor.numel() for name, tensor in tensors.items() if "elastic_standardizer" not in name),
        "bytes": path.stat().st_size,
    }
