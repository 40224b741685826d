"""Which layers of a decoder can be routed, where their pre-rotary keys come from, and why a model is refused.

One generic rule covers the supported families: an attention module named `self_attn` with a `k_proj` or a fused
`qkv_proj`, full attention, and keyword arguments handed down from the decoder. A probe with an identity rotary
embedding confirms that the keys computed here are the keys that the module rotates.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


KEY_NORM_NAMES = ("k_norm", "k_layernorm")


@dataclass(frozen=True)
class RoutedLayer:
    """An attention layer that can be routed.

    Args:
        index: layer index, the one its cache uses.
        name: qualified name of the attention module inside the model.
        head_dim: dimension of a key head.
        num_key_value_heads: key-value heads.
    """

    index: int
    name: str
    head_dim: int
    num_key_value_heads: int


@dataclass(frozen=True)
class DecoderSpec:
    """Where the routed decoder sits in a model.

    Args:
        decoder_name: qualified name of the module that owns the layers; empty for the model itself.
        layers: the layers that can be routed.
        skipped: layer index to the reason why it cannot be routed.
    """

    decoder_name: str
    layers: tuple[RoutedLayer, ...]
    skipped: dict[int, str]


def describe_model(model: nn.Module) -> DecoderSpec:
    """Finds the decoder of `model` and the layers that can be routed.

    Args:
        model: a transformers decoder, alone or under a head.

    Returns:
        Where the decoder is, its layers that can be routed, and why the others cannot.

    Raises:
        ValueError: no layer can be routed; the message gives the reason.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(f"`model` must be a decoder alone, got {model_type}: an encoder-decoder.")
    decoder_name, decoder = _find_decoder(model, model_type)
    routed, skipped = [], {}
    for position, layer in enumerate(decoder.layers):
        attention: Any = getattr(layer, "self_attn", None)
        reason = _refusal(decoder, layer, attention, position)
        if reason is not None:
            skipped[position] = reason
            continue
        name = f"{decoder_name}.layers.{position}.self_attn".lstrip(".")
        index = getattr(attention, "layer_idx", position)
        routed.append(RoutedLayer(index, name, attention.head_dim, _num_key_value_heads(attention)))
    if not routed:
        reasons = "; ".join(dict.fromkeys(skipped.values()))
        raise ValueError(f"`model` must have a full-attention layer that can be routed, got {model_type}: {reasons}.")
    return DecoderSpec(decoder_name, tuple(routed), skipped)


def pre_rotary_keys(attention: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Key states of `hidden_states` before the rotary embedding, after the key norm where the module has one.

    Args:
        attention: an attention module that `describe_model` lists.
        hidden_states: `[..., hidden_size]`, the module's input.

    Returns:
        `[..., H, head_dim]` in the dtype of the projection.
    """
    key_value_width = _num_key_value_heads(attention) * attention.head_dim
    if hasattr(attention, "k_proj"):
        keys = attention.k_proj(hidden_states)
    else:
        fused = attention.qkv_proj(hidden_states)
        query_width = fused.shape[-1] - 2 * key_value_width
        keys = fused[..., query_width : query_width + key_value_width]
    norm = next((getattr(attention, n) for n in KEY_NORM_NAMES if getattr(attention, n, None) is not None), None)
    heads = (*keys.shape[:-1], -1, attention.head_dim)
    if norm is None:
        return keys.view(heads)
    if norm.weight.shape == (key_value_width,):  # OLMo2 normalises all heads together
        return norm(keys).view(heads)
    return norm(keys.view(heads))


class KeyProbe:
    """Stands in for a route: catches the keys and the mask that reach the attention function."""

    def __init__(self):
        self.keys = self.mask = None

    def attend(self, module, query, key, value, attention_mask, **kwargs):
        self.keys, self.mask = key, attention_mask
        return query.transpose(1, 2).contiguous(), None


@torch.no_grad()
def check_pre_rotary_keys(model: nn.Module, decoder_name: str, layers: Sequence[RoutedLayer]) -> None:
    """Runs one layer of each attention class with an identity rotary embedding and compares its keys with ours.

    Layers whose own weights are on the meta device are left out.

    Args:
        model: the model.
        decoder_name: qualified name of its decoder.
        layers: routed layers; their attention modules must already use the elastic attention function.

    Raises:
        ValueError: the route does not reach the attention function, or other keys do than the router would see, or a
            mask of the layer's own making.
    """
    decoder = model.get_submodule(decoder_name)
    seen = set()
    for routed in layers:
        attention = model.get_submodule(routed.name)
        layer = model.get_submodule(routed.name.removesuffix(".self_attn"))
        if type(attention) in seen or any(weight.is_meta for weight in _base_weights(layer)):
            continue
        seen.add(type(attention))
        hidden, probe = _probe(decoder, layer, attention)
        if probe.keys is None:
            raise ValueError(
                f"`model` must hand keyword arguments down to its attention, got {type(layer).__name__}: "
                "it drops keyword arguments, so routing cannot reach the attention."
            )
        expected = pre_rotary_keys(attention, hidden).transpose(1, 2)
        if not torch.allclose(probe.keys.float(), expected.float(), rtol=1e-2, atol=1e-3):
            raise ValueError(
                f"`model` must rotate the normalised output of its key projection, got {type(attention).__name__}: "
                "its keys are changed between the rotary embedding and the attention."
            )
        if probe.mask is not None:
            raise ValueError(
                f"`model` must leave the attention mask to its decoder, got {type(attention).__name__}: it makes its "
                "own, which a sparse head would not see."
            )


def _base_weights(layer) -> list[nn.Parameter]:
    return [weight for name, weight in layer.named_parameters() if ".elastic_" not in name]


def _probe(decoder, layer, attention) -> tuple[torch.Tensor, KeyProbe]:
    """Input of the attention module and what reached its attention function, for one pass of `layer` without mask."""
    weight = next(weight for weight in _base_weights(layer) if weight.is_floating_point())
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 4, decoder.config.hidden_size, generator=generator)
    hidden = hidden.to(device=weight.device, dtype=weight.dtype)
    caught = {}

    def catch(module, args, kwargs):
        caught["input"] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    probe = KeyProbe()
    handle = attention.register_forward_pre_hook(catch, with_kwargs=True)
    was_training = layer.training
    layer.eval()
    try:
        layer(
            hidden,
            attention_mask=None,
            position_ids=torch.arange(4, device=hidden.device)[None],
            position_embeddings=_identity_rotary(decoder, hidden),
            elastic_route=probe,
        )
    finally:
        handle.remove()
        layer.train(was_training)
    return caught["input"], probe


def _find_decoder(model: nn.Module, model_type: str) -> tuple[str, nn.Module]:
    """The module that owns the decoder layers, and its qualified name."""
    preferred = model.get_decoder() if hasattr(model, "get_decoder") else model
    candidates = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and hasattr(module, "rotary_emb")
    ]
    if not candidates:
        raise ValueError(f"`model` must be a decoder with rotary attention layers, got {model_type}: it has none.")
    return next((pair for pair in candidates if pair[1] is preferred), candidates[0])


def _identity_rotary(decoder: nn.Module, hidden_states: torch.Tensor):
    """The decoder's own rotary embedding with every angle zero: cos 1 and sin 0, or the complex 1."""
    rotary = decoder.rotary_emb
    positions = torch.zeros(1, hidden_states.shape[1], dtype=torch.long, device=hidden_states.device)
    if hasattr(rotary, "mrope_section"):  # a row of positions for each axis of an image, for text too
        positions = positions.expand(len(rotary.mrope_section), -1, -1)
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        embedding = rotary(hidden_states, positions, "full_attention")
    else:
        embedding = rotary(hidden_states, positions)
    if isinstance(embedding, tuple):
        cos, sin = embedding
        return torch.ones_like(cos), torch.zeros_like(sin)
    return torch.ones_like(embedding)


def _refusal(decoder, layer, attention, position) -> str | None:
    """Why this layer cannot be routed, or None."""
    if attention is None:
        return "its layers have no `self_attn` module"
    if hasattr(attention, "kv_a_proj_with_mqa") or hasattr(attention, "kv_b_proj"):
        return "multi-head latent attention has no key heads before its rotary embedding"
    if not hasattr(attention, "k_proj") and not hasattr(attention, "qkv_proj"):
        return "its attention has no `k_proj` or `qkv_proj`"
    if not hasattr(attention, "head_dim"):
        return "its attention has no `head_dim`"
    if not (getattr(attention, "is_causal", True) and getattr(decoder.config, "is_causal", True)):
        return "its attention is not causal, as every mode is"
    window = _sliding_window(decoder.config, attention, position)
    if window is not None:
        return window
    if not _takes_keywords(layer) or not _takes_keywords(attention):
        return "its decoder layers drop keyword arguments, so routing cannot reach the attention"
    return None


def _sliding_window(config, attention, position) -> str | None:
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        kind = layer_types[position]
        return None if kind == "full_attention" else f"a layer of type {kind} already limits attention"
    size = getattr(attention, "sliding_window", None)
    if size is None and getattr(config, "use_sliding_window", True):
        size = getattr(config, "sliding_window", None)
    return None if size is None else f"a sliding window of {size} tokens already limits attention"


def _num_key_value_heads(attention: nn.Module) -> int:
    groups = getattr(attention, "num_key_value_groups", None)
    if groups is None:
        return attention.config.num_key_value_heads
    return attention.config.num_attention_heads // groups


def _takes_keywords(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
