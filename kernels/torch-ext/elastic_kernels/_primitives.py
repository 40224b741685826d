"""Device functions that several kernels share.

Those of the prefill kernels run in Triton and in Gluon alike: vectors come from the caller, who knows their layout.
"""

import triton
import triton.language as tl

from ._launch import BLOCK_SPARSE, STREAMING


_STREAMING = tl.constexpr(STREAMING)
_BLOCK_SPARSE = tl.constexpr(BLOCK_SPARSE)
_UNBOUNDED = tl.constexpr(2**31 - 1)


@triton.jit
def head_mode(gate, RETRIEVAL_MODE: tl.constexpr, SPARSE_MODE: tl.constexpr):
    """Whether a head streams and whether it attends kept blocks, from its gate; neither means full attention."""
    sparse = gate != 0
    streaming = sparse & (SPARSE_MODE == _STREAMING)
    block_sparse = (sparse & (SPARSE_MODE == _BLOCK_SPARSE)) | ((gate == 0) & (RETRIEVAL_MODE == _BLOCK_SPARSE))
    return streaming, block_sparse


@triton.jit
def head_limits(streaming, sink_size, window_size):
    """Sink and window of a head: none and unbounded unless it streams."""
    return tl.where(streaming, sink_size, 0), tl.where(streaming, window_size, _UNBOUNDED)


@triton.jit
def key_ranges(
    first_query, last_query, sink, window, block_sparse, XA_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Tiles of `BLOCK_N` keys that the queries `first_query .. last_query` need, in sequence positions.

    Every query sees all keys in `[free_begin, free_end)`. The other tiles need a mask: `num_sink` tiles from key 0 on,
    `num_low` tiles from `window_begin` to `free_begin`, and those from `free_end` to the last query, at least one.
    A block-sparse head's free keys come from its list instead: there the masked tiles are those of its diagonal block.
    Returns `num_sink, num_low, window_begin, free_begin, free_end, num_masked`.
    """
    free_end = first_query - first_query % BLOCK_N
    window_begin = first_query + 1 - tl.minimum(window, first_query + 1)
    window_begin = tl.minimum(window_begin - window_begin % BLOCK_N, free_end)
    free_begin = tl.cdiv(last_query + 1 - tl.minimum(window, last_query + 1), BLOCK_N) * BLOCK_N
    free_begin = tl.minimum(free_begin, free_end)
    if XA_BLOCK > 0:
        diagonal = first_query - first_query % XA_BLOCK
        window_begin = tl.where(block_sparse, diagonal, window_begin)
        free_begin = tl.where(block_sparse, diagonal, free_begin)
        free_end = tl.where(block_sparse, diagonal, free_end)
    num_sink = tl.cdiv(tl.minimum(sink, window_begin), BLOCK_N)
    num_low = (free_begin - window_begin) // BLOCK_N
    num_masked = num_sink + num_low + tl.cdiv(last_query + 1 - free_end, BLOCK_N)
    return num_sink, num_low, window_begin, free_begin, free_end, num_masked


@triton.jit
def masked_key(t, num_sink, num_low, window_begin, free_end, BLOCK_N: tl.constexpr):
    """First key of the `t`-th masked tile that `key_ranges` counts: sink, lower edge of the window, diagonal."""
    low = t - num_sink
    edge = tl.where(low < num_low, window_begin + low * BLOCK_N, free_end + (low - num_low) * BLOCK_N)
    return tl.where(t < num_sink, t * BLOCK_N, edge)


@triton.jit
def heavy_first_tile(offs, pid, tiles, num_entries, gate_ptr, stride_gn, stride_gh, num_kv_heads, GROUP: tl.constexpr):
    """The sequence, query head and tile of queries that program `pid` computes; `offs` counts all gate entries.

    Key-value heads in retrieval mode come before the others, all tiles of a key-value head in a row so that its keys
    stay in L2, the longest ones first.
    """
    gate = tl.load(
        gate_ptr + (offs // num_kv_heads).to(tl.int64) * stride_gn + offs % num_kv_heads * stride_gh,
        mask=offs < num_entries,
        other=1,
    )
    retrieval = (gate == 0).to(tl.int32)
    before = tl.cumsum(retrieval, 0) - retrieval
    place = tl.where(retrieval != 0, before, tl.sum(retrieval, 0) + offs - before)
    entry = tl.sum(tl.where(place == pid // (tiles * GROUP), offs, 0), 0)
    among = pid % (tiles * GROUP)
    return entry // num_kv_heads, entry % num_kv_heads * GROUP + among % GROUP, tiles - 1 - among // GROUP


@triton.jit
def segment_of_tile(offs, tile, cu_seqlens_ptr, num_segments, BLOCK_M: tl.constexpr):
    """The packed segment of the `tile`-th block of `BLOCK_M` queries and its number in it; `offs` counts all segments.

    A tile past the last segment belongs to segment `num_segments`.
    """
    begin = tl.load(cu_seqlens_ptr + offs, mask=offs < num_segments, other=0).to(tl.int32)
    end = tl.load(cu_seqlens_ptr + offs + 1, mask=offs < num_segments, other=0).to(tl.int32)
    after = tl.cumsum((end - begin + BLOCK_M - 1) // BLOCK_M, 0)
    passed = (after <= tile) & (offs < num_segments)
    return tl.sum(passed.to(tl.int32), 0), tile - tl.max(tl.where(passed, after, 0), 0)


@triton.jit
def segment_bounds(segment, cu_seqlens_ptr, num_segments, k_length):
    """Where a packed segment lies: `segment, row, base, length, num_queries`, as `locate_tile` returns them.

    Segment `num_segments`, that of the tiles past the last one, becomes the last one without its queries.
    """
    spare = segment >= num_segments
    segment = tl.minimum(segment, num_segments - 1)
    first = tl.load(cu_seqlens_ptr + segment).to(tl.int32)
    length = tl.load(cu_seqlens_ptr + segment + 1).to(tl.int32) - first
    return segment, first // k_length, first % k_length, length, tl.where(spare, 0, length)


@triton.jit
def row_bounds(row, start_ptr, q_length, k_length, HAS_START: tl.constexpr):
    """Where the sequence of a row lies: `base, length, num_queries, q_base`, as `locate_tile` returns them."""
    base = 0
    if HAS_START:
        base = tl.load(start_ptr + row).to(tl.int32)
    length = k_length - base
    num_queries = tl.minimum(q_length, length)
    return base, length, num_queries, q_length - num_queries


@triton.jit
def locate_tile(
    offs, gate_ptr, start_ptr, cu_seqlens_ptr, stride_gn, stride_gh, num_sequences, num_kv_heads, q_length, k_length,
    GROUP: tl.constexpr, HAS_START: tl.constexpr, HAS_CU_SEQLENS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """What this program computes: one tile of `BLOCK_M` queries of one query head of one sequence.

    `offs` is an arange over the gate's entries or, for packed rows, over the segments. Returns
    `sequence, row, head, tile, base, length, num_queries, q_base`: the sequence's keys are `base .. base + length` of
    its row, its queries `q_base .. q_base + num_queries`; a tile without work has `tile * BLOCK_M >= num_queries`.
    """
    pid = tl.program_id(0)
    if HAS_CU_SEQLENS:
        num_heads = num_kv_heads * GROUP
        head = pid % num_heads
        # Programs outnumber tiles; the spare ones come first.
        sequence, tile = segment_of_tile(
            offs, tl.num_programs(0) // num_heads - 1 - pid // num_heads, cu_seqlens_ptr, num_sequences, BLOCK_M
        )
        sequence, row, base, length, num_queries = segment_bounds(sequence, cu_seqlens_ptr, num_sequences, k_length)
        q_base = base
    else:
        sequence, head, tile = heavy_first_tile(
            offs, pid, tl.cdiv(q_length, BLOCK_M), num_sequences * num_kv_heads, gate_ptr, stride_gn, stride_gh,
            num_kv_heads, GROUP,
        )  # fmt: skip
        row = sequence
        base, length, num_queries, q_base = row_bounds(row, start_ptr, q_length, k_length, HAS_START)
    return sequence, row, head, tile, base, length, num_queries, q_base


@triton.jit
def is_sampled(
    sampled_ptr, sequence, kv_head, tile, num_kv_heads, sample_tiles, BLOCK_M: tl.constexpr, SAMPLE_TILE: tl.constexpr
):  # fmt: skip
    """Whether a tile of `BLOCK_M` queries is part of a sampled one of `SAMPLE_TILE`, of `sample_tiles` a sequence."""
    place = tile * BLOCK_M // SAMPLE_TILE
    head = sampled_ptr + (sequence * num_kv_heads + kv_head).to(tl.int64) * sample_tiles
    return tl.load(head + place, mask=place < sample_tiles, other=0) != 0


@triton.jit
def soft_cap(scores, cap):
    """`cap * tanh(scores / cap)`, through one exponential that cannot overflow."""
    e = tl.exp2(tl.abs(scores) * (-2.8853900817779268 / cap))
    tanh = (1.0 - e) / (1.0 + e)
    return cap * tl.where(scores < 0, -tanh, tanh)
