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
from .sequences import Sequences


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
        sequences: the sequences of a pass that holds prompts; `None` for queries that continue one.
        record: filled by a pass that holds prompts.
    """

    gate: torch.Tensor
    config: ElasticConfig
    index: int
    past: int = 0
    start: torch.Tensor | None = None
    sequences: Sequences | None = None
    record: RoutingRecord | None = None

    def attend(self, module, query, key, value, attention_mask, **kwargs):
        """Mixes the two modes; see `elastic_attention_forward`."""
        base = base_attention(module)
        keys_seen = self.past + query.shape[2]
        modes, later_modes = self._modes(module.training)
        if all(self._covers(mode, keys_seen) for mode in (*modes, *later_modes)):
            self._note("dense")
            return base(module, query, key, value, attention_mask, **kwargs)
        if module.training and kwargs.get("dropout"):
            raise ValueError(
                f"`attention_dropout` must be 0 while routers train, got {kwargs['dropout']}: load the base model "
                "with attention_dropout=0.0."
            )
        # A static cache is longer than what it holds.
        key_held, value_held = key[:, :, :keys_seen], value[:, :, :keys_seen]
        # The layers of one model may lie on several devices.
        start = None if self.start is None else self.start.to(query.device)
        cu_seqlens = None if self.sequences is None else self.sequences.cu_seqlens
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(query.device)
        where: dict[str, Any] = {"start": start, "cu_seqlens": cu_seqlens}
        kept: Any = None
        kept_where = where
        if "XA" in modes:
            kept, kept_where = self._keep_blocks(query, key_held, kwargs.get("scaling"), where)
        sinks, softcap = kwargs.get("s_aux"), kwargs.get("softcap")
        scores: dict[str, Any] = {"softcap": softcap, "sinks": sinks, "scale": kwargs.get("scaling")}
        sizes: dict[str, Any] = {"sink_size": self.config.sink_size, "window_size": self.config.window_size}
        implementation = "reference"
        if self.sequences is not None and modes == later_modes:  # the fused kernels take whole prompts
            implementation = choose_implementation(
                None, query, key_held, value_held, self.gate, kept_blocks=kept, softcap=softcap, sinks=sinks
            )
        self._note(implementation)
        if implementation != "reference":
            sizes |= {"mode_pair": self.config.mode_pair, "kept_blocks": kept, "implementation": implementation}
            fused: Any = routed_attention(query, key_held, value_held, self.gate, **sizes, **where, **scores)
            return fused.transpose(1, 2), None

        def run(mode):
            if mode == "FA":
                # The model's own attention, so that full heads are its own to the last bit.
                return base(module, query, key, value, attention_mask, **kwargs)[0].transpose(1, 2)
            if mode == "SSA":
                return streaming_attention(query, key_held, value_held, **sizes, **where, **scores)[0]
            return block_sparse_attention(query, key_held, value_held, kept_blocks=kept, **kept_where, **scores)[0]

        outputs = {mode: run(mode) for mode in dict.fromkeys((*modes, *later_modes))}
        mixed = mix_by_gate(self.gate, outputs[modes[0]], outputs[modes[1]], cu_seqlens)
        if later_modes != modes:
            assert self.sequences is not None
            later = mix_by_gate(self.gate, outputs[later_modes[0]], outputs[later_modes[1]], cu_seqlens)
            in_prompt = self.sequences.in_prompt.to(query.device)
            mixed = torch.where(in_prompt[:, None, :, None], mixed, later)
        return mixed.transpose(1, 2).contiguous(), None

    def _keep_blocks(self, query, key, scale, where) -> tuple[KeptBlocks, dict[str, Any]]:
        """XAttention's blocks of the prompts, and the segments they count from; notes the share of pairs they hold.

        A block's choice depends on all its queries, so answers and padding must not take part in it.
        """
        config, sequences, record = self.config, self.sequences, self.record
        assert sequences is not None  # queries that continue a prompt select no blocks
        assert record is not None
        segments = sequences.lengths
        if sequences.open_ended:
            bounds = sequences.prompt_bounds.to(query.device)
            where = {"start": None, "cu_seqlens": bounds}
            segments = bounds.diff()
        sizes = {"block_size": config.xattn_block_size, "stride": config.xattn_stride}
        kept = block_selection(query, key, **sizes, threshold=config.xattn_threshold, scale=scale, **where)
        share = kept.computed_share(segments.to(query.device))
        if sequences.open_ended:
            share = _with_later_pairs(share[1::3], segments[1::3], sequences.lengths)
        groups = query.shape[1] // key.shape[1]
        record.xattn_share_by_layer[self.index] = share.unflatten(1, (-1, groups)).mean(dim=-1)
        return kept, where

    def _modes(self, training: bool) -> tuple[tuple[str, str], tuple[str, str]]:
        """(retrieval, sparse) modes of prompt queries and of the queries after a prompt.

        XAttention selects blocks for prompts only; later tokens of its heads attend everything, in training as when
        they are decoded. Later tokens of a streaming head do so with `decode="full"` at inference.
        """
        streams = self.config.sparse_mode == "SSA" and (training or self.config.decode == "routed")
        later = ("FA", "SSA" if streams else "FA")
        if self.sequences is None:
            return later, later
        prompt = (self.config.retrieval_mode, self.config.sparse_mode)
        return prompt, later if self.sequences.open_ended else prompt

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


def _with_later_pairs(share: torch.Tensor, prompts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Share of computed pairs of whole sequences, `[N, Hq]`, from their prompts': later queries skip nothing."""
    prompt_pairs, pairs = ((n.double() * (n + 1) / 2).to(share.device)[:, None] for n in (prompts, lengths))
    return (1 - (1 - share) * prompt_pairs / pairs.clamp(min=1)).float()


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
