"""Device functions that several kernels share."""

import triton
import triton.language as tl


@triton.jit
def heavy_first_tile(
    pid, tiles, num_units, gate_ptr, stride_gn, stride_gh, num_kv_heads, GROUP: tl.constexpr, BLOCK_G: tl.constexpr
):
    """Which of `tiles * num_units` tiles program `pid` computes, units being (sequence, query head) pairs.

    Units in retrieval mode come before the others and, inside both classes, last tiles before first ones, so that the
    longest programs start first. `BLOCK_G` is a power of two that holds all gate entries.
    Returns the sequence, the query head and the tile.
    """
    offs = tl.arange(0, BLOCK_G)
    entries = num_units // GROUP
    gate = tl.load(
        gate_ptr + (offs // num_kv_heads).to(tl.int64) * stride_gn + offs % num_kv_heads * stride_gh,
        mask=offs < entries,
        other=1,
    )
    retrieval = ((gate == 0) & (offs < entries)).to(tl.int32)
    before = tl.cumsum(retrieval, 0) - retrieval
    total = tl.sum(retrieval, 0)
    heavy = total * GROUP
    is_heavy = pid < heavy * tiles
    among = tl.where(is_heavy, pid, pid - heavy * tiles)
    width = tl.where(is_heavy, heavy, num_units - heavy)
    rank = tl.where(is_heavy, 0, heavy) + among % width
    place = tl.where(retrieval != 0, before, total + offs - before)
    entry = tl.sum(tl.where((place == rank // GROUP) & (offs < entries), offs, 0), 0)
    return entry // num_kv_heads, entry % num_kv_heads * GROUP + rank % GROUP, tiles - 1 - among // width


@triton.jit
def segment_of_tile(tile, cu_seqlens_ptr, num_segments, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr):
    """Which packed segment the `tile`-th block of `BLOCK_M` queries belongs to, and its number inside that segment.

    `BLOCK_S` is a power of two that holds all segments. A tile past the last one belongs to segment `num_segments`.
    """
    offs = tl.arange(0, BLOCK_S)
    begin = tl.load(cu_seqlens_ptr + offs, mask=offs < num_segments, other=0).to(tl.int32)
    end = tl.load(cu_seqlens_ptr + offs + 1, mask=offs < num_segments, other=0).to(tl.int32)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(tiles, 0)
    passed = (after <= tile) & (offs < num_segments)
    return tl.sum(passed.to(tl.int32), 0), tile - tl.max(tl.where(passed, after, 0), 0)


@triton.jit
def soft_cap(scores, cap):
    """`cap * tanh(scores / cap)`, through one exponential that cannot overflow."""
    e = tl.exp2(tl.abs(scores) * (-2.8853900817779268 / cap))
    tanh = (1.0 - e) / (1.0 + e)
    return cap * tl.where(scores < 0, -tanh, tanh)
