"""XAttention block selection as one persistent Triton kernel: from queries and keys to lists of kept blocks.

A program takes tiles of `BLOCK_M` query groups of one query head from a queue. For each of them it

1. walks the key groups in tiles of `BLOCK_N` up to the diagonal. The antidiagonal sums of all pairs of groups are one
   matrix product whose inner axis is (token of the group, channel), with the queries' tokens in reverse. An online
   softmax follows, of which each row (query group) keeps the sum of exponentials of every key block, relative to the
   row's maximum so far, and that maximum at every key tile;
2. adds these sums up over the rows of each query block, relative to each row's final maximum and sum: block scores;
3. finds the highest cut whose blocks still reach the threshold, by bisection over the scores' bits (positive floats
   are ordered like integers), and lists the kept blocks in ascending order.

Steps 1 and 2 write to a scratch of the program's own, as long as the keys and as high as a tile: no matrix over all
query groups or all query blocks reaches memory.

Grid: one axis, as many programs as run at a time. The queue holds the tiles of all heads, those at the end of their
sequences, the longest ones, first; the query heads of a key-value head follow each other and share its keys in L2.
Packed rows: an upper bound of the tile count, without a host read.

Sizes: any head_dim; fp16, bf16, and fp32 where it is interpreted; scores and sums in fp32; stride and strides per
block powers of two. Offsets of rows are int64.
"""

import torch
import triton
import triton.language as tl

from .._launch import compute_capability, is_interpreting, multiprocessors, on_device
from .._primitives import row_bounds, segment_of_tile
from .configs import INTERPRETER, selection_config
from .kept_blocks import KeptBlocks


_LOG2E = 1.4426950408889634
# Block scores read at a time: a warp then holds whole rows.
_COLUMNS = tl.constexpr(128)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def _locate(
    item, start_ptr, cu_seqlens_ptr, num_sequences, num_heads, q_length, k_length, num_tiles,
    HAS_START: tl.constexpr, HAS_CU_SEQLENS: tl.constexpr, BLOCK_S: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The `item`-th entry of the queue: `sequence, row, head, tile, base, length, num_queries, q_base`.

    The sequence's keys are `base .. base + length` of its row, its queries `q_base .. q_base + num_queries`; a tile
    of `TOKENS` queries without work has `tile * TOKENS >= num_queries`.
    """
    if HAS_CU_SEQLENS:
        head = item % num_heads
        sequence, tile = segment_of_tile(
            tl.arange(0, BLOCK_S), num_tiles - 1 - item // num_heads, cu_seqlens_ptr, num_sequences, TOKENS
        )
        spare = sequence >= num_sequences
        sequence = tl.minimum(sequence, num_sequences - 1)
        first = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
        length = (tl.load(cu_seqlens_ptr + sequence + 1) - first).to(tl.int32)
        row = (first // k_length).to(tl.int32)
        base = (first % k_length).to(tl.int32)
        num_queries = tl.where(spare, 0, length)
        q_base = base
    else:
        entry = item % (num_sequences * num_heads)
        head = entry % num_heads
        sequence = entry // num_heads
        tile = num_tiles - 1 - item // (num_sequences * num_heads)
        row = sequence
        base, length, num_queries, q_base = row_bounds(row, start_ptr, q_length, k_length, HAS_START)
    return sequence, row, head, tile, base, length, num_queries, q_base


@triton.jit
def _spread_blocks(offs_n, PER_BLOCK: tl.constexpr, PAIR: tl.constexpr, LANES: tl.constexpr):
    """The key group that each column of a tile of scores holds: `PAIR` groups of `LANES` blocks in turn.

    A thread holds every fourth pair of columns of a product, hence whole blocks, and adds them up on its own.
    """
    PAIRS: tl.constexpr = PER_BLOCK // PAIR
    lane = offs_n // PAIR % LANES
    pair = offs_n // (PAIR * LANES)
    return (pair // PAIRS * LANES + lane) * PER_BLOCK + pair % PAIRS * PAIR + offs_n % PAIR


@triton.jit
def _sum_exponentials(
    q_tokens, stride_qq, num_queries, k_tokens, stride_kk, length, first_token, first_group, num_key_tiles,
    scratch, width, max_key_tiles, to_log2,
    HEAD_DIM: tl.constexpr, STRIDE: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes each row's sums of exponentials, its maxima and its log-sum-exp (in log2) to `scratch`.

    `q_tokens` and `k_tokens` point at the sequence's first query and key; the tile begins at query `first_token`,
    whose group in the sequence is `first_group`.
    """
    BLOCKS: tl.constexpr = BLOCK_N // PER_BLOCK
    PAIR: tl.constexpr = min(PER_BLOCK, 2)
    LANES: tl.constexpr = min(BLOCKS, 4)
    SLICES: tl.constexpr = (HEAD_DIM + BLOCK_K - 1) // BLOCK_K
    STEPS: tl.constexpr = STRIDE * SLICES
    sums_ptr, _, maxima_ptr, lse_ptr = scratch
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_b = tl.arange(0, BLOCKS)
    offs_g = _spread_blocks(offs_n, PER_BLOCK, PAIR, LANES)
    q_first = first_token + offs_m * STRIDE
    q_tile = q_tokens + q_first.to(tl.int64)[:, None] * stride_qq + offs_k[None, :]
    k_tile = k_tokens + (offs_g * STRIDE).to(tl.int64)[:, None] * stride_kk + offs_k[None, :]
    # Rows at the same place in their blocks lie together.
    offs_r = offs_m % PER_BLOCK * (BLOCK_M // PER_BLOCK) + offs_m // PER_BLOCK
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # One loop over tiles and their slices, so that the next tile's loads run beside a tile's softmax.
    for step in range(0, num_key_tiles * STEPS):
        t = step // STEPS
        s = step % STEPS // SLICES
        d = step % SLICES * BLOCK_K
        q_mask = (q_first + (STRIDE - 1 - s) < num_queries)[:, None]
        k_mask = (offs_g * STRIDE + (t * (BLOCK_N * STRIDE) + s) < length)[:, None]
        if HEAD_DIM % BLOCK_K:
            q_mask = q_mask & (d + offs_k < HEAD_DIM)[None, :]
            k_mask = k_mask & (d + offs_k < HEAD_DIM)[None, :]
        q = tl.load(q_tile + ((STRIDE - 1 - s) * stride_qq + d), mask=q_mask, other=0.0)  # [BLOCK_M, BLOCK_K]
        k_offset = (t * (BLOCK_N * STRIDE) + s).to(tl.int64) * stride_kk + d
        k = tl.load(k_tile + k_offset, mask=k_mask, other=0.0)  # [BLOCK_N, BLOCK_K]
        acc = tl.dot(q, k.T, acc, input_precision=PRECISION)
        if step % STEPS == STEPS - 1:
            acc *= to_log2
            if (t + 1) * BLOCK_N > first_group:
                # Groups past the sequence lie after every query group.
                acc = tl.where(t * BLOCK_N + offs_g[None, :] <= first_group + offs_m[:, None], acc, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(acc, 1))
            p = tl.exp2(acc - m_new[:, None])
            sums = tl.sum(tl.sum(p.reshape([BLOCK_M, BLOCKS // LANES, PER_BLOCK // PAIR, LANES, PAIR]), 4), 2)
            sums = sums.reshape([BLOCK_M, BLOCKS])
            l_i = l_i * tl.exp2(m_i - m_new) + tl.sum(sums, 1)
            m_i = m_new
            tl.store(sums_ptr + offs_r[:, None] * width + t * BLOCKS + offs_b[None, :], sums)
            tl.store(maxima_ptr + offs_r * max_key_tiles + t, m_i)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # Rows past the sequence count for nothing.
    tl.store(lse_ptr + offs_r, tl.where(q_first < num_queries, m_i + tl.log2(l_i), float("inf")))


@triton.jit
def _always_kept(columns, diagonal):
    return (columns[None, :] == 0) | (columns[None, :] == diagonal[:, None])


@triton.jit
def _score_blocks(
    scratch, width, max_key_tiles, num_key_tiles, diagonal, PER_BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Adds the rows of each query block up to its scores, `[QUERY_BLOCKS, width]`.

    Blocks that are always kept are written with a score of zero; theirs are returned, added up.
    """
    QUERY_BLOCKS: tl.constexpr = diagonal.shape[0]
    sums_ptr, scores_ptr, maxima_ptr, lse_ptr = scratch
    offs_q = tl.arange(0, QUERY_BLOCKS)
    offs_b = tl.arange(0, BLOCKS)
    always_scores = tl.zeros([QUERY_BLOCKS, TILES * BLOCKS], tl.float32)
    for first in range(0, num_key_tiles, TILES):
        offs_t = first + tl.arange(0, TILES)
        written = (offs_t < num_key_tiles)[None, :]
        scores = tl.zeros([QUERY_BLOCKS, TILES, BLOCKS], tl.float32)
        for place in tl.range(0, PER_BLOCK, loop_unroll_factor=min(PER_BLOCK, 8)):
            rows = place * QUERY_BLOCKS + offs_q
            maxima = tl.load(
                maxima_ptr + rows[:, None] * max_key_tiles + offs_t[None, :], mask=written, other=float("-inf")
            )  # [QUERY_BLOCKS, TILES]
            weight = tl.exp2(maxima - tl.load(lse_ptr + rows)[:, None])
            tile = sums_ptr + rows[:, None, None] * width + offs_t[None, :, None] * BLOCKS + offs_b[None, None, :]
            sums = tl.load(tile, mask=written[:, :, None], other=0.0)  # [QUERY_BLOCKS, TILES, BLOCKS]
            scores += sums * weight[:, :, None]
        scores = scores.reshape([QUERY_BLOCKS, TILES * BLOCKS])
        columns = first * BLOCKS + tl.arange(0, TILES * BLOCKS)
        always = _always_kept(columns, diagonal)
        always_scores += tl.where(always, scores, 0.0)
        tile = scores_ptr + offs_q[:, None] * width + columns[None, :]
        tl.store(tile, tl.where(always, 0.0, scores), mask=(columns < num_key_tiles * BLOCKS)[None, :])
    return tl.sum(always_scores, 1)


@triton.jit
def _load_bits(scores_ptr, width, num_columns, columns, ROWS: tl.constexpr):
    """Scores of the given columns as integers, `[ROWS, columns]`: positive floats are ordered like their bits."""
    tile = scores_ptr + tl.arange(0, ROWS)[:, None] * width + columns[None, :]
    return tl.load(tile, mask=(columns < num_columns)[None, :], other=0.0).to(tl.int32, bitcast=True)


@triton.jit
def _mass_from(cut, always_mass, scores_ptr, width, num_columns, CHUNK: tl.constexpr):
    """Each row's mass if it keeps the scores whose bits are at least `cut`: never rises with it, even as rounded."""
    mass = tl.zeros([cut.shape[0], CHUNK], tl.float32)
    for first in tl.range(0, num_columns, CHUNK, loop_unroll_factor=4):
        bits = _load_bits(scores_ptr, width, num_columns, first + tl.arange(0, CHUNK), cut.shape[0])
        mass += tl.where(bits >= cut[:, None], bits, 0).to(tl.float32, bitcast=True)
    return always_mass + tl.sum(mass, 1)


@triton.jit
def _list_blocks(
    scores_ptr, width, num_columns, always_mass, diagonal, threshold, lists, counts, present, CHUNK: tl.constexpr
):  # fmt: skip
    """Lists the fewest blocks that reach the threshold; every vector holds one entry a query block of the tile."""
    ROWS: tl.constexpr = diagonal.shape[0]
    low = tl.zeros([ROWS], tl.int32)
    high = tl.full([ROWS], _INFINITY, tl.int32)
    needed = threshold * _mass_from(low, always_mass, scores_ptr, width, num_columns, CHUNK)
    for _ in range(31):
        middle = low + ((high - low) >> 1)
        enough = _mass_from(middle, always_mass, scores_ptr, width, num_columns, CHUNK) >= needed
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)

    # Every block above the cut is kept; of those at the cut, from the lowest on, as many as the threshold takes.
    above = _mass_from(low + 1, always_mass, scores_ptr, width, num_columns, CHUNK)
    cut_score = low.to(tl.float32, bitcast=True)
    ties_before = tl.zeros([ROWS], tl.int32)
    count = tl.zeros([ROWS], tl.int32)
    for first in range(0, num_columns, CHUNK):
        columns = first + tl.arange(0, CHUNK)
        bits = _load_bits(scores_ptr, width, num_columns, columns, ROWS)
        always = _always_kept(columns, diagonal)
        tie = ((bits == low[:, None]) & ~always).to(tl.int32)
        rank = ties_before[:, None] + tl.cumsum(tie, 1) - tie
        taken = (tie != 0) & (above[:, None] + rank * cut_score[:, None] < needed[:, None])
        kept = ((bits > low[:, None]) | taken | always) & (columns[None, :] <= diagonal[:, None]) & present[:, None]
        place = count[:, None] + tl.cumsum(kept.to(tl.int32), 1) - 1
        tl.store(lists[:, None] + place, columns[None, :].to(lists.dtype.element_ty), mask=kept)
        ties_before += tl.sum(tie, 1)
        count += tl.sum(kept.to(tl.int32), 1)
    tl.store(counts, count, mask=present)


@triton.jit
def _block_selection_kernel(
    q_ptr, k_ptr, heads_ptr, start_ptr, cu_seqlens_ptr, queue_ptr, scratch_ptr, index_ptr, count_ptr,
    stride_qb, stride_qh, stride_qq, stride_kb, stride_kh, stride_kk, stride_hn, stride_hh,
    num_sequences, num_heads, q_length, k_length, num_tiles, num_items, num_rows, num_columns, max_key_tiles,
    scratch_size, to_log2, threshold,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STRIDE: tl.constexpr, PER_BLOCK: tl.constexpr,
    HAS_HEADS: tl.constexpr, HAS_START: tl.constexpr, HAS_CU_SEQLENS: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = BLOCK_N // PER_BLOCK
    QUERY_BLOCKS: tl.constexpr = BLOCK_M // PER_BLOCK
    TILES: tl.constexpr = max(_COLUMNS // BLOCKS, 1)
    width = max_key_tiles * BLOCKS
    sums_ptr = scratch_ptr + tl.program_id(0).to(tl.int64) * scratch_size
    scores_ptr = sums_ptr + BLOCK_M * width
    maxima_ptr = scores_ptr + QUERY_BLOCKS * width
    scratch = (sums_ptr, scores_ptr, maxima_ptr, maxima_ptr + BLOCK_M * max_key_tiles)

    item = tl.atomic_add(queue_ptr, 1)
    while item < num_items:
        sequence, row, head, tile, base, length, num_queries, q_base = _locate(
            item, start_ptr, cu_seqlens_ptr, num_sequences, num_heads, q_length, k_length, num_tiles,
            HAS_START, HAS_CU_SEQLENS, BLOCK_S, BLOCK_M * STRIDE,
        )  # fmt: skip
        row = row.to(tl.int64)
        kv_head = (head // GROUP).to(tl.int64)
        first_token = tile * BLOCK_M * STRIDE
        wanted = first_token < num_queries
        if HAS_HEADS:
            wanted = wanted & (tl.load(heads_ptr + sequence.to(tl.int64) * stride_hn + kv_head * stride_hh) != 0)
        if wanted:
            # Queries begin on a block boundary: rounding down keeps every access in place where they do not.
            first_block = (length - num_queries) // (STRIDE * PER_BLOCK)
            first_group = first_block * PER_BLOCK + tile * BLOCK_M
            last_token = tl.minimum(first_group * STRIDE + BLOCK_M * STRIDE, length) - 1
            num_key_tiles = last_token // (BLOCK_N * STRIDE) + 1
            q_tokens = q_ptr + row * stride_qb + head.to(tl.int64) * stride_qh + tl.cast(q_base, tl.int64) * stride_qq
            k_tokens = k_ptr + row * stride_kb + kv_head * stride_kh + tl.cast(base, tl.int64) * stride_kk
            _sum_exponentials(
                q_tokens, stride_qq, num_queries, k_tokens, stride_kk, length, first_token, first_group,
                num_key_tiles, scratch, width, max_key_tiles, to_log2,
                HEAD_DIM, STRIDE, PER_BLOCK, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip
            # Other threads of this program read what these wrote.
            tl.debug_barrier()
            block = tile * QUERY_BLOCKS + tl.arange(0, QUERY_BLOCKS)
            diagonal = first_block + block
            always_mass = _score_blocks(
                scratch, width, max_key_tiles, num_key_tiles, diagonal, PER_BLOCK, BLOCKS, TILES
            )
            tl.debug_barrier()
            list_row = (sequence.to(tl.int64) * num_heads + head) * num_rows + block
            _list_blocks(
                scores_ptr, width, num_key_tiles * BLOCKS, always_mass, diagonal, threshold,
                index_ptr + list_row * num_columns, count_ptr + list_row,
                block * (STRIDE * PER_BLOCK) < num_queries, TILES * BLOCKS,
            )  # fmt: skip
            # The next tile overwrites the scratch.
            tl.debug_barrier()
        item = tl.atomic_add(queue_ptr, 1)


def block_selection_forward(
    query,
    key,
    *,
    heads=None,
    block_size,
    stride,
    threshold,
    start=None,
    cu_seqlens=None,
    scale=None,
):
    """Launches the kernel; arguments as `block_selection`, which validates them. Returns `KeptBlocks`."""
    batch, num_heads, q_length, head_dim = query.shape
    _, num_kv_heads, k_length, _ = key.shape
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    if is_interpreting():
        config, programs = INTERPRETER, 2
    else:
        config = selection_config(head_dim, query.element_size(), compute_capability(query.device.index))
        programs = multiprocessors(query.device.index)  # each holds one
    per_block = block_size // stride
    block_m, block_n = max(config.block_m, per_block), max(config.block_n, per_block)

    packed = cu_seqlens is not None
    sequences = cu_seqlens.numel() - 1 if packed else batch
    tokens = block_m * stride
    tiles = batch * q_length // tokens + sequences if packed else triton.cdiv(q_length, tokens)
    items = tiles * num_heads * (1 if packed else sequences)
    programs = min(programs, items)
    rows, columns = triton.cdiv(q_length, block_size), triton.cdiv(k_length, block_size)
    key_tiles = triton.cdiv(columns * per_block, block_n)
    kept = KeptBlocks.empty((sequences, num_heads, rows, columns), block_size, query.device)
    kept.counts.zero_()
    queue = torch.zeros(1, dtype=torch.int32, device=query.device)
    # Per program: sums, block scores, maxima, log-sum-exps.
    size = (block_m + block_m // per_block) * key_tiles * (block_n // per_block) + block_m * (key_tiles + 1)
    scratch = torch.empty(programs, size, dtype=torch.float32, device=query.device)
    scale = head_dim**-0.5 if scale is None else scale
    with on_device(query):
        _block_selection_kernel[(programs,)](
            query, key, heads, start, cu_seqlens, queue, scratch, kept.indices, kept.counts,
            *query.stride()[:3], *key.stride()[:3], *((0, 0) if heads is None else heads.stride()),
            sequences, num_heads, q_length, k_length, tiles, items, rows, columns, key_tiles,
            size, scale / stride * _LOG2E, threshold,
            GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, STRIDE=stride, PER_BLOCK=per_block,
            HAS_HEADS=heads is not None, HAS_START=start is not None, HAS_CU_SEQLENS=packed,
            BLOCK_S=triton.next_power_of_2(sequences), BLOCK_M=block_m, BLOCK_N=block_n,
            BLOCK_K=min(config.block_k, max(16, triton.next_power_of_2(head_dim))),
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return kept
