"""Backward of routed attention: runs its kernels, and hands them what they take alike."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from .._launch import MAX_INT32, compute_capability, count_tiles, is_interpreting, pair_modes, tile_constants
from ..block_selection import KeptBlocks
from .backward_delta import launch_delta
from .backward_dkv import launch_dkv
from .backward_dq import launch_dq
from .configs import INTERPRETER, TileConfig


@dataclass(frozen=True)
class BackwardLaunch:
    """Arguments of the backward's launches: `tensors`, `pointers`, `strides` and `sizes` come in this order."""

    tensors: tuple[torch.Tensor, ...]
    pointers: tuple[torch.Tensor | None, ...]
    strides: tuple[int, ...]
    sizes: tuple[int | float, ...]
    constants: dict[str, Any]
    kept_blocks: KeptBlocks | None

    def tiles(self, length: int, block: int) -> int:
        """Tiles of `block` tokens of all sequences, as `count_tiles`."""
        _, _, cu_seqlens = self.pointers
        return count_tiles(self.tensors[0].shape[0], length, block, cu_seqlens)

    def config(self, choose) -> TileConfig:
        """The tile shape that `choose` of `configs.py` gives, no larger than a kept block."""
        query = self.tensors[0]
        if is_interpreting():
            config = INTERPRETER
        else:
            config = choose(query.shape[3], query.element_size(), compute_capability(query.device.index))
        if self.kept_blocks is None:
            return config
        size = self.kept_blocks.block_size
        return config._replace(block_m=min(config.block_m, size), block_n=min(config.block_n, size))


def prepare_backward(
    query,
    key,
    value,
    grad_output,
    lse,
    delta,
    gate,
    *,
    mode_pair,
    sink_size,
    window_size,
    start=None,
    cu_seqlens=None,
    kept_blocks=None,
    softcap=None,
    scale,
) -> BackwardLaunch:
    """Arguments as `routed_attention`; `lse` in log2."""
    _, num_heads, q_length, head_dim = query.shape
    sequences, num_kv_heads = gate.shape
    k_length = key.shape[2]
    list_rows, list_columns = (0, 0) if kept_blocks is None else kept_blocks.indices.shape[2:]
    retrieval_mode, sparse_mode = pair_modes(mode_pair)
    return BackwardLaunch(
        tensors=(query, key, value, grad_output, lse, delta),
        pointers=(gate, start, cu_seqlens),
        strides=(
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad_output.stride()[:3], *lse.stride()[:2],
            *gate.stride(),
        ),
        sizes=(
            sequences, num_kv_heads, q_length, k_length, list_rows, list_columns,
            min(sink_size, MAX_INT32), min(window_size, MAX_INT32), scale, 0.0 if softcap is None else softcap,
        ),
        constants={
            **tile_constants(gate, num_heads, start, cu_seqlens),
            "RETRIEVAL_MODE": retrieval_mode,
            "SPARSE_MODE": sparse_mode,
            "HEAD_DIM": head_dim,
            "HAS_SOFTCAP": softcap is not None,
            "XA_BLOCK": 0 if kept_blocks is None else kept_blocks.block_size,
            "BLOCK_D": max(triton.next_power_of_2(head_dim), 16),
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        },
        kept_blocks=kept_blocks,
    )  # fmt: skip


def routed_attention_backward(grad_output, inputs, results, needs, forward, sampled=None, **options):
    """Launches the kernels that the wanted gradients need.

    Args:
        grad_output: `[B, Hq, Q, D]`.
        inputs: query, key, value, gate and sinks, as `routed_attention` takes them.
        results: the output `[B, Hq, Q, D]` and the log-sum-exp `[B, Hq, Q]` that the forward returned.
        needs: whether each of the inputs needs a gradient.
        forward: the launcher of the forward, for the output of the mode that each head did not run.
        sampled: the tiles of queries that the gate's gradient is estimated from; None = all.
        options: the other arguments of `forward`.

    Returns:
        The gradients of the inputs, None for those that need none.
    """
    query, key, value, gate, sinks = inputs
    output, lse = results
    where = {name: options[name] for name in ("start", "cu_seqlens")}
    query, key, value, grad_output = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, grad_output)
    )
    grad_query = grad_key = grad_value = grad_sinks = other = None
    if needs[3]:
        other, _ = forward(query, key, value, gate == 0, sinks=sinks, with_lse=False, sampled=sampled, **options)
    delta, grad_gate = launch_delta(grad_output, output, other, gate, sampled=sampled, k_length=key.shape[2], **where)
    del other
    launch = prepare_backward(query, key, value, grad_output, lse * math.log2(math.e), delta, gate, **options)
    if needs[0]:
        grad_query = launch_dq(launch)
    if needs[1] or needs[2]:
        grad_key, grad_value = launch_dkv(launch, options["sink_size"])
    if needs[4]:
        share = torch.exp(sinks.float()[:, None] - lse)  # of the sink in the softmax
        grad_sinks = torch.where(lse == -torch.inf, 0.0, -share * delta).sum((0, 2)).to(sinks.dtype)
    return grad_query, grad_key, grad_value, grad_gate, grad_sinks
