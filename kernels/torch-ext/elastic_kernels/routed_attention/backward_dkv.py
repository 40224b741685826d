"""Gradients of the keys and values of routed attention, portable Triton kernel.

With the scores `s` of the forward, `p = exp(s - lse)`, and `delta` the row sums of `dO * O`:

    ds = p * (dO v^T - delta)        dk = scale * ds^T q        dv = p^T dO

One program computes one tile of `BLOCK_N` keys of one key-value head. It walks the queries of all query heads of the
group that see these keys, so groups are summed in registers and both gradients are written once, without atomics:

- full: queries `i >= j`;
- streaming: the same for keys of the sink, otherwise `j <= i < j + window_size`;
- block-sparse: the query blocks whose lists hold the key block, causal inside the diagonal block.

Positions are sequence positions, as in `forward.py`. Tiles that need a mask are walked first.

Grid: one axis, key tiles x (sequence, key-value head). The first `lead_tiles` tiles, which streaming and block-sparse
heads attend from everywhere, come first for all heads; then heads in retrieval mode, earlier keys first since more
queries see them; then the others. Packed rows: an upper bound of the tile count, without a host read.

Sizes: head_dim 16-256; fp16, bf16, fp32; fp32 accumulation. Offsets of tiles are int64.
"""

import torch
import triton
import triton.language as tl

from .._launch import MAX_INT32, on_device
from .._primitives import head_limits, head_mode, heavy_first_tile, row_bounds, segment_bounds, segment_of_tile
from ._backward_steps import load_rows, probabilities, seen
from ._query_lists import query_lists
from .configs import dkv_config


@triton.jit
def _locate_key_tile(
    offs, gate_ptr, start_ptr, cu_seqlens_ptr, stride_gn, stride_gh, num_sequences, num_kv_heads, q_length, k_length,
    lead_tiles, HAS_START: tl.constexpr, HAS_CU_SEQLENS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What this program computes: one tile of `BLOCK_N` keys of one key-value head of one sequence.

    Arguments and results as for `locate_tile`, with a key-value head; a tile without work has
    `tile * BLOCK_N >= length`.
    """
    pid = tl.program_id(0)
    if HAS_CU_SEQLENS:
        kv_head = pid % num_kv_heads
        # Programs outnumber tiles; the spare ones come last.
        sequence, tile = segment_of_tile(offs, pid // num_kv_heads, cu_seqlens_ptr, num_sequences, BLOCK_N)
        sequence, row, base, _, num_queries = segment_bounds(sequence, cu_seqlens_ptr, num_sequences, k_length)
        length = num_queries  # none where a program is spare
        q_base = base
    else:
        num_entries = num_sequences * num_kv_heads
        tiles = tl.cdiv(k_length, BLOCK_N)
        lead = tl.minimum(lead_tiles, tiles)
        others = tl.maximum(tiles - lead, 1)
        leads = pid < lead * num_entries
        place = tl.where(leads, pid % num_entries * others, pid - lead * num_entries)
        sequence, kv_head, from_last = heavy_first_tile(
            offs, place, others, num_entries, gate_ptr, stride_gn, stride_gh, num_kv_heads, 1
        )
        tile = tl.where(leads, pid // num_entries, tiles - 1 - from_last)
        row = sequence
        base, length, num_queries, q_base = row_bounds(row, start_ptr, q_length, k_length, HAS_START)
    return sequence, row, kv_head, tile, base, length, num_queries, q_base


@triton.jit
def _query_ranges(
    first_key, first_query, length, sink, window, block_sparse, XA_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tiles of `BLOCK_M` queries, counted from position `begin`, that see keys from `first_key` on.

    Every query of the tiles `free_from .. free_to` sees all keys. The other tiles, `num_tiles` in all, need a mask and
    end at position `end`. A block-sparse head's free queries come from its lists instead: here are only those of the
    diagonal block. Returns `begin, end, num_tiles, free_from, free_to`.
    """
    last_key = first_key + BLOCK_N - 1
    begin = tl.maximum(first_key, first_query)
    window = tl.minimum(window, length)
    end = tl.where(first_key < sink, length, tl.minimum(last_key + window, length))
    if XA_BLOCK > 0:
        end = tl.where(block_sparse, tl.minimum(first_key - first_key % XA_BLOCK + XA_BLOCK, length), end)
    num_tiles = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_M)
    free_from = tl.minimum(tl.cdiv(tl.maximum(last_key - begin, 0), BLOCK_M), num_tiles)
    free_to = tl.maximum(first_key + window - begin, 0) // BLOCK_M
    free_to = tl.where((last_key < sink) | (first_key + window >= length), num_tiles, free_to)
    free_to = tl.maximum(tl.minimum(free_to, (length - begin) // BLOCK_M), free_from)
    if XA_BLOCK > 0:
        free_from = tl.where(block_sparse, num_tiles, free_from)
        free_to = tl.where(block_sparse, num_tiles, free_to)
    return begin, end, num_tiles, free_from, free_to


@triton.jit
def _fold_queries(
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, stride_qq, stride_oq, first, before, offs_j, offs_d, end,
    sink_size, window_size, scale, softcap, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    PARTIAL: tl.constexpr, MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what a tile of queries, at positions from `first` on and before `end`, gives to both gradients.

    `before` positions of the sequence have no query: those ahead of a chunk.
    """
    offs_m = tl.arange(0, BLOCK_M)
    offs_i = first + offs_m
    present = offs_i < end
    index = first - before
    q_rows = q_ptr + index.to(tl.int64) * stride_qq + offs_m[:, None] * stride_qq + offs_d[None, :]
    do_rows = do_ptr + index.to(tl.int64) * stride_oq + offs_m[:, None] * stride_oq + offs_d[None, :]
    q = load_rows(q_rows, present, offs_d, HEAD_DIM, PARTIAL)  # [BLOCK_M, BLOCK_D]
    do = load_rows(do_rows, present, offs_d, HEAD_DIM, PARTIAL)  # [BLOCK_M, BLOCK_D]
    if PARTIAL:
        # An infinite lse makes every probability of a missing row zero.
        lse = tl.load(lse_ptr + index + offs_m, mask=present, other=float("inf"))  # [BLOCK_M]
        delta = tl.load(delta_ptr + index + offs_m, mask=present, other=0.0)  # [BLOCK_M]
    else:
        lse = tl.load(lse_ptr + index + offs_m)
        delta = tl.load(delta_ptr + index + offs_m)
    s = tl.dot(k, q.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
    dp = tl.dot(v, do.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
    p, slope = probabilities(s, lse[None, :], scale, softcap, HAS_SOFTCAP)
    if MASKED:
        p = tl.where(seen(offs_i[None, :], offs_j[:, None], sink_size, window_size), p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    ds = p * (dp - delta[None, :]) * slope
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _routed_attention_bwd_dkv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, gate_ptr, start_ptr, cu_seqlens_ptr, list_ptr,
    count_ptr, stride_qb, stride_qh, stride_qq, stride_kb, stride_kh, stride_kk, stride_vb, stride_vh, stride_vk,
    stride_ob, stride_oh, stride_oq, stride_lb, stride_lh, stride_gn, stride_gh,
    stride_dkb, stride_dkh, stride_dkk, stride_dvb, stride_dvh, stride_dvk,
    num_sequences, num_kv_heads, q_length, k_length, list_rows, list_columns,
    sink_size, window_size, scale, softcap, lead_tiles,
    RETRIEVAL_MODE: tl.constexpr, SPARSE_MODE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_START: tl.constexpr, HAS_CU_SEQLENS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, XA_BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    sequence, row, kv_head, tile, base, length, num_queries, q_base = _locate_key_tile(
        tl.arange(0, BLOCK_G), gate_ptr, start_ptr, cu_seqlens_ptr, stride_gn, stride_gh, num_sequences, num_kv_heads,
        q_length, k_length, lead_tiles, HAS_START, HAS_CU_SEQLENS, BLOCK_N,
    )  # fmt: skip
    row = row.to(tl.int64)
    head = (kv_head * GROUP).to(tl.int64)
    kv_head = kv_head.to(tl.int64)

    offs_j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    dk_head = dk_ptr + row * stride_dkb + kv_head * stride_dkh
    dv_head = dv_ptr + row * stride_dvb + kv_head * stride_dvh
    if HAS_START:
        # Nothing sees the keys of padding.
        padded = (offs_j < base)[:, None] & (offs_d < HEAD_DIM)[None, :]
        zeros = tl.zeros([BLOCK_N, BLOCK_D], dk_ptr.dtype.element_ty)
        tl.store(dk_head + offs_j.to(tl.int64)[:, None] * stride_dkk + offs_d[None, :], zeros, mask=padded)
        tl.store(dv_head + offs_j.to(tl.int64)[:, None] * stride_dvk + offs_d[None, :], zeros, mask=padded)
    if tile * BLOCK_N >= length:
        return

    gate = tl.load(gate_ptr + sequence.to(tl.int64) * stride_gn + kv_head * stride_gh)
    streaming, block_sparse = head_mode(gate, RETRIEVAL_MODE, SPARSE_MODE)
    sink, window = head_limits(streaming, sink_size, window_size)
    first_query = length - num_queries
    begin, end, num_tiles, free_from, free_to = _query_ranges(
        tile * BLOCK_N, first_query, length, sink, window, block_sparse, XA_BLOCK, BLOCK_M, BLOCK_N
    )

    present = offs_j < length
    rows = (base + offs_j).to(tl.int64)[:, None]
    k_rows = k_ptr + row * stride_kb + kv_head * stride_kh + rows * stride_kk + offs_d[None, :]
    v_rows = v_ptr + row * stride_vb + kv_head * stride_vh + rows * stride_vk + offs_d[None, :]
    k = load_rows(k_rows, present, offs_d, HEAD_DIM, True)  # [BLOCK_N, BLOCK_D]
    v = load_rows(v_rows, present, offs_d, HEAD_DIM, True)  # [BLOCK_N, BLOCK_D]
    q_group = q_ptr + row * stride_qb + head * stride_qh + tl.cast(q_base, tl.int64) * stride_qq
    do_group = do_ptr + row * stride_ob + head * stride_oh + tl.cast(q_base, tl.int64) * stride_oq
    vectors = row * stride_lb + head * stride_lh + q_base

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    num_masked = num_tiles - (free_to - free_from)
    for u in range(0, GROUP * num_masked):
        member = (u // num_masked).to(tl.int64)
        t = u % num_masked
        first = begin + tl.where(t < free_from, t, free_to - free_from + t) * BLOCK_M
        dk, dv = _fold_queries(
            dk, dv, k, v, q_group + member * stride_qh, do_group + member * stride_oh,
            lse_ptr + vectors + member * stride_lh, delta_ptr + vectors + member * stride_lh, stride_qq, stride_oq,
            first, first_query, offs_j, offs_d, end, sink, window, scale, softcap, HEAD_DIM, BLOCK_M, True,
            True, HAS_SOFTCAP, PRECISION,
        )  # fmt: skip
    if XA_BLOCK > 0 and block_sparse:
        tiles_per_block: tl.constexpr = XA_BLOCK // BLOCK_M
        # The masked loop has done the diagonal block, the first that sees these keys.
        done = tl.where(num_tiles > 0, 1, 0)
        for member in range(0, GROUP):
            list_row = (sequence.to(tl.int64) * num_kv_heads * GROUP + head + member) * list_columns
            list_row += tile * BLOCK_N // XA_BLOCK
            kept = tl.load(count_ptr + list_row)
            offset = tl.cast(member, tl.int64)
            for t in range(done * tiles_per_block, kept * tiles_per_block):
                block = tl.load(list_ptr + list_row * list_rows + t // tiles_per_block).to(tl.int32)
                first = first_query + block * XA_BLOCK + t % tiles_per_block * BLOCK_M
                dk, dv = _fold_queries(
                    dk, dv, k, v, q_group + offset * stride_qh, do_group + offset * stride_oh,
                    lse_ptr + vectors + offset * stride_lh, delta_ptr + vectors + offset * stride_lh, stride_qq,
                    stride_oq, first, first_query, offs_j, offs_d, length, sink, window, scale, softcap, HEAD_DIM,
                    BLOCK_M, True, False, HAS_SOFTCAP, PRECISION,
                )  # fmt: skip
    else:
        num_free = free_to - free_from
        for u in range(0, GROUP * num_free):
            member = (u // num_free).to(tl.int64)
            first = begin + (free_from + u % num_free) * BLOCK_M
            dk, dv = _fold_queries(
                dk, dv, k, v, q_group + member * stride_qh, do_group + member * stride_oh,
                lse_ptr + vectors + member * stride_lh, delta_ptr + vectors + member * stride_lh, stride_qq, stride_oq,
                first, first_query, offs_j, offs_d, length, sink, window, scale, softcap, HEAD_DIM, BLOCK_M, False,
                False, HAS_SOFTCAP, PRECISION,
            )  # fmt: skip

    io_mask = present[:, None] & (offs_d < HEAD_DIM)[None, :]
    dtype = dk_ptr.dtype.element_ty
    tl.store(dk_head + rows * stride_dkk + offs_d[None, :], (dk * scale).to(dtype), mask=io_mask)
    tl.store(dv_head + rows * stride_dvk + offs_d[None, :], dv.to(dtype), mask=io_mask)


def launch_dkv(launch, sink_size):
    """Launches the kernel with what `prepare_backward` returned, and the sink size.

    Returns:
        The gradients of key and value `[B, Hkv, K, D]` in their dtype.
    """
    query, key, value = launch.tensors[:3]
    config = launch.config(dkv_config)
    grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
    lists, lead = (None, None), sink_size
    if launch.kept_blocks is not None:
        lists = query_lists(launch.kept_blocks)
        lead = max(lead, launch.kept_blocks.block_size)
    with on_device(query):
        _routed_attention_bwd_dkv_kernel[(launch.tiles(key.shape[2], config.block_n) * key.shape[1],)](
            *launch.tensors, grad_key, grad_value, *launch.pointers, *lists, *launch.strides, *grad_key.stride()[:3],
            *grad_value.stride()[:3], *launch.sizes, min(triton.cdiv(lead, config.block_n), MAX_INT32),
            **launch.constants, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return grad_key, grad_value
