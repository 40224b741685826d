"""Attention under one pair of modes: on the fused kernels where they take it, else on the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from elastic_kernels import KeptBlocks
from elastic_kernels.routed_attention.counterfactual import sample_tiles, token_weights
from elastic_kernels.routed_attention.dispatch import choose_implementation
from elastic_kernels.routed_attention.reference import block_sparse_attention, mix_by_gate, streaming_attention
from elastic_kernels.routed_decode.api import MAX_QUERIES
from elastic_kernels.routed_decode.api import choose_implementation as choose_decode_implementation

from . import operators


class PairAttention:
    """Attention of one layer in one forward pass, under whatever pair of modes its tokens need.

    Args:
        inputs: query `[B, Hq, Q, head_dim]`, key and value `[B, H, K, head_dim]` of one dtype, the tokens held so far,
            the queries' own at the end.
        run_full: the model's own attention over all of them, `[B, Hq, Q, head_dim]`.
        sizes: `sink_size` and `window_size`.
        scores: `softcap`, `sinks` and `scale`.
        counterfactual: `counterfactual_fraction` and `counterfactual_noise` of `routed_attention`.
    """

    def __init__(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        run_full: Callable[[], torch.Tensor],
        sizes: dict[str, Any],
        scores: dict[str, Any],
        counterfactual: tuple[float, torch.Tensor | None] = (1.0, None),
    ):
        self.inputs = inputs
        self.sizes = sizes
        self.scores = scores
        self.counterfactual = counterfactual
        self._run_full = run_full
        self._full: torch.Tensor | None = None

    def full(self) -> torch.Tensor:
        """The model's own attention, so that full heads are its own to the last bit; computed once."""
        if self._full is None:
            self._full = self._run_full()
        return self._full

    def __call__(
        self,
        modes: tuple[str, str],
        gate: torch.Tensor,
        *,
        start: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        kept_blocks: KeptBlocks | None = None,
    ) -> tuple[torch.Tensor, str]:
        """Each head's output in the mode that its gate picks.

        Args:
            modes: (retrieval, sparse), each `"FA"`, `"SSA"` or `"XA"`.
            gate: `[N, H]`, 1 = sparse, one row for each row or packed segment.
            start: int `[B]`, first valid key of each row.
            cu_seqlens: int `[N + 1]`, bounds of packed segments.
            kept_blocks: XAttention's blocks, for a pair that has it.

        Returns:
            `[B, Hq, Q, head_dim]` and the name of the implementation that ran.
        """
        query, key, value = self.inputs
        softcap, sinks = self.scores["softcap"], self.scores["sinks"]
        if modes == ("FA", "FA"):
            implementation = choose_implementation(None, query, key, value, softcap=softcap)
            if implementation == "reference" or not gate.is_floating_point():
                return self.full(), "dense"
            # Training's full heads are the kernels' anyway, and these skip later keys of padded rows; SDPA does not.
            modes, gate = ("FA", "SSA"), torch.zeros_like(gate, dtype=torch.bool)
        is_short = cu_seqlens is None and query.shape[2] <= MAX_QUERIES
        if modes == ("FA", "SSA") and is_short and not gate.is_floating_point():
            implementation = choose_decode_implementation(None, query, key, value, sinks)
            if implementation != "reference":
                out = operators.routed_decode(query, key, value, gate, start=start, **self.sizes, **self.scores)
                return out, operators.describe(implementation)
        implementation = choose_implementation(None, query, key, value, kept_blocks=kept_blocks, softcap=softcap)
        where: dict[str, Any] = {"start": start, "cu_seqlens": cu_seqlens}
        fraction, noise = self.counterfactual
        if noise is not None:  # a sequence may be cut into several segments, each with a row of the gate
            noise = noise.repeat_interleave(len(gate) // len(noise), dim=0)
        # The reference reads where sequences lie, which a graph that is being compiled cannot: it takes all as one.
        in_graph = torch.compiler.is_compiling() and (start is not None or cu_seqlens is not None)
        if implementation != "reference" or in_graph:
            options: dict[str, Any] = {"kept_blocks": kept_blocks, "implementation": implementation}
            options |= {"counterfactual_fraction": fraction, "counterfactual_noise": noise}
            out = operators.routed_attention(
                query, key, value, gate, mode_pair="-".join(modes), **self.sizes, **where, **self.scores, **options
            )
            return out, operators.describe(implementation)

        def run(mode):
            if mode == "FA":
                return self.full()
            if mode == "SSA":
                return streaming_attention(query, key, value, **self.sizes, **where, **self.scores)[0]
            assert kept_blocks is not None
            return block_sparse_attention(query, key, value, kept_blocks=kept_blocks, **where, **self.scores)[0]

        sampled = sample_tiles(fraction, noise, gate, query.shape[2])
        weights = None if sampled is None else token_weights(sampled, query, key.shape[2], start, cu_seqlens)
        return mix_by_gate(gate, run(modes[0]), run(modes[1]), cu_seqlens, weights), implementation
