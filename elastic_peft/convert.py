"""Foreign formats in: the paper authors' checkpoints and DuoAttention's head patterns become ELASTIC adapters.

Both become what `save_pretrained` writes, so `PeftModel.from_pretrained` loads them onto the base model.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .config import ElasticConfig
from .families import describe_model
from .router import make_router
from .static_router import static_router


#: A router's linear layers: our names, theirs.
PAPER_LAYERS = {
    "task_up": "cls_feat_extractor.0",
    "task_down": "cls_feat_extractor.2",
    "router_up": "cls_router_head_agnostic.0",
    "router_down": "cls_router_head_agnostic.2",
    "router_out": "cls_router_head_agnostic.4",
}
#: (`retrieval_mode`, `toggle_type`) to the mode pair.
PAPER_MODE_PAIRS = {
    ("full", "streaming"): "FA-SSA",
    ("full", "xattn"): "FA-XA",
    ("xattn", "streaming"): "XA-SSA",
}
#: Targets that their training code fixes; those of other tasks are an argument of it and are not saved.
PAPER_T_VALUES = {"summarization": 1.0, "code": 1.0, "in_context_learning": 1.0}
#: Beside the routers' layers, and without effect at inference.
PAPER_TRAINING_ONLY = ("log_temp", "task_embedding.weight")
PAPER_TENSOR = re.compile(r"model\.layers\.(\d+)\.self_attn\.mask_allocator\.(.+)")


def convert_paper(checkpoint: str | Path, output: str | Path, *, base_model: str | None = None) -> ElasticConfig:
    """Takes the routers out of a checkpoint of the paper's authors.

    Their checkpoints are whole models; all weights but the routers' are those of the base model, and only the routers
    are read. Their second output column means full attention, ours sparse attention, so the columns change places.
    Their routers take the pooled keys as they are (`standardize_input=False`), and their decoding attends everything
    (`decode="full"`). Which targets the other tasks were trained with is not known, so `t_values` has none for them.

    Args:
        checkpoint: folder with `config.json` and safetensors files.
        output: folder of the adapter, made if needed.
        base_model: name or folder of the base model, to be noted in the adapter.

    Returns:
        The adapter's configuration.

    Raises:
        ValueError: the folder holds no such checkpoint; a value in its configuration cannot be converted; tensors are
            missing, unknown or of other shapes.

    Numerics: stored in float32. Decisions are theirs but for rounding. By definition, windows are exact to the token
        instead of rounded up to blocks of 128, and a prompt under 200 tokens pools no token twice.

    Source: github.com/LCM-Lab/Elastic-Attention at c62a0fe, `elasticattn/training/eval/modeling_flash_qwen.py`:
        `AttentionRouter` (layers, shapes, 1 = full), `PawQwen3Config` (fields and defaults), `Qwen3Attention` (pairs
        of modes); `elasticattn/training/lh_trainer.py`: `task_sparsity_config` (targets). XAttention's threshold is
        not saved: 0.8 in the former file, 0.9 in their training code, in the paper and here.
        github.com/PaddlePaddle/FastDeploy at f85a73a, `models/qwen3_elastic/modeling_elastic_qwen3.py`: a released
        checkpoint holds `mask_allocator.log_temp` and has no `block_size`.
    """
    _check_output(Path(output))
    checkpoint = Path(checkpoint)
    settings = _read_settings(checkpoint / "config.json")
    num_layers = _size(settings, "num_hidden_layers")
    head_dim = _paper_head_dim(settings)
    mode_pair = _paper_mode_pair(settings)
    num_key_value_heads = _size(settings, "num_key_value_heads")
    routers = _read_paper_routers(checkpoint)
    # As many steps as there are routers, whatever the number of layers.
    missing = next((index for index in range(num_layers) if index not in routers), None)
    wrong = max(routers) if missing is None else missing
    if missing is not None or wrong >= num_layers:
        fault = "one in" if missing is None else "none in"
        raise ValueError(f"`checkpoint` must hold a router in each of {num_layers} layers, got {fault} layer {wrong}.")
    first = routers[0].get("task_up.weight")
    if first is None or first.ndim != 2 or first.shape[1] != head_dim:
        got = "none" if first is None else tuple(first.shape)
        raise ValueError(
            f"`{PAPER_LAYERS['task_up']}.weight` of layer 0 must have `head_dim` columns, {head_dim}, got {got}."
        )
    expansion = max(1, first.shape[0] // head_dim)
    xattn = {"xattn_block_size": "block_size", "xattn_stride": "xattn_stride", "xattn_threshold": "xattn_threshold"}
    config = ElasticConfig(
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=base_model,
        mode_pair=mode_pair,
        t_values=dict(PAPER_T_VALUES),
        sink_size=settings.get("sink_size", 128),
        window_size=settings.get("local_window_size", 1024),
        **{ours: settings[theirs] for ours, theirs in xattn.items() if theirs in settings},
        pool_size=100,
        router_expansion=expansion,
        standardize_input=False,
        decode="full",
        head_dim=head_dim,
        num_key_value_heads=dict.fromkeys(range(num_layers), num_key_value_heads),
    )
    with torch.device("meta"):
        router = make_router(head_dim, expansion)
    shapes = {
        f"{name}.{key}": tensor.shape for name, layer in router.items() for key, tensor in layer.state_dict().items()
    }
    for index in range(num_layers):
        _check_paper_router(routers[index], shapes, index)
        for name in ("router_out.weight", "router_out.bias"):
            routers[index][name] = routers[index][name].flip(0)
    _save(Path(output), config, {f"model.layers.{index}.self_attn": routers[index] for index in range(num_layers)})
    return config


def convert_duo(
    pattern: str | Path,
    output: str | Path,
    *,
    base_model: str,
    sparsity: float | None = None,
    threshold: float | None = None,
    sink_size: int | None = None,
    window_size: int | None = None,
) -> ElasticConfig:
    """Makes a DuoAttention pattern an adapter with the mode pair FA-SSA, whose decisions do not depend on the input.

    A head's retrieval logit is its gate less the threshold, its sparse logit 0 (see `static_router`), so that
    `sparsity_bias` moves the threshold.

    Args:
        pattern: file with a row for each layer and a column for each key-value head, separated by tabs; a large gate
            means full attention.
        output: folder of the adapter, made if needed.
        base_model: name or folder of the base model, whose configuration is read.
        sparsity: share of heads to make sparse, those with the lowest gates, in [0, 1]. Heads with equal gates
            stay together, which may leave the share lower.
        threshold: heads whose gate is at least this are full; 0.5 where neither is given.
        sink_size: leading tokens that a sparse head attends; `None` takes `sink_size` from the `config.json` beside
            `pattern`.
        window_size: most recent tokens that a sparse head attends; `None` takes `recent_size` from there.

    Returns:
        The adapter's configuration.

    Raises:
        ValueError: `pattern` is no such file, or was made for another base model; a size is not given anywhere;
            `sparsity` is not in [0, 1], or `threshold` is given too.

    Source: DuoAttention, arXiv 2410.10819; github.com/mit-han-lab/duo-attention at fe93c31, `duo_attn/utils.py`:
        `load_attn_pattern`, `sparsify_attention_heads`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    _check_output(Path(output))
    pattern = Path(pattern)
    gates = _read_gates(pattern)
    if sink_size is None or window_size is None:
        beside = _read_settings(pattern.with_name("config.json"))
        sink_size = _size(beside, "sink_size", least=0) if sink_size is None else sink_size
        window_size = _size(beside, "recent_size") if window_size is None else window_size
    if sparsity is not None:
        if threshold is not None:
            raise ValueError(f"`threshold` must not be given with `sparsity`, got {threshold}.")
        threshold = _threshold(gates, sparsity)
    elif threshold is None:
        threshold = 0.5
    elif not math.isfinite(threshold):
        raise ValueError(f"`threshold` must be finite, got {threshold}.")
    try:
        with torch.device("meta"):
            base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base_model))
    except Exception as error:  # whatever damaged or foreign files make transformers raise
        raise ValueError(
            f"`base_model` must be a model that transformers can build, got {base_model!r}: {type(error).__name__}: "
            f"{error}"
        ) from error
    layers = describe_model(base).layers
    heads = {layer.index: layer.num_key_value_heads for layer in layers}
    if len(gates) != len(layers) or set(heads.values()) != {gates.shape[1]}:
        raise ValueError(
            f"`pattern` must have {len(layers)} rows of {max(heads.values())} gates, as the base model has layers to "
            f"route and key-value heads, got {gates.shape[0]} rows of {gates.shape[1]}."
        )
    config = ElasticConfig(
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=base_model,
        sink_size=sink_size,
        window_size=window_size,
        router_expansion=1,
        head_dim=layers[0].head_dim,
        num_key_value_heads=heads,
    )
    routers = {layer.name: static_router(row - threshold, layer.head_dim) for layer, row in zip(layers, gates)}
    _save(Path(output), config, routers)
    return config


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"`{file.name}` must be a readable JSON file, got {error} ({file}).") from error
    if not isinstance(settings, dict):
        raise ValueError(f"`{file.name}` must hold a JSON object, got {type(settings).__name__} ({file}).")
    return settings


def _size(settings: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = settings.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"`{name}` must be an integer of at least {least} in config.json, got {value!r}.")
    return value


def _paper_head_dim(settings: Mapping[str, Any]) -> int:
    if settings.get("head_dim") is not None:
        return _size(settings, "head_dim")
    width, heads = _size(settings, "hidden_size"), _size(settings, "num_attention_heads")
    if width % heads:
        raise ValueError(
            f"`hidden_size` must be a multiple of `num_attention_heads` ({heads}) in config.json, got {width}."
        )
    return width // heads


def _paper_mode_pair(settings: Mapping[str, Any]) -> str:
    if settings.get("enable_ada_sparsity") is not True:
        raise ValueError(
            "`enable_ada_sparsity` must be true in config.json, for the routers to decide anything, "
            f"got {settings.get('enable_ada_sparsity')!r}."
        )
    if settings.get("pooling_mode") != "ctx_q":
        raise ValueError(f"`pooling_mode` must be 'ctx_q' in config.json, got {settings.get('pooling_mode')!r}.")
    modes = settings.get("retrieval_mode", "full"), settings.get("toggle_type", "streaming")
    if modes not in list(PAPER_MODE_PAIRS):  # a list among them has no hash
        known = ", ".join(f"{retrieval!r} and {sparse!r}" for retrieval, sparse in PAPER_MODE_PAIRS)
        raise ValueError(
            f"`retrieval_mode` and `toggle_type` must be one of {known} in config.json, got {modes[0]!r} and "
            f"{modes[1]!r}."
        )
    return PAPER_MODE_PAIRS[modes]


def _read_paper_routers(checkpoint: Path) -> dict[int, dict[str, torch.Tensor]]:
    """Layer index to the tensors of its router, by our names; other tensors stay on the disk."""
    ours = {f"{theirs}.{key}": f"{name}.{key}" for name, theirs in PAPER_LAYERS.items() for key in ("weight", "bias")}
    routers: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for file in sorted(checkpoint.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as shard:
                for key in shard.keys():  # noqa: SIM118
                    found = PAPER_TENSOR.fullmatch(key)
                    if found is None or found[2] in PAPER_TRAINING_ONLY:
                        continue
                    if found[2] not in ours:
                        raise ValueError(f"`checkpoint` must hold routers of the paper's layers, got {key} besides.")
                    routers[int(found[1])][ours[found[2]]] = shard.get_tensor(key).float()
        except SafetensorError as error:
            raise ValueError(f"`{file.name}` must be a complete safetensors file, got {error}.") from error
    return routers


def _check_paper_router(router: dict[str, torch.Tensor], shapes: dict[str, torch.Size], index: int) -> None:
    for name, shape in shapes.items():
        if name not in router or router[name].shape != shape:
            layer, key = name.split(".")
            got = tuple(router[name].shape) if name in router else "none"
            raise ValueError(
                f"`{PAPER_LAYERS[layer]}.{key}` of layer {index} must have shape {tuple(shape)}, got {got}."
            )


def _read_gates(pattern: Path) -> torch.Tensor:
    """float64 `[L, H]`."""
    try:
        lines = pattern.read_text(encoding="utf-8").splitlines()
        rows = [[float(gate) for gate in line.split("\t")] for line in lines]
        gates = torch.tensor(rows, dtype=torch.float64)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`pattern` must be a file with as many numbers in each row, separated by tabs, got {error} ({pattern})."
        ) from error
    if gates.ndim != 2 or not gates.isfinite().all():
        raise ValueError(f"`pattern` must hold finite gates, got an empty file or other values ({pattern}).")
    return gates


def _threshold(gates: torch.Tensor, sparsity: float) -> float:
    """The gate from which on heads are full, for a share of at most `sparsity` below it."""
    if not 0 <= sparsity <= 1:
        raise ValueError(f"`sparsity` must be in [0, 1], got {sparsity}.")
    ordered = gates.flatten().sort().values
    count = round(sparsity * len(ordered))
    return float(ordered[count]) if count < len(ordered) else float(ordered[-1]) + 1


def _save(output: Path, config: ElasticConfig, routers: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Writes an adapter of routers, given by the names of their attention modules."""
    tensors = {
        f"base_model.model.{attention}.router.elastic_{name}": tensor.contiguous()
        for attention, router in routers.items()
        for name, tensor in router.items()
    }
    if bad := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise ValueError(f"The adapter's weights must be finite in float32, got others in {bad[0]}.")
    output.mkdir(parents=True, exist_ok=True)
    try:
        save_file(tensors, output / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{output} cannot be written: {error}") from error
    config.save_pretrained(output)


def _check_output(output: Path) -> None:
    """Raises ValueError if something is there: an adapter's weights and figures are not to be mixed with another's."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"`output` must be a new or an empty folder, got {str(output)!r}.")
