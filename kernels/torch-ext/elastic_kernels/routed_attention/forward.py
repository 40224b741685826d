"""Routed prefill attention, portable Triton kernel.

One program computes one tile of `BLOCK_M` queries of one query head. It reads its head's mode from device memory and
walks only the keys that this mode attends:

- full: keys `j <= i`;
- streaming: `j < sink_size or i - j < window_size`, token-exact;
- block-sparse: the kept blocks of the tile's block row, causal inside the diagonal block.

All positions below are *sequence positions*: they count from the sequence's first valid token, so left padding and
packed rows differ from the plain case only in base addresses. Tiles that need a mask (the diagonal, both edges of the
window, the sink) are walked first, in one loop; the others follow in a second loop without masks.

Grid: one axis, query tiles x (sequence, query head). Heads in retrieval mode come first and every head's last tile
comes first, so that the longest programs start first; all tiles of a key-value head follow each other, so that its
keys stay in L2. Packed rows: an upper bound of the tile count, without a host read.

Sizes: head_dim 16-256; fp16, bf16, fp32; fp32 softmax and accumulation. Offsets of tiles are int64.
"""

import torch
import triton
import triton.language as tl

from .._launch import compute_capability, is_interpreting, on_device
from .._primitives import head_limits, head_mode, is_sampled, key_ranges, locate_tile, masked_key, soft_cap
from ._prefill import prepare_prefill
from .configs import INTERPRETER, prefill_config


_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    acc, l_i, m_i, q, k_ptr, v_ptr, stride_kk, stride_vk, first_key, offs_i, offs_d, length,
    sink_size, window_size, qk_scale, softcap, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Folds one tile of keys into the running softmax. `m_i` is in units of log2."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_j = first_key + offs_n
    even_d: tl.constexpr = offs_d.shape[0] == HEAD_DIM
    k_tile = k_ptr + first_key.to(tl.int64) * stride_kk + offs_n[:, None] * stride_kk + offs_d[None, :]
    v_tile = v_ptr + first_key.to(tl.int64) * stride_vk + offs_n[:, None] * stride_vk + offs_d[None, :]
    if MASKED:
        present = (offs_j < length)[:, None] & (offs_d < HEAD_DIM)[None, :]
        k = tl.load(k_tile, mask=present, other=0.0)  # [BLOCK_N, BLOCK_D]
    elif even_d:
        k = tl.load(k_tile)
    else:
        k = tl.load(k_tile, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
    s = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    if HAS_SOFTCAP:
        s = soft_cap(s * qk_scale, softcap)
        to_log2 = _LOG2E
    else:
        to_log2 = qk_scale * _LOG2E
    if MASKED:
        # As unsigned numbers distances to later keys are beyond any window.
        distance = (offs_i[:, None] - offs_j[None, :]).to(tl.uint32, bitcast=True)
        last_sink = tl.minimum(sink_size - 1, offs_i)
        seen = (distance < window_size.to(tl.uint32)) | (offs_j[None, :] <= last_sink[:, None])
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(s, 1) * to_log2)
    # A row that has seen no key yet keeps -inf as its maximum; subtracting it would give NaN.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
    p = tl.exp2(s * to_log2 - shift[:, None])
    alpha = tl.exp2(m_i - shift)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    if MASKED:
        v = tl.load(v_tile, mask=present, other=0.0)
    elif even_d:
        v = tl.load(v_tile)
    else:
        v = tl.load(v_tile, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, l_i, m_new


@triton.jit
def _routed_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, gate_ptr, start_ptr, cu_seqlens_ptr, list_ptr, count_ptr, sinks_ptr, sampled_ptr, out_ptr,
    lse_ptr, stride_qb, stride_qh, stride_qq, stride_kb, stride_kh, stride_kk, stride_vb, stride_vh, stride_vk,
    stride_gn, stride_gh, stride_ob, stride_oh, stride_oq, stride_lb, stride_lh,
    num_sequences, num_kv_heads, q_length, k_length, list_rows, list_columns, sample_tiles,
    sink_size, window_size, scale, softcap,
    RETRIEVAL_MODE: tl.constexpr, SPARSE_MODE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_START: tl.constexpr, HAS_CU_SEQLENS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    STORE_LSE: tl.constexpr, XA_BLOCK: tl.constexpr, SAMPLE_TILE: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    sequence, row, head, tile, base, length, num_queries, q_base = locate_tile(
        tl.arange(0, BLOCK_G), gate_ptr, start_ptr, cu_seqlens_ptr, stride_gn, stride_gh, num_sequences, num_kv_heads,
        q_length, k_length, GROUP, HAS_START, HAS_CU_SEQLENS, BLOCK_M,
    )  # fmt: skip
    row = row.to(tl.int64)
    kv_head = head // GROUP

    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    out_head = out_ptr + row * stride_ob + head.to(tl.int64) * stride_oh
    lse_head = lse_ptr + row * stride_lb + head.to(tl.int64) * stride_lh
    if HAS_START:
        # Queries of padding see nothing: their output is zero.
        padded = offs_m < q_base
        out_padded = out_head + offs_m.to(tl.int64)[:, None] * stride_oq + offs_d[None, :]
        zeros = tl.zeros([BLOCK_M, BLOCK_D], out_ptr.dtype.element_ty)
        tl.store(out_padded, zeros, mask=padded[:, None] & (offs_d < HEAD_DIM)[None, :])
        if STORE_LSE:
            tl.store(lse_head + offs_m, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=padded)
    if SAMPLE_TILE > 0:
        sampled = is_sampled(sampled_ptr, sequence, kv_head, tile, num_kv_heads, sample_tiles, BLOCK_M, SAMPLE_TILE)
        num_queries = tl.where(sampled, num_queries, 0)
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
    q_head = q_ptr + row * stride_qb + head.to(tl.int64) * stride_qh
    q_rows = (q_base + offs_m).to(tl.int64)[:, None]
    io_mask = valid[:, None] & (offs_d < HEAD_DIM)[None, :]
    q = tl.load(q_head + q_rows * stride_qq + offs_d[None, :], mask=io_mask, other=0.0)  # [BLOCK_M, BLOCK_D]
    k_head = k_ptr + row * stride_kb + kv_head.to(tl.int64) * stride_kh + tl.cast(base, tl.int64) * stride_kk
    v_head = v_ptr + row * stride_vb + kv_head.to(tl.int64) * stride_vh + tl.cast(base, tl.int64) * stride_vk

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_SINKS:
        # A sink is a logit without a value: it enters the denominator only.
        m_i = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * _LOG2E
        l_i = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)

    for t in range(0, num_masked):
        key_tile = masked_key(t, num_sink, num_low, window_begin, free_end, BLOCK_N)
        acc, l_i, m_i = _attend(
            acc, l_i, m_i, q, k_head, v_head, stride_kk, stride_vk, key_tile, offs_i, offs_d, length,
            sink, window, scale, softcap, HEAD_DIM, BLOCK_N, True, HAS_SOFTCAP, PRECISION,
        )  # fmt: skip
    if XA_BLOCK > 0 and block_sparse:
        tiles_per_block: tl.constexpr = XA_BLOCK // BLOCK_N
        list_row = (sequence.to(tl.int64) * num_kv_heads * GROUP + head) * list_rows + tile * BLOCK_M // XA_BLOCK
        # The diagonal block closes the list; the masked loop has done it.
        before = tl.maximum(tl.load(count_ptr + list_row) - 1, 0)
        for t in range(0, before * tiles_per_block):
            block = tl.load(list_ptr + list_row * list_columns + t // tiles_per_block).to(tl.int32)
            key_tile = block * XA_BLOCK + t % tiles_per_block * BLOCK_N
            acc, l_i, m_i = _attend(
                acc, l_i, m_i, q, k_head, v_head, stride_kk, stride_vk, key_tile, offs_i, offs_d, length,
                sink, window, scale, softcap, HEAD_DIM, BLOCK_N, False, HAS_SOFTCAP, PRECISION,
            )  # fmt: skip
    else:
        for t in range(0, (free_end - free_begin) // BLOCK_N):
            key_tile = free_begin + t * BLOCK_N
            acc, l_i, m_i = _attend(
                acc, l_i, m_i, q, k_head, v_head, stride_kk, stride_vk, key_tile, offs_i, offs_d, length,
                sink, window, scale, softcap, HEAD_DIM, BLOCK_N, False, HAS_SOFTCAP, PRECISION,
            )  # fmt: skip

    l_i = tl.where(valid, l_i, 1.0)
    out_rows = out_head + q_rows * stride_oq + offs_d[None, :]
    tl.store(out_rows, (acc / l_i[:, None]).to(out_ptr.dtype.element_ty), mask=io_mask)
    if STORE_LSE:
        tl.store(lse_head + q_base + offs_m, (m_i + tl.log2(l_i)) / _LOG2E, mask=valid)


def routed_attention_forward(
    query,
    key,
    value,
    gate,
    *,
    mode_pair,
    sink_size,
    window_size,
    start=None,
    cu_seqlens=None,
    kept_blocks=None,
    softcap=None,
    sinks=None,
    scale,
    with_lse=True,
    sampled=None,
):
    """Launches the kernel; arguments as `routed_attention`, which validates them.

    Returns:
        The output `[B, Hq, Q, D]` in query's dtype, and its log-sum-exp, float32 `[B, Hq, Q]`, or `None`.
    """
    head_dim = query.shape[3]
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    capability = 80 if is_interpreting() else compute_capability(query.device.index)
    config = INTERPRETER if is_interpreting() else prefill_config(head_dim, query.element_size(), capability)
    block_m, block_n = config.block_m, config.block_n
    if kept_blocks is not None:
        block_m, block_n = (min(block, kept_blocks.block_size) for block in (block_m, block_n))
    launch = prepare_prefill(
        query, key, gate, mode_pair=mode_pair, sink_size=sink_size, window_size=window_size, start=start,
        cu_seqlens=cu_seqlens, kept_blocks=kept_blocks, sinks=sinks, scale=scale, with_lse=with_lse,
        sampled=sampled, block_m=block_m,
    )  # fmt: skip
    with on_device(query):
        _routed_attention_fwd_kernel[launch.grid](
            query, key, value, *launch.pointers,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *launch.strides,
            *launch.sizes, 0.0 if softcap is None else softcap,
            **launch.constants, HEAD_DIM=head_dim, HAS_SOFTCAP=softcap is not None,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=max(triton.next_power_of_2(head_dim), 16),
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return launch.out, launch.lse
