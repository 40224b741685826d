"""Routed decode attention: 1 to 8 query tokens a sequence, split over the keys.

An *entry* is one key-value head of one sequence. Its queries, the tokens of all query heads of its group, are the rows
of one tile, so keys and values are read once. It attends

- full: keys `j <= i`;
- streaming: `j < sink_size or i - j < window_size`, token-exact.

The keys that an entry needs, its *span*, are the sink (empty when the head is full) followed by everything from the
first query's window on. The spans of all entries, one after the other, are a line that is cut into equal shares, one a
program. Where a share begins follows from the gate and the lengths, which only the device knows: the work is balanced
whatever the routing, and the launch does not depend on it.

`_routed_decode_fwd_kernel`, grid (shares, tiles of query rows): a program walks its share, entry by entry, and leaves
each entry's normalised output and log2-sum-exp in slot `program + entry`; both only grow along the line, so no two
programs share a slot. `_routed_decode_combine_kernel`, grid (entries, query rows, tiles of channels): the weighted sum
of an entry's slots.

Positions count from a sequence's first valid token. Where the token of a position lies depends on the layout: behind
the padding of its row, or in ragged storage, whose streaming rows are a sink and a ring (see `storage`).

Sizes: head_dim 1-256; fp16, bf16, fp32; fp32 softmax and accumulation. Offsets of tokens are int64.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .._launch import MAX_INT32, compute_capability, empty_outputs, is_interpreting, multiprocessors, on_device
from .._primitives import head_limits, soft_cap
from .configs import INTERPRETER, MAX_BLOCK_E, decode_config


_LOG2E = tl.constexpr(1.4426950408889634)
_MAX_INT32 = tl.constexpr(MAX_INT32)


@triton.jit
def _count_tokens(row, inside, start_ptr, length_ptr, stride_lb, k_length, HAS_START: tl.constexpr,
                  HAS_LENGTH: tl.constexpr):  # fmt: skip
    """Tokens of a sequence, its queries included."""
    if HAS_LENGTH:
        tokens = tl.load(length_ptr + row * stride_lb, mask=inside, other=0).to(tl.int32)
    else:
        tokens = tl.where(inside, k_length, 0)
    if HAS_START:
        tokens -= tl.load(start_ptr + row, mask=inside, other=0).to(tl.int32)
    return tl.maximum(tokens, 0)


@triton.jit
def _entry_span(
    entry, num_entries, gate_ptr, start_ptr, length_ptr, stride_gb, stride_gh, stride_lb, num_kv_heads, q_length,
    k_length, sink_size, window_size, HAS_START: tl.constexpr, HAS_LENGTH: tl.constexpr,
):  # fmt: skip
    """What an entry, or each of a vector of entries, attends: its span has `head + tokens - near` keys.

    Returns `streaming, tokens, head, near`: positions `0 .. head` and `near .. tokens`.
    """
    inside = entry < num_entries
    row = (entry // num_kv_heads).to(tl.int64)
    gate = tl.load(gate_ptr + row * stride_gb + entry % num_kv_heads * stride_gh, mask=inside, other=0)
    streaming = gate != 0
    tokens = _count_tokens(row, inside, start_ptr, length_ptr, stride_lb, k_length, HAS_START, HAS_LENGTH)
    sink, window = head_limits(streaming, sink_size, window_size)
    seen = tl.maximum(tokens - q_length, 0) + 1
    near = tl.minimum(seen - tl.minimum(window, seen), tokens)
    return streaming, tokens, tl.minimum(sink, near), near


@triton.jit
def _routed_decode_fwd_kernel(
    q_ptr, k_ptr, v_ptr, gate_ptr, start_ptr, length_ptr, offsets_ptr, partial_ptr, partial_lse_ptr, slots_ptr,
    stride_qb, stride_qh, stride_qq, stride_kb, stride_kh, stride_kk, stride_vb, stride_vh, stride_vk,
    stride_gb, stride_gh, stride_lb, num_entries, num_kv_heads, q_length, k_length,
    sink_size, window_size, ring_size, scale, softcap,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_START: tl.constexpr, HAS_LENGTH: tl.constexpr,
    RAGGED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()  # the combine kernel gets ready meanwhile, and waits for the end of this one
    pid = tl.program_id(0)
    offs_e = tl.arange(0, BLOCK_E)
    total = tl.full([], 0, tl.int64)
    for first_entry in tl.range(0, num_entries, BLOCK_E, num_stages=1):
        _, tokens, head, near = _entry_span(
            first_entry + offs_e, num_entries, gate_ptr, start_ptr, length_ptr, stride_gb, stride_gh, stride_lb,
            num_kv_heads, q_length, k_length, sink_size, window_size, HAS_START, HAS_LENGTH,
        )  # fmt: skip
        total += tl.sum((head + tokens - near).to(tl.int64), 0)
    share = tl.maximum(tl.cdiv(total, tl.num_programs(0).to(tl.int64) * 16) * 16, BLOCK_N)
    begin = pid * share
    end = tl.minimum(begin + share, total)
    if begin >= end:
        return

    entry = 0
    entry_begin = tl.full([], 0, tl.int64)
    before = tl.full([], 0, tl.int64)
    for first_entry in tl.range(0, num_entries, BLOCK_E, num_stages=1):
        _, tokens, head, near = _entry_span(
            first_entry + offs_e, num_entries, gate_ptr, start_ptr, length_ptr, stride_gb, stride_gh, stride_lb,
            num_kv_heads, q_length, k_length, sink_size, window_size, HAS_START, HAS_LENGTH,
        )  # fmt: skip
        keys = (head + tokens - near).to(tl.int64)
        after = before + tl.cumsum(keys, 0)
        passed = (after <= begin) & (first_entry + offs_e < num_entries)
        entry += tl.sum(passed.to(tl.int32), 0)
        entry_begin = tl.maximum(entry_begin, tl.max(tl.where(passed, after, 0), 0))
        before += tl.sum(keys, 0)

    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    num_rows = GROUP * q_length
    in_tile = (offs_m < num_rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
    even_d: tl.constexpr = BLOCK_D == HEAD_DIM
    while begin < end:
        streaming, tokens, head, near = _entry_span(
            entry, num_entries, gate_ptr, start_ptr, length_ptr, stride_gb, stride_gh, stride_lb, num_kv_heads,
            q_length, k_length, sink_size, window_size, HAS_START, HAS_LENGTH,
        )  # fmt: skip
        sink, window = head_limits(streaming, sink_size, window_size)
        keys = head + tokens - near
        entry_end = entry_begin + keys
        row = (entry // num_kv_heads).to(tl.int64)
        kv_head = (entry % num_kv_heads).to(tl.int64)

        # Behind the sink a key of the span lies `shift` slots further on, in a ring possibly at its beginning.
        shift = near - head
        if RAGGED:
            offset = tl.load(offsets_ptr + entry)
            k_head = k_ptr + offset * stride_kk
            v_head = v_ptr + offset * stride_vk
            shift = tl.where(streaming & (shift > 0), shift % ring_size, shift)
            ring_end = tl.where(streaming, sink_size + ring_size, _MAX_INT32)
        else:
            k_head = k_ptr + row * stride_kb + kv_head * stride_kh
            v_head = v_ptr + row * stride_vb + kv_head * stride_vh
            if HAS_START:
                base = tl.load(start_ptr + row).to(tl.int64)
                k_head += base * stride_kk
                v_head += base * stride_vk

        q_head = q_ptr + row * stride_qb + (kv_head * GROUP + offs_m // q_length)[:, None] * stride_qh
        q_tile = q_head + (offs_m % q_length)[:, None] * stride_qq + offs_d[None, :]
        q = tl.load(q_tile, mask=in_tile, other=0.0)  # [BLOCK_M, BLOCK_D]
        offs_i = tokens - q_length + offs_m % q_length
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        last_key = tl.minimum(end - entry_begin, keys).to(tl.int32)
        for first_key in range((begin - entry_begin).to(tl.int32), last_key, BLOCK_N):
            offs_k = first_key + offs_n
            behind = offs_k >= head
            slots = offs_k + tl.where(behind, shift, 0)
            if RAGGED:
                slots -= tl.where(slots >= ring_end, ring_size, 0)
            slots = slots.to(tl.int64)[:, None]
            present = (offs_k < last_key)[:, None]
            if not even_d:
                present = present & (offs_d < HEAD_DIM)[None, :]
            k = tl.load(k_head + slots * stride_kk + offs_d[None, :], mask=present, other=0.0)  # [BLOCK_N, BLOCK_D]
            v = tl.load(v_head + slots * stride_vk + offs_d[None, :], mask=present, other=0.0)  # [BLOCK_N, BLOCK_D]
            s = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            if HAS_SOFTCAP:
                s = soft_cap(s * scale, softcap) * _LOG2E
            else:
                s *= scale * _LOG2E
            offs_j = offs_k + tl.where(behind, near - head, 0)
            # As unsigned numbers distances to later keys are beyond any window.
            distance = (offs_i[:, None] - offs_j[None, :]).to(tl.uint32, bitcast=True)
            seen = (distance < window.to(tl.uint32)) | (offs_j[None, :] <= tl.minimum(sink - 1, offs_i)[:, None])
            s = tl.where(seen & (offs_k < last_key)[None, :], s, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(s, 1))
            # A row that has seen no key yet keeps -inf as its maximum; subtracting it would give NaN.
            floor = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s - floor[:, None])
            alpha = tl.exp2(m_i - floor)
            l_i = l_i * alpha + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
            m_i = m_new

        slot = (pid + entry).to(tl.int64) * num_rows + offs_m
        l_i = tl.where(m_i == float("-inf"), 1.0, l_i)
        tl.store(partial_ptr + slot[:, None] * HEAD_DIM + offs_d[None, :], acc / l_i[:, None], mask=in_tile)
        tl.store(partial_lse_ptr + slot, m_i + tl.log2(l_i), mask=offs_m < num_rows)
        if begin == entry_begin:
            last_program = ((entry_end - 1) // share).to(tl.int32)
            tl.store(slots_ptr + 2 * entry, pid + entry)
            tl.store(slots_ptr + 2 * entry + 1, last_program + 1 - pid)
        begin = entry_end
        entry_begin = entry_end
        entry += 1


@triton.jit
def _routed_decode_combine_kernel(
    partial_ptr, partial_lse_ptr, slots_ptr, start_ptr, length_ptr, sinks_ptr, out_ptr, lse_ptr,
    stride_ob, stride_oh, stride_oq, stride_lb, num_kv_heads, q_length, k_length,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_START: tl.constexpr, HAS_LENGTH: tl.constexpr,
    HAS_SINKS: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    m = tl.program_id(1)
    num_rows = tl.num_programs(1)
    row = (entry // num_kv_heads).to(tl.int64)
    head = entry % num_kv_heads * GROUP + m // q_length
    offs_s = tl.arange(0, BLOCK_S)
    offs_c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)

    # An entry without tokens has no slots.
    filled = _count_tokens(row, True, start_ptr, length_ptr, stride_lb, k_length, HAS_START, HAS_LENGTH) > 0
    if OVERLAP:
        gdc_wait()
    first_slot = tl.load(slots_ptr + 2 * entry, mask=filled, other=0).to(tl.int64)
    num_slots = tl.load(slots_ptr + 2 * entry + 1, mask=filled, other=0)
    acc = tl.zeros([BLOCK_C], tl.float32)
    m_i = tl.full([], float("-inf"), tl.float32)
    l_i = tl.full([], 0.0, tl.float32)
    for s in range(0, num_slots, BLOCK_S):
        slots = (first_slot + s + offs_s) * num_rows + m
        present = s + offs_s < num_slots
        tile = partial_ptr + slots[:, None] * HEAD_DIM + offs_c[None, :]
        partial = tl.load(tile, mask=present[:, None] & (offs_c < HEAD_DIM)[None, :], other=0.0)  # [BLOCK_S, BLOCK_C]
        partial_lse = tl.load(partial_lse_ptr + slots, mask=present, other=float("-inf"))
        m_new = tl.maximum(m_i, tl.max(partial_lse, 0))
        floor = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2(partial_lse - floor)
        alpha = tl.exp2(m_i - floor)
        l_i = l_i * alpha + tl.sum(weight, 0)
        acc = acc * alpha + tl.sum(partial * weight[:, None], 0)
        m_i = m_new

    # A query of padding sees nothing: its output is zero.
    seen = m_i != float("-inf")
    l_i = tl.where(seen, l_i, 1.0)
    if HAS_SINKS:
        # A sink is a logit without a value: it enters the denominator only.
        sink_logit = tl.load(sinks_ptr + head).to(tl.float32) * _LOG2E
        m_new = tl.maximum(m_i, sink_logit)
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.exp2(sink_logit - m_new)
        acc *= alpha
        m_i = m_new
    out_row = out_ptr + row * stride_ob + head.to(tl.int64) * stride_oh + (m % q_length) * stride_oq
    tl.store(out_row + offs_c, (acc / l_i).to(out_ptr.dtype.element_ty), mask=offs_c < HEAD_DIM)
    if tl.program_id(2) == 0:
        lse = tl.where(seen, (m_i + tl.log2(l_i)) / _LOG2E, float("-inf"))
        tl.store(lse_ptr + (row * num_kv_heads * GROUP + head) * q_length + m % q_length, lse)


def routed_decode_forward(
    query, key, value, gate, *, sink_size, window_size, start=None, length=None, storage=None, softcap=None,
    sinks=None, scale,
):  # fmt: skip
    """Launches the kernels; arguments as `routed_decode`, which validates them.

    Returns:
        The output `[B, Hq, Q, D]` in query's dtype and its log-sum-exp, float32 `[B, Hq, Q]`.
    """
    batch, num_heads, q_length, head_dim = query.shape
    num_kv_heads = gate.shape[1]
    group, entries = num_heads // num_kv_heads, batch * num_kv_heads
    num_rows = group * q_length
    query = query if query.stride(-1) == 1 else query.contiguous()
    start, sinks = (None if x is None else x.contiguous() for x in (start, sinks))
    if is_interpreting():
        config, programs = INTERPRETER, INTERPRETER.programs
    else:
        config = decode_config(num_rows, head_dim, query.element_size(), compute_capability(query.device.index))
        programs = config.programs * multiprocessors(query.device.index)
    if storage is None:
        k_length, kv_strides = key.shape[2], (*key.stride()[:3], *value.stride()[:3])
        offsets, ring_size = None, 0
    else:
        k_length, kv_strides = 0, (0, 0, key.stride(0), 0, 0, value.stride(0))
        offsets, length, ring_size = storage.offsets.contiguous(), storage.lengths, storage.ring_size
    sink_size, window_size = min(sink_size, MAX_INT32), min(window_size, MAX_INT32)
    row_tiles = triton.cdiv(num_rows, config.block_m)
    programs = max(1, programs // row_tiles)
    stride_lb = 0 if length is None or length.dim() == 0 else length.stride(0)
    out, lse = empty_outputs(query)
    partial = query.new_empty((programs + entries, num_rows, head_dim), dtype=torch.float32)
    partial_lse = query.new_empty((programs + entries, num_rows), dtype=torch.float32)
    slots = query.new_empty((entries, 2), dtype=torch.int32)
    block_d = max(triton.next_power_of_2(head_dim), 16)
    common = {"GROUP": group, "HEAD_DIM": head_dim, "HAS_START": start is not None, "HAS_LENGTH": length is not None}
    overlap = not is_interpreting() and compute_capability(query.device.index) >= 90
    common["OVERLAP"] = overlap
    with on_device(query):
        _routed_decode_fwd_kernel[(programs, row_tiles)](
            query, key, value, gate, start, length, offsets, partial, partial_lse, slots,
            *query.stride()[:3], *kv_strides, *gate.stride(), stride_lb, entries, num_kv_heads, q_length, k_length,
            sink_size, window_size, min(ring_size, MAX_INT32 - sink_size), scale, 0.0 if softcap is None else softcap,
            **common, RAGGED=storage is not None, HAS_SOFTCAP=softcap is not None,
            BLOCK_E=min(triton.next_power_of_2(entries), MAX_BLOCK_E), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            BLOCK_D=block_d, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        block_c = min(block_d, 32)
        _routed_decode_combine_kernel[(entries, num_rows, triton.cdiv(head_dim, block_c))](
            partial, partial_lse, slots, start, length, sinks, out, lse,
            *out.stride()[:3], stride_lb, num_kv_heads, q_length, k_length,
            **common, HAS_SINKS=sinks is not None, BLOCK_S=256, BLOCK_C=block_c,
            num_warps=8, launch_pdl=overlap,
        )  # fmt: skip
    return out, lse
