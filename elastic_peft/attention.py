"""The attention function of routed layers: hands over to the model's own attention or mixes both modes by head."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from elastic_kernels.routed_decode.api import MAX_QUERIES

from . import operators
from .cache import RoutingMemory
from .config import ElasticConfig
from .context import RoutingRecord
from .mode_pairs import PairAttention
from .precision import in_one_dtype
from .sequences import Sequences


ATTENTION_NAME = "elastic"

# Options of the scores: elastic_kernels' name -> transformers' name.
SCORE_ARGUMENTS = {"softcap": "softcap", "sinks": "s_aux", "scale": "scaling"}


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
        start: int64 `[B]`, first valid key of each row, or `None`.
        sequences: the sequences of a pass that holds prompts; `None` for queries that continue one.
        record: filled by a pass that holds prompts.
        memory: the cache layer that holds the tokens before these; `None` without a cache.
        counterfactual: `counterfactual_fraction` and `counterfactual_noise` of `elastic_kernels.routed_attention`.
    """

    gate: torch.Tensor
    config: ElasticConfig
    index: int
    start: torch.Tensor | None = None
    sequences: Sequences | None = None
    record: RoutingRecord | None = None
    memory: RoutingMemory | None = None
    counterfactual: tuple[float, torch.Tensor | None] = (1.0, None)

    def attend(self, module, query, key, value, attention_mask, **kwargs):
        """Mixes the two modes; see `elastic_attention_forward`."""
        _refuse_shards(module)
        scores = {name: kwargs.get(given) for name, given in SCORE_ARGUMENTS.items()}
        base = base_attention(module)
        modes, later_modes = self._modes(module.training)
        if self.sequences is None:
            if later_modes == ("FA", "FA"):
                return base(module, query, key, value, attention_mask, **kwargs)
            tensors = in_one_dtype(query, key, value)
            decoded = self._decode(*tensors, scores=scores)
            if decoded is not None:
                return decoded.transpose(1, 2).contiguous(), None
            assert self.memory is not None  # they continue a cache
            keys_seen = int(self.memory.get_seq_length())
        else:
            if self.record is not None and self.memory is not None and self.memory.store is not None:
                self.record.slots_by_layer[self.index] = self.memory.store.slots
            keys_seen = query.shape[2]
        if all(self._covers(mode, keys_seen) for mode in (*modes, *later_modes)):
            self._note("dense")
            return base(module, query, key, value, attention_mask, **kwargs)
        if module.training and kwargs.get("dropout"):
            raise ValueError(
                f"`attention_dropout` must be 0 while routers train, got {kwargs['dropout']}: load the base model "
                "with attention_dropout=0.0."
            )
        # A static cache is longer than what it holds.
        held = in_one_dtype(query, key[:, :, :keys_seen], value[:, :, :keys_seen])
        pair = PairAttention(
            held,
            run_full=lambda: base(module, query, key, value, attention_mask, **kwargs)[0].transpose(1, 2),
            sizes={"sink_size": self.config.sink_size, "window_size": self.config.window_size},
            scores=scores,
            counterfactual=self.counterfactual,
        )
        # The layers of one model may lie on several devices.
        where = {"start": _to(self.start, query.device)}
        if self.sequences is not None:
            where["cu_seqlens"] = _to(self.sequences.cu_seqlens, query.device)
        if self.sequences is None or (modes == later_modes and "XA" not in modes):
            mixed, implementation = pair(later_modes, self.gate, **where)
        else:
            mixed, implementation = self._attend_prompts(pair, modes, where, module.training)
            if modes != later_modes:
                later, _ = pair(later_modes, self.gate, **where)
                in_prompt = self.sequences.in_prompt.to(query.device)
                mixed = torch.where(in_prompt[:, None, :, None], mixed, later)
        self._note(implementation)
        return mixed.transpose(1, 2).contiguous(), None

    def _decode(self, query, key, value, *, scores) -> torch.Tensor | None:
        """Output of a few tokens after a prompt `[B, Hq, Q, head_dim]`, without waiting for the device.

        `None` if it takes all keys and values, and the host to know how many they are.
        """
        assert self.memory is not None  # it continues a cache
        store, length, count = self.memory.store, self.memory.get_seq_length(), query.shape[2]
        if store is not None:
            return store.attend(query, **scores) if store.takes(count) else None
        if not isinstance(length, torch.Tensor) or count > MAX_QUERIES:
            return None
        options: dict[str, Any] = {"start": _to(self.start, query.device), "length": length, **scores}
        sizes = (self.config.sink_size, self.config.window_size)
        gate = self.gate
        return operators.routed_decode(query, key, value, gate, sink_size=sizes[0], window_size=sizes[1], **options)

    def _attend_prompts(self, pair: PairAttention, modes, where, training) -> tuple[torch.Tensor, str]:
        """The pair's output for the prompts' tokens; notes the share of pairs that XAttention's blocks hold.

        A block's choice depends on all its queries, so answers and padding must not take part in it: a sequence that
        may have any is cut into three segments, of which the middle one is the prompt.
        """
        if "XA" not in modes:
            return pair(modes, self.gate, **where)
        config, sequences, record, gate = self.config, self.sequences, self.record, self.gate
        assert sequences is not None  # queries that continue a prompt select no blocks
        assert record is not None
        query, key, _ = pair.inputs
        # Training needs both modes of every head.
        wanted = torch.ones_like(gate, dtype=torch.bool) if training else gate.bool() == (config.sparse_mode == "XA")
        segments = sequences.lengths.to(query.device)
        if sequences.open_ended:
            where = {"cu_seqlens": sequences.prompt_bounds.to(query.device)}
            gate = gate.repeat_interleave(3, dim=0)
            wanted = wanted.repeat_interleave(3, dim=0)
            wanted[0::3] = wanted[2::3] = False
            segments = where["cu_seqlens"].diff()
        kept = operators.block_selection(
            query,
            key,
            heads=wanted,
            block_size=config.xattn_block_size,
            stride=config.xattn_stride,
            threshold=config.xattn_threshold,
            scale=pair.scores["scale"],
            **where,
        )
        share = kept.computed_share(segments)
        if sequences.open_ended:
            share = _with_later_pairs(share[1::3], segments[1::3], sequences.lengths)
        groups = query.shape[1] // key.shape[1]
        record.xattn_share_by_layer[self.index] = share.unflatten(1, (-1, groups)).mean(dim=-1)
        return pair(modes, gate, **where, kept_blocks=kept)

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


def _to(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


def _with_later_pairs(share: torch.Tensor, prompts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Share of computed pairs of whole sequences, `[N, Hq]`, from their prompts': later queries skip nothing."""
    prompt_pairs, pairs = ((n.double() * (n + 1) / 2).to(share.device)[:, None] for n in (prompts, lengths))
    return (1 - (1 - share) * prompt_pairs / pairs.clamp(min=1)).float()


def base_attention(module: nn.Module):
    """The model's own attention function, read from its config at each call.

    Args:
        module: an attention module with a `router`.

    Returns:
        A function of transformers' attention interface.
    """
    config = module.router.base_config
    function = _base_function(module)

    def call(module, *args, **kwargs):
        return function(_AsConfigured(module, config), *args, **kwargs)

    return call


def _base_function(module: nn.Module):
    eager = next(
        function
        for kind in type(module).__mro__
        if (function := getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)) is not None
    )
    return ALL_ATTENTION_FUNCTIONS.get_interface(module.router.base_config._attn_implementation, eager)


def _refuse_shards(module: nn.Module) -> None:
    """Engines that cut sequences over devices replace the attention that reads them; ours would read a shard.

    Raises:
        ValueError: DeepSpeed has replaced the model's attention, or `context_parallel` torch's.
    """
    for function in (_base_function(module), F.scaled_dot_product_attention):
        engine = "" if isinstance(function, BuiltinFunctionType) else function.__module__
        if engine.startswith(("deepspeed.", "torch.distributed.")):
            raise ValueError(
                f"Sequence and context parallelism must be off with an active ELASTIC adapter, got {engine}: it hands "
                "a layer a shard of each sequence, and a router reads both ends."
            )


class _AsConfigured:
    """An attention module as its own attention function knows it: with the config it had before it was routed."""

    def __init__(self, module, config):
        self._module = module
        self.config = config

    def __getattr__(self, name):
        return getattr(self._module, name)
