"""Inner products that the backward of routed attention starts from, portable Triton kernels.

    delta_i = <dO_i, O_i>        grad gate = sum over a group's queries i of <dO_i, O_sparse_i - O_retrieval_i>

- delta kernel: one program computes one tile of `BLOCK_M` queries of one query head: its `delta`, and the sum over the
  tile of `<dO_i, O_i - other_i>`, where `other` is the output of the mode that the head does not run; zero for tiles
  for which that output was not sampled.
- gate kernel: one program adds up the tiles of one (sequence, key-value head), in a fixed order.

Grid: one axis each. Sizes: head_dim 16-256; fp16, bf16, fp32; fp32 sums. Offsets of tiles are int64.
"""

import torch
import triton
import triton.language as tl

from .._launch import count_tiles, on_device, tile_constants
from .._primitives import is_sampled, locate_tile
from .counterfactual import launch_arguments


_BLOCK_M = 64
_BLOCK_T = 128


@triton.jit
def _routed_attention_bwd_delta_kernel(
    do_ptr, out_ptr, other_ptr, delta_ptr, sum_ptr, gate_ptr, start_ptr, cu_seqlens_ptr, sampled_ptr,
    stride_ob, stride_oh, stride_oq, stride_cb, stride_ch, stride_cq, stride_lb, stride_lh, stride_gn, stride_gh,
    num_sequences, num_kv_heads, q_length, k_length, sample_tiles,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_START: tl.constexpr, HAS_CU_SEQLENS: tl.constexpr,
    HAS_OTHER: tl.constexpr, SAMPLE_TILE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence, row, head, tile, _, _, num_queries, q_base = locate_tile(
        tl.arange(0, BLOCK_G), gate_ptr, start_ptr, cu_seqlens_ptr, stride_gn, stride_gh, num_sequences, num_kv_heads,
        q_length, k_length, GROUP, HAS_START, HAS_CU_SEQLENS, BLOCK_M,
    )  # fmt: skip
    row = row.to(tl.int64)
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    valid = offs_m < num_queries
    io_mask = valid[:, None] & (offs_d < HEAD_DIM)[None, :]
    rows = (q_base + offs_m).to(tl.int64)
    do_rows = row * stride_ob + head.to(tl.int64) * stride_oh + rows[:, None] * stride_oq + offs_d[None, :]
    out_rows = row * stride_cb + head.to(tl.int64) * stride_ch + rows[:, None] * stride_cq + offs_d[None, :]
    do = tl.load(do_ptr + do_rows, mask=io_mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
    out = tl.load(out_ptr + out_rows, mask=io_mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
    delta = tl.sum(do * out, 1)
    tl.store(delta_ptr + row * stride_lb + head.to(tl.int64) * stride_lh + rows, delta, mask=valid)
    if HAS_OTHER:
        if SAMPLE_TILE > 0:
            sampled = is_sampled(
                sampled_ptr, sequence, head // GROUP, tile, num_kv_heads, sample_tiles, BLOCK_M, SAMPLE_TILE
            )
            io_mask = io_mask & sampled
        other = tl.load(other_ptr + out_rows, mask=io_mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
        difference = tl.sum(tl.sum(do * (out - other), 1), 0)
        if SAMPLE_TILE > 0:
            difference = tl.where(sampled, difference, 0.0)
        num_heads = num_kv_heads * GROUP
        if HAS_CU_SEQLENS:
            slot = tl.num_programs(0) // num_heads - 1 - tl.program_id(0) // num_heads
        else:
            slot = sequence * tl.cdiv(q_length, BLOCK_M) + tile
        tl.store(sum_ptr + slot.to(tl.int64) * num_heads + head, difference)


@triton.jit
def _routed_attention_bwd_gate_kernel(
    sum_ptr, gate_ptr, grad_ptr, cu_seqlens_ptr, stride_gn, stride_gh, num_sequences, num_kv_heads, q_length, weight,
    GROUP: tl.constexpr, HAS_CU_SEQLENS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0) // num_kv_heads
    kv_head = tl.program_id(0) % num_kv_heads
    if HAS_CU_SEQLENS:
        offs_n = tl.arange(0, BLOCK_S)
        begin = tl.load(cu_seqlens_ptr + offs_n, mask=offs_n < num_sequences, other=0).to(tl.int32)
        end = tl.load(cu_seqlens_ptr + offs_n + 1, mask=offs_n < num_sequences, other=0).to(tl.int32)
        tiles_of = (end - begin + BLOCK_M - 1) // BLOCK_M
        first = tl.sum(tl.where(offs_n < sequence, tiles_of, 0), 0)
        tiles = tl.sum(tl.where(offs_n == sequence, tiles_of, 0), 0)
    else:
        tiles = tl.cdiv(q_length, BLOCK_M)
        first = sequence * tiles
    offs_h = tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for t in range(0, tiles, BLOCK_T):
        offs_t = t + tl.arange(0, BLOCK_T)
        slots = (first + offs_t).to(tl.int64)[:, None] * (num_kv_heads * GROUP)
        mask = (offs_t < tiles)[:, None] & (offs_h < GROUP)[None, :]
        total += tl.load(sum_ptr + slots + kv_head * GROUP + offs_h[None, :], mask=mask, other=0.0)
    # The sums are of the chosen minus the other output, over one tile for every `weight`.
    gate = tl.load(gate_ptr + sequence.to(tl.int64) * stride_gn + kv_head * stride_gh)
    grad = tl.sum(tl.sum(total, 1), 0) * tl.where(gate != 0, 1.0, -1.0) * weight
    tl.store(grad_ptr + tl.program_id(0), grad.to(grad_ptr.dtype.element_ty))


def launch_delta(grad_output, output, other, gate, *, sampled, k_length, start, cu_seqlens):
    """Launches the kernels.

    Args:
        grad_output: `[B, Hq, Q, D]`, channels together.
        output: `[B, Hq, Q, D]`, what `routed_attention` returned.
        other: the output of the other mode of every head, in output's memory layout; None to leave the gate out.
        gate: `[N, Hkv]`, as `routed_attention` takes it.
        sampled: the tiles of queries for which `other` was computed; None = all.
        k_length: tokens a row of the key.
        start: as in `routed_attention`.
        cu_seqlens: as there.

    Returns:
        `delta`, float32 `[B, Hq, Q]`, not written for padded queries, and the gate's gradient in its dtype or None.
    """
    batch, num_heads, q_length, head_dim = grad_output.shape
    sequences, num_kv_heads = gate.shape
    group = num_heads // num_kv_heads
    constants = tile_constants(gate, num_heads, start, cu_seqlens)
    tiles = count_tiles(batch, q_length, _BLOCK_M, cu_seqlens)
    delta = grad_output.new_empty((batch, num_heads, q_length), dtype=torch.float32)
    mask, sample_tiles, sample_tile = launch_arguments(sampled)
    sums = None if other is None else delta.new_empty((tiles, num_heads))
    with on_device(grad_output):
        _routed_attention_bwd_delta_kernel[(tiles * num_heads,)](
            grad_output, output, other, delta, sums, gate, start, cu_seqlens, mask,
            *grad_output.stride()[:3], *output.stride()[:3], *delta.stride()[:2], *gate.stride(),
            sequences, num_kv_heads, q_length, k_length, sample_tiles,
            **constants, HEAD_DIM=head_dim, HAS_OTHER=other is not None, SAMPLE_TILE=sample_tile,
            BLOCK_M=_BLOCK_M, BLOCK_D=max(triton.next_power_of_2(head_dim), 16), num_warps=4,
        )  # fmt: skip
        if other is None:
            return delta, None
        grad_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
        _routed_attention_bwd_gate_kernel[(gate.numel(),)](
            sums, gate, grad_gate, cu_seqlens, *gate.stride(), sequences, num_kv_heads, q_length,
            1 if sampled is None else sampled.weight, GROUP=group, HAS_CU_SEQLENS=cu_seqlens is not None,
            BLOCK_S=triton.next_power_of_2(sequences), BLOCK_H=triton.next_power_of_2(group),
            BLOCK_M=_BLOCK_M, BLOCK_T=_BLOCK_T, num_warps=4,
        )  # fmt: skip
    return delta, grad_gate
