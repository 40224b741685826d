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
comes first, so the longest programs start first. Packed rows: an upper bound of the tile count, without a host read.

Sizes: head_dim 16-256; fp16, bf16, fp32; fp32 softmax and accumulation. Offsets of tiles are int64.
"""

import torch
import triton
import triton.language as tl

from .._launch import BLOCK_SPARSE, STREAMING, compute_capability, is_interpreting, on_device, pair_modes
from .._primitives import heavy_first_tile, segment_of_tile, soft_cap
from .configs import INTERPRETER, prefill_config


_LOG2E = tl.constexpr(1.4426950408889634)
_UNBOUNDED = tl.constexpr(2**31 - 1)
_STREAMING = tl.constexpr(STREAMING)
_BLOCK_SPARSE = tl.constexpr(BLOCK_SPARSE)


@triton.jit
def _kept_list_kernel(mask_ptr, list_ptr, count_ptr, stride_mr, num_blocks, BLOCK: tl.constexpr):
    """Turns one row of the kept-block mask into the ascending list of its set positions."""
    row = tl.program_id(0).to(tl.int64)
    count = 0
    for first in range(0, num_blocks, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        kept = tl.load(mask_ptr + row * stride_mr + offs, mask=offs < num_blocks, other=0).to(tl.int32)
        place = count + tl.cumsum(kept, 0) - kept
        tl.store(list_ptr + row * num_blocks + place, offs.to(tl.int16), mask=kept != 0)
        count += tl.sum(kept, 0)
    tl.store(count_ptr + row, count)


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
        near = offs_i[:, None] - offs_j[None, :] < window_size
        seen = (offs_j[None, :] <= offs_i[:, None]) & (near | (offs_j < sink_size)[None, :])
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
    q_ptr, k_ptr, v_ptr, gate_ptr, start_ptr, cu_seqlens_ptr, list_ptr, count_ptr, sinks_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qq, stride_kb, stride_kh, stride_kk, stride_vb, stride_vh, stride_vk,
    stride_gn, stride_gh, stride_ob, stride_oh, stride_oq, stride_lb, stride_lh,
    num_sequences, num_kv_heads, q_length, k_length, list_rows, list_columns,
    sink_size, window_size, scale, softcap,
    RETRIEVAL_MODE: tl.constexpr, SPARSE_MODE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_START: tl.constexpr, HAS_CU_SEQLENS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    XA_BLOCK: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    num_heads = num_kv_heads * GROUP

    # Which tile of which head.
    if HAS_CU_SEQLENS:
        head = pid % num_heads
        sequence, tile = segment_of_tile(
            tl.num_programs(0) // num_heads - 1 - pid // num_heads, cu_seqlens_ptr, num_sequences, BLOCK_M, BLOCK_G
        )
        if sequence >= num_sequences:
            return
        first = tl.load(cu_seqlens_ptr + sequence).to(tl.int32)
        row = first // k_length
        base = first % k_length
        length = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int32) - first
        num_queries = length
        q_base = base
    else:
        sequence, head, tile = heavy_first_tile(
            pid, tl.cdiv(q_length, BLOCK_M), num_sequences * num_heads, gate_ptr, stride_gn, stride_gh,
            num_kv_heads, GROUP, BLOCK_G,
        )  # fmt: skip
        row = sequence
        base = 0
        if HAS_START:
            base = tl.load(start_ptr + row).to(tl.int32)
        length = k_length - base
        num_queries = tl.minimum(q_length, length)
        q_base = q_length - num_queries
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
        tl.store(lse_head + offs_m, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=padded)
    if tile * BLOCK_M >= num_queries:
        return

    is_sparse = tl.load(gate_ptr + sequence.to(tl.int64) * stride_gn + kv_head * stride_gh) != 0
    block_sparse = ((RETRIEVAL_MODE == _BLOCK_SPARSE) & (is_sparse == 0)) | (
        (SPARSE_MODE == _BLOCK_SPARSE) & is_sparse
    )
    streaming = (SPARSE_MODE == _STREAMING) & is_sparse
    window = tl.where(streaming, window_size, _UNBOUNDED)
    sink = tl.where(streaming, sink_size, 0)

    # Ranges of keys, in sequence positions. Every query of the tile sees all keys in [free_begin, free_end), and at
    # least one tile of keys comes after them.
    offset = length - num_queries
    first_query = offset + tile * BLOCK_M
    last_query = tl.minimum(first_query + BLOCK_M, length) - 1
    free_end = first_query - first_query % BLOCK_N
    window_begin = first_query + 1 - tl.minimum(window, first_query + 1)
    window_begin = tl.minimum(window_begin - window_begin % BLOCK_N, free_end)
    free_begin = tl.minimum(tl.cdiv(last_query + 1 - tl.minimum(window, last_query + 1), BLOCK_N) * BLOCK_N, free_end)
    if XA_BLOCK > 0 and block_sparse:
        window_begin = first_query - first_query % XA_BLOCK
        free_begin = window_begin
        free_end = window_begin
    num_sink = tl.cdiv(tl.minimum(sink, window_begin), BLOCK_N)
    num_low = (free_begin - window_begin) // BLOCK_N
    num_masked = num_sink + num_low + tl.cdiv(last_query + 1 - free_end, BLOCK_N)

    offs_i = first_query + tl.arange(0, BLOCK_M)
    valid = offs_m < num_queries
    q_head = q_ptr + row * stride_qb + head.to(tl.int64) * stride_qh
    q_rows = (q_base + offs_m).to(tl.int64)[:, None]
    io_mask = valid[:, None] & (offs_d < HEAD_DIM)[None, :]
    q = tl.load(q_head + q_rows * stride_qq + offs_d[None, :], mask=io_mask, other=0.0)  # [BLOCK_M, BLOCK_D]
    k_head = k_ptr + row * stride_kb + kv_head.to(tl.int64) * stride_kh + base.to(tl.int64) * stride_kk
    v_head = v_ptr + row * stride_vb + kv_head.to(tl.int64) * stride_vh + base.to(tl.int64) * stride_vk

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_SINKS:
        # A sink is a logit without a value: it enters the denominator only.
        m_i = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * _LOG2E
        l_i = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)

    for t in range(0, num_masked):
        low = t - num_sink
        high = low - num_low
        key_tile = tl.where(
            t < num_sink,
            t * BLOCK_N,
            tl.where(low < num_low, window_begin + low * BLOCK_N, free_end + high * BLOCK_N),
        )
        acc, l_i, m_i = _attend(
            acc, l_i, m_i, q, k_head, v_head, stride_kk, stride_vk, key_tile, offs_i, offs_d, length,
            sink, window, scale, softcap, HEAD_DIM, BLOCK_N, True, HAS_SOFTCAP, PRECISION,
        )  # fmt: skip
    if XA_BLOCK > 0 and block_sparse:
        tiles_per_block: tl.constexpr = XA_BLOCK // BLOCK_N
        list_row = (sequence.to(tl.int64) * num_heads + head) * list_rows + tile * BLOCK_M // XA_BLOCK
        kept = tl.load(count_ptr + list_row)
        # The diagonal block is always kept and closes the list; the masked loop has done it.
        for t in range(0, (kept - 1) * tiles_per_block):
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
    tl.store(lse_head + q_base + offs_m, (m_i + tl.log2(l_i)) / _LOG2E, mask=valid)


def kept_lists(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists the kept blocks of every block row.

    Args:
        mask: bool `[N, Hq, nQ, nK]`, contiguous, nK below 32,768.

    Returns:
        The ascending positions, int16 `[N, Hq, nQ, nK]` of which each row's first entries are written, and the number
        of them, int32 `[N, Hq, nQ]`.
    """
    lists = torch.empty(mask.shape, dtype=torch.int16, device=mask.device)
    counts = torch.empty(mask.shape[:3], dtype=torch.int32, device=mask.device)
    columns = mask.shape[3]
    with on_device(mask):
        _kept_list_kernel[(counts.numel(),)](
            mask.view(torch.uint8), lists, counts, columns, columns, BLOCK=min(triton.next_power_of_2(columns), 1024)
        )
    return lists, counts


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
):
    """Launches the kernel; arguments as `routed_attention`, which validates them.

    Returns:
        The output `[B, Hq, Q, D]` in query's dtype and its log-sum-exp, float32 `[B, Hq, Q]`.
    """
    batch, num_heads, q_length, head_dim = query.shape
    _, num_kv_heads, k_length, _ = key.shape
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    capability = 80 if is_interpreting() else compute_capability(query.device.index)
    config = INTERPRETER if is_interpreting() else prefill_config(head_dim, query.element_size(), capability)
    block_m, block_n = config.block_m, config.block_n
    lists = counts = None
    xa_block = 0
    if kept_blocks is not None:
        xa_block = kept_blocks.block_size
        lists, counts = kept_lists(kept_blocks.mask.contiguous())
        block_m, block_n = min(block_m, xa_block), min(block_n, xa_block)

    packed = cu_seqlens is not None
    sequences = cu_seqlens.numel() - 1 if packed else batch
    # Tokens outside every segment are written by no program.
    out = torch.zeros_like(query) if packed else torch.empty_like(query)
    lse_shape = (batch, num_heads, q_length)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=query.device)
    if packed:
        lse.fill_(float("-inf"))
    tiles = batch * q_length // block_m + sequences if packed else batch * triton.cdiv(q_length, block_m)
    retrieval_mode, sparse_mode = pair_modes(mode_pair)
    with on_device(query):
        _routed_attention_fwd_kernel[(tiles * num_heads,)](
            query, key, value, gate, start, cu_seqlens, lists, counts, sinks, out, lse,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *gate.stride(), *out.stride()[:3],
            *lse.stride()[:2],
            sequences, num_kv_heads, q_length, k_length,
            0 if lists is None else lists.shape[2], 0 if lists is None else lists.shape[3],
            sink_size, window_size, scale, 0.0 if softcap is None else softcap,
            RETRIEVAL_MODE=retrieval_mode, SPARSE_MODE=sparse_mode, GROUP=num_heads // num_kv_heads,
            HEAD_DIM=head_dim, HAS_START=start is not None, HAS_CU_SEQLENS=packed, HAS_SOFTCAP=softcap is not None,
            HAS_SINKS=sinks is not None, XA_BLOCK=xa_block,
            BLOCK_G=triton.next_power_of_2(sequences if packed else sequences * num_kv_heads),
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=max(triton.next_power_of_2(head_dim), 16),
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out, lse
