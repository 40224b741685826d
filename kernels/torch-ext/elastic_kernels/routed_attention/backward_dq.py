"""Gradient of the queries of routed attention, portable Triton kernel.

With the scores `s` of the forward, `p = exp(s - lse)`, and `delta` the row sums of `dO * O`:

    ds = p * (dO v^T - delta)        dq = scale * ds k

One program computes one tile of `BLOCK_M` queries of one query head. The grid, the positions and the keys it walks are
those of `forward.py`.

Sizes: head_dim 16-256; fp16, bf16, fp32; fp32 accumulation. Offsets of tiles are int64.
"""

import torch
import triton
import triton.language as tl

from .._launch import on_device
from .._primitives import head_limits, head_mode, key_ranges, locate_tile, masked_key
from ._backward_steps import load_rows, probabilities, seen
from .configs import dq_config


@triton.jit
def _fold_keys(
    dq, q, do, lse, delta, k_ptr, v_ptr, stride_kk, stride_vk, first_key, offs_i, offs_d, length,
    sink_size, window_size, scale, softcap, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what one tile of keys gives to the gradient of the queries, except for the scale."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_j = first_key + offs_n
    present = offs_j < length
    k_rows = k_ptr + first_key.to(tl.int64) * stride_kk + offs_n[:, None] * stride_kk + offs_d[None, :]
    v_rows = v_ptr + first_key.to(tl.int64) * stride_vk + offs_n[:, None] * stride_vk + offs_d[None, :]
    k = load_rows(k_rows, present, offs_d, HEAD_DIM, MASKED)  # [BLOCK_N, BLOCK_D]
    v = load_rows(v_rows, present, offs_d, HEAD_DIM, MASKED)  # [BLOCK_N, BLOCK_D]
    s = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    dp = tl.dot(do, v.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    p, slope = probabilities(s, lse[:, None], scale, softcap, HAS_SOFTCAP)
    if MASKED:
        p = tl.where(seen(offs_i[:, None], offs_j[None, :], sink_size, window_size), p, 0.0)
    ds = p * (dp - delta[:, None]) * slope
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def _routed_attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, gate_ptr, start_ptr, cu_seqlens_ptr, list_ptr, count_ptr,
    stride_qb, stride_qh, stride_qq, stride_kb, stride_kh, stride_kk, stride_vb, stride_vh, stride_vk,
    stride_ob, stride_oh, stride_oq, stride_lb, stride_lh, stride_gn, stride_gh, stride_db, stride_dh, stride_dq,
    num_sequences, num_kv_heads, q_length, k_length, list_rows, list_columns,
    sink_size, window_size, scale, softcap,
    RETRIEVAL_MODE: tl.constexpr, SPARSE_MODE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_START: tl.constexpr, HAS_CU_SEQLENS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, XA_BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    sequence, row, head, tile, base, length, num_queries, q_base = locate_tile(
        tl.arange(0, BLOCK_G), gate_ptr, start_ptr, cu_seqlens_ptr, stride_gn, stride_gh, num_sequences, num_kv_heads,
        q_length, k_length, GROUP, HAS_START, HAS_CU_SEQLENS, BLOCK_M,
    )  # fmt: skip
    row = row.to(tl.int64)
    kv_head = head // GROUP

    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    dq_head = dq_ptr + row * stride_db + head.to(tl.int64) * stride_dh
    if HAS_START:
        # Queries of padding see nothing.
        padded = (offs_m < q_base)[:, None] & (offs_d < HEAD_DIM)[None, :]
        dq_padded = dq_head + offs_m.to(tl.int64)[:, None] * stride_dq + offs_d[None, :]
        tl.store(dq_padded, tl.zeros([BLOCK_M, BLOCK_D], dq_ptr.dtype.element_ty), mask=padded)
    if tile * BLOCK_M >= num_queries:
        return

    gate = tl.load(gate_ptr + sequence.to(tl.int64) * stride_gn + kv_head * stride_gh)
    streaming, block_sparse = head_mode(gate, RETRIEVAL_MODE, SPARSE_MODE)
    sink, window = head_limits(streaming, sink_size, window_size)
    first_query = length - num_queries + tile * BLOCK_M
    last_query = tl.minimum(first_query + BLOCK_M, length) - 1
    num_sink, num_low, window_begin, free_begin, free_end, num_masked = key_ranges(
        first_query, last_query, sink, window, block_sparse, XA_BLOCK, BLOCK_N
    )

    offs_i = first_query + tl.arange(0, BLOCK_M)
    valid = offs_m < num_queries
    rows = (q_base + offs_m).to(tl.int64)
    q_rows = q_ptr + row * stride_qb + head.to(tl.int64) * stride_qh + rows[:, None] * stride_qq + offs_d[None, :]
    do_rows = do_ptr + row * stride_ob + head.to(tl.int64) * stride_oh + rows[:, None] * stride_oq + offs_d[None, :]
    q = load_rows(q_rows, valid, offs_d, HEAD_DIM, True)  # [BLOCK_M, BLOCK_D]
    do = load_rows(do_rows, valid, offs_d, HEAD_DIM, True)  # [BLOCK_M, BLOCK_D]
    vector = row * stride_lb + head.to(tl.int64) * stride_lh + rows
    # An infinite lse makes every probability of a missing row zero.
    lse = tl.load(lse_ptr + vector, mask=valid, other=float("inf"))  # [BLOCK_M]
    delta = tl.load(delta_ptr + vector, mask=valid, other=0.0)  # [BLOCK_M]
    k_head = k_ptr + row * stride_kb + kv_head.to(tl.int64) * stride_kh + tl.cast(base, tl.int64) * stride_kk
    v_head = v_ptr + row * stride_vb + kv_head.to(tl.int64) * stride_vh + tl.cast(base, tl.int64) * stride_vk

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for t in range(0, num_masked):
        key_tile = masked_key(t, num_sink, num_low, window_begin, free_end, BLOCK_N)
        dq = _fold_keys(
            dq, q, do, lse, delta, k_head, v_head, stride_kk, stride_vk, key_tile, offs_i, offs_d, length,
            sink, window, scale, softcap, HEAD_DIM, BLOCK_N, True, HAS_SOFTCAP, PRECISION,
        )  # fmt: skip
    if XA_BLOCK > 0 and block_sparse:
        tiles_per_block: tl.constexpr = XA_BLOCK // BLOCK_N
        list_row = (sequence.to(tl.int64) * num_kv_heads * GROUP + head) * list_rows + tile * BLOCK_M // XA_BLOCK
        kept = tl.load(count_ptr + list_row)
        # The diagonal block is always kept and closes the list; the masked loop has done it.
        for t in range(0, (kept - 1) * tiles_per_block):
            block = tl.load(list_ptr + list_row * list_columns + t // tiles_per_block).to(tl.int32)
            key_tile = block * XA_BLOCK + t % tiles_per_block * BLOCK_N
            dq = _fold_keys(
                dq, q, do, lse, delta, k_head, v_head, stride_kk, stride_vk, key_tile, offs_i, offs_d, length,
                sink, window, scale, softcap, HEAD_DIM, BLOCK_N, False, HAS_SOFTCAP, PRECISION,
            )  # fmt: skip
    else:
        for t in range(0, (free_end - free_begin) // BLOCK_N):
            key_tile = free_begin + t * BLOCK_N
            dq = _fold_keys(
                dq, q, do, lse, delta, k_head, v_head, stride_kk, stride_vk, key_tile, offs_i, offs_d, length,
                sink, window, scale, softcap, HEAD_DIM, BLOCK_N, False, HAS_SOFTCAP, PRECISION,
            )  # fmt: skip

    dq_rows = dq_head + rows[:, None] * stride_dq + offs_d[None, :]
    io_mask = valid[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(dq_rows, (dq * scale).to(dq_ptr.dtype.element_ty), mask=io_mask)


def launch_dq(launch):
    """Launches the kernel with what `prepare_backward` returned.

    Returns:
        The gradient `[B, Hq, Q, D]` in query's dtype.
    """
    query = launch.tensors[0]
    config = launch.config(dq_config)
    grad_query = torch.empty_like(query)
    lists = (None, None)
    if launch.kept_blocks is not None:
        lists = (launch.kept_blocks.indices, launch.kept_blocks.counts)
    with on_device(query):
        _routed_attention_bwd_dq_kernel[(launch.tiles(query.shape[2], config.block_m) * query.shape[1],)](
            *launch.tensors, grad_query, *launch.pointers, *lists, *launch.strides, *grad_query.stride()[:3],
            *launch.sizes, **launch.constants, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return grad_query
