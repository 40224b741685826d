"""The attention function of routed layers: hands over to the model's own attention or mixes both modes by head."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from elastic_kernels import KeptBlocks, block_selection, routed_attention
from elastic_kernels.routed_attention.dispatch import choose_implementation
from elastic_kernels.routed_attention.reference import block_sparse_attention, mix_by_gate, streaming_attention

from .config import ElasticConfig
from .context import RoutingRecord


ATTENTION_NAME = "elastic"


def register_attention() -> None:
    """Makes the attention function known to transformers under the name `"elastic"`; idempotent."""
    AttentionInterface.register(ATTENTION_NAME, elastic_attention_forward)


def elastic_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    elastic_route: ElasticRoute | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one layer, in transformers' attention interface.

    Args:
        module: the attention module, with its `router`.
        query: `[B, Hq, Q, head_dim]`.
        key: `[B, H, K, head_dim]`.
        value: `[B, H, K, head_dim]`.
        attention_mask: whatever the model's own attention implementation expects.
        elastic_route: the layer's decisions; `None` runs the model's own attention.

    Returns:
        `[B, Q, Hq, head_dim]`, and attention weights only where the model's own attention ran alone.
    """
    if elastic_route is None:
        return base_attention(module)(module, query, key, value, attention_mask, **kwargs)
    return elastic_route.attend(module, query, key, value, attention_mask, **kwargs)


@dataclass
class ElasticRoute:
    """One layer's decisions in one forward pass.

    Args:
        gate: `[N, H]`; bool (True = sparse), or float32 0.0 / 1.0 with a gradient.
        config: the active adapter's configuration.
        index: layer index.
        past: tokens in the cache before this forward pass.
        start: int64 `[B]`, first valid key of each row, or `None`.
        cu_seqlens: int32 `[N + 1]` for packed rows, or `None`.
        record: filled while a prompt runs; `None` for queries that continue one.
    """

    gate: torch.Tensor
    config: ElasticConfig
    index: int
    past: Any = 0
    start: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    record: RoutingRecord | None = None

    def attend(self, module, query, key, value, attention_mask, **kwargs):
        """Mixes the two modes; see `elastic_attention_forward`."""
        base = base_attention(module)
        keys_seen = int(self.past) + query.shape[2]
        retrieval, sparse = self._modes()
        if self._covers(retrieval, keys_seen) and self._covers(sparse, keys_seen):
            self._note("dense")
            return base(module, query, key, value, attention_mask, **kwargs)
        if module.training and kwargs.get("dropout"):
            raise ValueError(
                f"`attention_dropout` must be 0 while routers train, got {kwargs['dropout']}: load the base model "
                "with attention_dropout=0.0."
            )
        # A static cache is longer than what it holds.
        key_seen, value_seen = key[:, :, :keys_seen], value[:, :, :keys_seen]
        kept: Any = None
        if "XA" in (retrieval, sparse):
            kept = self._kept_blocks(query, key_seen, kwargs.get("scaling"))
        sinks, softcap = kwargs.get("s_aux"), kwargs.get("softcap")
        sizes: dict[str, Any] = {"sink_size": self.config.sink_size, "window_size": self.config.window_size}
        options: dict[str, Any] = {
            "start": self.start,
            "cu_seqlens": self.cu_seqlens,
            "softcap": softcap,
            "sinks": sinks,
            "scale": kwargs.get("scaling"),
        }
        implementation = "reference"
        if self.record is not None:  # the fused kernels take prompts, not the few queries that continue one
            implementation = choose_implementation(
                None, query, key_seen, value_seen, self.gate, kept_blocks=kept, softcap=softcap, sinks=sinks
            )
        self._note(implementation)
        if implementation != "reference":
            options |= {"mode_pair": self.config.mode_pair, "kept_blocks": kept, "implementation": implementation}
            mixed: Any = routed_attention(query, key_seen, value_seen, self.gate, **sizes, **options)
            return mixed.transpose(1, 2), None

        def run(mode):
            if mode == "FA":
                # The model's own attention, so that full heads are its own to the last bit.
                return base(module, query, key, value, attention_mask, **kwargs)[0].transpose(1, 2)
            if mode == "SSA":
                return streaming_attention(query, key_seen, value_seen, **sizes, **options)[0]
            return block_sparse_attention(query, key_seen, value_seen, kept_blocks=kept, **options)[0]

        mixed = mix_by_gate(self.gate, run(retrieval), run(sparse), cu_seqlens=self.cu_seqlens)
        return mixed.transpose(1, 2).contiguous(), None

    def _kept_blocks(self, query, key, scale) -> KeptBlocks:
        """XAttention's blocks for this prompt; notes what share of the causal pairs they hold."""
        config = self.config
        kept = block_selection(
            query,
            key,
            block_size=config.xattn_block_size,
            stride=config.xattn_stride,
            threshold=config.xattn_threshold,
            start=self.start,
            cu_seqlens=self.cu_seqlens,
            scale=scale,
        )
        assert self.record is not None  # only prompts select blocks
        share = kept.computed_share(self.record.lengths.to(query.device))
        groups = query.shape[1] // key.shape[1]
        self.record.xattn_share_by_layer[self.index] = share.unflatten(1, (-1, groups)).mean(dim=-1)
        return kept

    def _modes(self) -> tuple[str, str]:
        """Modes of retrieval and sparse heads for this pass: XAttention selects blocks for prompt queries only."""
        if self.record is not None:
            return self.config.retrieval_mode, self.config.sparse_mode
        streams = self.config.decode == "routed" and self.config.sparse_mode == "SSA"
        return "FA", "SSA" if streams else "FA"

    def _covers(self, mode: str, keys_seen: int) -> bool:
        """Whether `mode` computes every causal pair of a sequence of this length."""
        if mode == "SSA":
            return keys_seen <= self.config.sink_size + self.config.window_size
        if mode == "XA":  # the first and the diagonal block are always kept
            return keys_seen <= 2 * self.config.xattn_block_size
        return True

    def _note(self, implementation: str):
        if self.record is not None and self.record.implementation in (None, "dense"):
            self.record.implementation = implementation


def base_attention(module: nn.Module):
    """The model's own attention function, read from its config at each call.

    Args:
        module: an attention module with a `router`.

    Raises:
        ValueError: a sequence-parallel engine has replaced the model's attention.
    """
    config = module.router.base_config
    eager = next(
        function
        for kind in type(module).__mro__
        if (function := getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)) is not None
    )
    function = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)
    if type(function).__module__.startswith("deepspeed") or function.__module__.startswith("deepspeed"):
        raise ValueError(
            "`attn_implementation` must be a single-device attention, got a sequence-parallel wrapper "
            f"({config._attn_implementation}): routed layers would attend their shard only."
        )

    def call(module, *args, **kwargs):
        return function(_AsConfigured(module, config), *args, **kwargs)

    return call


class _AsConfigured:
    """An attention module as its own attention function knows it: with the config it had before it was routed."""

    def __init__(self, module, config):
        self._module = module
        self.config = config

    def __getattr__(self, name):
        return getattr(self._module, name)
