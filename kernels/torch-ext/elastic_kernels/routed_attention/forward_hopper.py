"""Routed prefill attention for Hopper (compute capability 9.0), in Gluon.

Computes what `forward.py` computes, on the same grid: one program owns one tile of 128 queries of one query head. Its
warps take roles:

- the producer copies queries, then one tile of 128 keys and one of values after the other, into two buffers each;
- two consumer warp groups own 64 queries each. While the tensor cores multiply the probabilities of one tile of keys
  with its values, the group already turns the scores of the next tile into probabilities.

What limits a long prefill here is power, not latency: leaving rows alone whose maximum did not change, and keeping the
tiles of a key-value head together so that its keys stay in L2, each pay more than a shorter critical path does.

Sizes: head_dim 64 and 128; fp16 and bf16; fp32 softmax and accumulation. Tensors are read through TMA descriptors.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .._launch import compute_capability, on_device
from .._primitives import head_limits, head_mode, is_sampled, key_ranges, locate_tile, masked_key
from ._hopper_softmax import lane_sums, rescale, settled, softmax
from ._prefill import prepare_prefill


BLOCK_M = 128
BLOCK_N = 128
# Of the 65,536 registers, 168 a thread at launch; the producer then hands its own to the consumers.
_LAUNCH_REGISTERS = 168
_CONSUMER_REGISTERS = gl.constexpr(240)
_GROUPS = gl.constexpr(2)
_STAGES = gl.constexpr(2)
_LOG2E = gl.constexpr(1.4426950408889634)


# Triton 3.9 renamed the copy.
_copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _load_tile(desc, row, head, first, use, ring):
    """Copies the rows from `first` on into the `use`-th buffer of the ring, once its last readers have left it."""
    buffers, ready, empty = ring
    slot = use % _STAGES
    mbarrier.wait(empty.index(slot), (use // _STAGES & 1) ^ 1)
    mbarrier.expect(ready.index(slot), desc.block_type.nbytes)
    _copy_tile(desc, [row, head, first, 0], ready.index(slot), buffers.index(slot))


@gluon.jit
def _produce(shared, descs, free_keys, XA_BLOCK: gl.constexpr):
    queries, key_ring, value_ring, origin, masked, counts = shared
    q_desc, k_desc, v_desc = descs
    q_buffers, q_ready = queries
    row, head, kv_head, q_first, base = origin
    free_begin, list_ptr, from_list = free_keys
    num_sink, num_low, window_begin, free_end = masked
    num_masked, num_tiles = counts
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    BLOCKS: gl.constexpr = XA_BLOCK // KEYS

    mbarrier.expect(q_ready, _GROUPS * q_desc.block_type.nbytes)
    for group in gl.static_range(_GROUPS):
        _copy_tile(q_desc, [row, head, q_first + group * ROWS, 0], q_ready, q_buffers.index(group))
    previous = 0
    for t in range(num_tiles):
        free = t - num_masked
        first = free_begin + free * KEYS
        if XA_BLOCK > 0:
            block = gl.load(list_ptr + free // BLOCKS, mask=from_list & (free >= 0), other=0).to(gl.int32)
            first = gl.where(from_list, block * XA_BLOCK + free % BLOCKS * KEYS, first)
        first = gl.where(free < 0, masked_key(t, num_sink, num_low, window_begin, free_end, KEYS), first)
        _load_tile(k_desc, row, kv_head, base + first, t, key_ring)
        # Values are needed one tile later than their keys.
        if t > 0:
            _load_tile(v_desc, row, kv_head, base + previous, t - 1, value_ring)
        previous = first
    _load_tile(v_desc, row, kv_head, base + previous, num_tiles - 1, value_ring)


@gluon.jit
def _scores(q, ring, t, SCORES: gl.constexpr):
    """Starts the product of the queries with the `t`-th tile of keys."""
    buffers, ready, _ = ring
    ROWS: gl.constexpr = q.shape[0]
    KEYS: gl.constexpr = buffers.shape[3]
    HEAD_DIM: gl.constexpr = buffers.shape[4]
    mbarrier.wait(ready.index(t % _STAGES), t // _STAGES & 1)
    k = buffers.index(t % _STAGES).reshape([KEYS, HEAD_DIM]).permute((1, 0))
    zero = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def _add_values(acc, p, ring, t):
    """Starts the product of the probabilities with the `t`-th tile of values."""
    buffers, ready, _ = ring
    KEYS: gl.constexpr = buffers.shape[3]
    HEAD_DIM: gl.constexpr = buffers.shape[4]
    mbarrier.wait(ready.index(t % _STAGES), t // _STAGES & 1)
    v = buffers.index(t % _STAGES).reshape([KEYS, HEAD_DIM])
    p = gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def _step(
    t, first_key, acc, p, m_i, l_i, alpha, q, key_ring, value_ring, offs_i, limits, to_log2,
    MASKED: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of tile `t` beside the output of tile `t - 1`."""
    s = _scores(q, key_ring, t, SCORES)
    # Rescaling and rounding hide behind the scores.
    acc = rescale(acc, alpha)
    acc = _add_values(acc, p, value_ring, t - 1)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(key_ring[2].index(t % _STAGES), count=1)
    p, m_i, l_i, alpha = softmax(s, m_i, l_i, offs_i, first_key, limits, to_log2, MASKED)
    l_i = settled(l_i)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(value_ring[2].index((t - 1) % _STAGES), count=1)
    return acc, p, m_i, l_i, alpha


@gluon.jit
def _consume(
    shared, limits, rows, out, GROUP: gl.constexpr, HAS_SINKS: gl.constexpr, STORE_LSE: gl.constexpr,
    STORED: gl.constexpr,
):  # fmt: skip
    queries, key_ring, value_ring, origin, masked, counts = shared
    q_buffers, q_ready = queries
    row, head, _, q_first, _ = origin
    num_sink, num_low, window_begin, free_end = masked
    num_masked, num_tiles = counts
    first_query, num_rows, to_log2, sink_logit = rows
    out_ptr, lse_ptr, stride_ob, stride_oh, stride_oq, stride_lb, stride_lh = out
    ROWS: gl.constexpr = q_buffers.shape[3]
    HEAD_DIM: gl.constexpr = q_buffers.shape[4]
    KEYS: gl.constexpr = key_ring[0].shape[3]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    SCORE_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)

    q = q_buffers.index(GROUP).reshape([ROWS, HEAD_DIM])
    offs_r = GROUP * ROWS + gl.arange(0, ROWS, SCORE_ROWS)
    offs_i = first_query + offs_r
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, OUTPUT)
    m_i = gl.full([ROWS], float("-inf"), gl.float32, SCORE_ROWS)
    l_i = lane_sums(gl.zeros([ROWS, KEYS], gl.float32, SCORES))
    if HAS_SINKS:
        # A sink is a logit without a value: it enters the denominator only, a quarter in each of a row's four lanes.
        m_i = gl.zeros([ROWS], gl.float32, SCORE_ROWS) + sink_logit * _LOG2E
        l_i = l_i + 0.25

    mbarrier.wait(q_ready, 0)
    s = _scores(q, key_ring, 0, SCORES)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(key_ring[2].index(0), count=1)
    first_key = masked_key(0, num_sink, num_low, window_begin, free_end, KEYS)
    p, m_i, l_i, alpha = softmax(s, m_i, l_i, offs_i, first_key, limits, to_log2, True)
    for t in range(1, num_masked):
        first_key = masked_key(t, num_sink, num_low, window_begin, free_end, KEYS)
        acc, p, m_i, l_i, alpha = _step(
            t, first_key, acc, p, m_i, l_i, alpha, q, key_ring, value_ring, offs_i, limits, to_log2, True, SCORES
        )
    for t in range(num_masked, num_tiles):
        acc, p, m_i, l_i, alpha = _step(
            t, 0, acc, p, m_i, l_i, alpha, q, key_ring, value_ring, offs_i, limits, to_log2, False, SCORES
        )
    acc = _add_values(rescale(acc, alpha), p, value_ring, num_tiles - 1)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    l_i = gl.convert_layout(gl.sum(l_i, 1), SCORE_ROWS)
    if STORE_LSE:
        lse_rows = lse_ptr + row.to(gl.int64) * stride_lb + head.to(gl.int64) * stride_lh + q_first + offs_r
        gl.store(lse_rows, (m_i + gl.log2(l_i)) / _LOG2E, mask=offs_r < num_rows)
    # The queries' buffer is free: through it each warp writes whole lines of memory.
    q.store((acc / gl.convert_layout(l_i, gl.SliceLayout(1, OUTPUT))[:, None]).to(q_buffers.dtype))
    offs_m = GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, STORED))
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, STORED))
    out_head = out_ptr + row.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh
    out_rows = out_head + (q_first + offs_m).to(gl.int64)[:, None] * stride_oq + offs_d[None, :]
    gl.store(out_rows, q.load(STORED), mask=(offs_m < num_rows)[:, None])


@gluon.jit
def _store_padding(
    out, row, head, first, q_base, dtype: gl.constexpr, BLOCK_M: gl.constexpr, STORE_LSE: gl.constexpr,
    STORED: gl.constexpr,
):  # fmt: skip
    """Zeros for the queries `first .. first + BLOCK_M` that are padding: those before `q_base`."""
    out_ptr, lse_ptr, stride_ob, stride_oh, stride_oq, stride_lb, stride_lh = out
    ROWS: gl.constexpr = 32
    HEAD_DIM: gl.constexpr = STORED.size_per_thread[1] * STORED.threads_per_warp[1]
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, STORED))
    out_head = out_ptr + row.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh
    lse_head = lse_ptr + row.to(gl.int64) * stride_lb + head.to(gl.int64) * stride_lh
    for part in range(BLOCK_M // ROWS):
        offs_m = first + part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, STORED))
        padded = offs_m < q_base
        out_rows = out_head + offs_m.to(gl.int64)[:, None] * stride_oq + offs_d[None, :]
        gl.store(out_rows, gl.zeros([ROWS, HEAD_DIM], dtype, STORED), mask=padded[:, None])
        if STORE_LSE:
            gl.store(lse_head + offs_m, gl.full([ROWS], float("-inf"), gl.float32, padded.type.layout), mask=padded)


@gluon.jit
def _routed_attention_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, gate_ptr, start_ptr, cu_seqlens_ptr, list_ptr, count_ptr, sinks_ptr, sampled_ptr, out_ptr,
    lse_ptr, stride_gn, stride_gh, stride_ob, stride_oh, stride_oq, stride_lb, stride_lh,
    num_sequences, num_kv_heads, q_length, k_length, list_rows, list_columns, sample_tiles,
    sink_size, window_size, scale,
    RETRIEVAL_MODE: gl.constexpr, SPARSE_MODE: gl.constexpr, GROUP: gl.constexpr, HAS_START: gl.constexpr,
    HAS_CU_SEQLENS: gl.constexpr, HAS_SINKS: gl.constexpr, STORE_LSE: gl.constexpr, XA_BLOCK: gl.constexpr,
    SAMPLE_TILE: gl.constexpr, BLOCK_G: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    BLOCK_M: gl.constexpr = _GROUPS * ROWS
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    HEAD_DIM: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    offs_g = gl.arange(0, BLOCK_G, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    sequence, row, head, tile, base, length, num_queries, q_base = locate_tile(
        offs_g, gate_ptr, start_ptr, cu_seqlens_ptr, stride_gn, stride_gh, num_sequences, num_kv_heads,
        q_length, k_length, GROUP, HAS_START, HAS_CU_SEQLENS, BLOCK_M,
    )  # fmt: skip
    kv_head = head // GROUP
    out = (out_ptr, lse_ptr, stride_ob, stride_oh, stride_oq, stride_lb, stride_lh)
    if HAS_START:
        _store_padding(out, row, head, tile * BLOCK_M, q_base, dtype, BLOCK_M, STORE_LSE, STORED)

    gate = gl.load(gate_ptr + sequence.to(gl.int64) * stride_gn + kv_head * stride_gh)
    streaming, block_sparse = head_mode(gate, RETRIEVAL_MODE, SPARSE_MODE)
    sink, window = head_limits(streaming, sink_size, window_size)
    num_rows = num_queries - tile * BLOCK_M
    if SAMPLE_TILE > 0:
        sampled = is_sampled(sampled_ptr, sequence, kv_head, tile, num_kv_heads, sample_tiles, BLOCK_M, SAMPLE_TILE)
        num_rows = gl.where(sampled, num_rows, 0)
    first_query = length - num_queries + tile * BLOCK_M
    last_query = gl.minimum(first_query + BLOCK_M, length) - 1
    num_sink, num_low, window_begin, free_begin, free_end, num_masked = key_ranges(
        first_query, last_query, sink, window, block_sparse, XA_BLOCK, KEYS
    )
    num_tiles = num_masked + (free_end - free_begin) // KEYS
    kept_ptr = gate_ptr  # a stand-in where no head has a list: roles take no missing pointers
    if XA_BLOCK > 0:
        list_row = (sequence.to(gl.int64) * num_kv_heads * GROUP + head) * list_rows + tile * BLOCK_M // XA_BLOCK
        kept_ptr = list_ptr + list_row * list_columns
        # The diagonal block closes the list: its tiles are the masked ones.
        before = gl.maximum(gl.load(count_ptr + list_row, mask=num_rows > 0, other=1) - 1, 0)
        num_tiles = gl.where(block_sparse, num_masked + before * (XA_BLOCK // KEYS), num_tiles)
    # A tile without queries folds one tile of keys and stores nothing.
    num_masked = gl.where(num_rows > 0, num_masked, 1)
    num_tiles = gl.where(num_rows > 0, num_tiles, 1)

    bars: gl.constexpr = mbarrier.MBarrierLayout()
    q_buffers = gl.allocate_shared_memory(dtype, [_GROUPS, 1, 1, ROWS, HEAD_DIM], q_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [_STAGES, 1, 1, KEYS, HEAD_DIM], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [_STAGES, 1, 1, KEYS, HEAD_DIM], v_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], bars)
    k_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], bars)
    k_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], bars)
    v_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], bars)
    v_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], bars)
    mbarrier.init(q_ready, count=1)
    for stage in gl.static_range(_STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=_GROUPS)
        mbarrier.init(v_empty.index(stage), count=_GROUPS)

    sink_logit = 0.0
    if HAS_SINKS:
        sink_logit = gl.load(sinks_ptr + head).to(gl.float32)
    queries = (q_buffers, q_ready)
    key_ring = (k_buffers, k_ready, k_empty)
    value_ring = (v_buffers, v_ready, v_empty)
    origin = (row, head, kv_head, q_base + tile * BLOCK_M, base)
    masked = (num_sink, num_low, window_begin, free_end)
    free = (free_begin, kept_ptr, block_sparse)
    counts = (num_masked, num_tiles)
    rows = (first_query, num_rows, scale * _LOG2E, sink_logit)
    shared = (queries, key_ring, value_ring, origin, masked, counts)
    limits = (sink, window)
    gl.warp_specialize(
        [
            (_produce, (shared, (q_desc, k_desc, v_desc), free, XA_BLOCK)),
            (_consume, (shared, limits, rows, out, 0, HAS_SINKS, STORE_LSE, STORED)),
            (_consume, (shared, limits, rows, out, 1, HAS_SINKS, STORE_LSE, STORED)),
        ],
        [4, 4],
        [_CONSUMER_REGISTERS, _CONSUMER_REGISTERS],
    )


def supports(query, key, value, *, kept_blocks=None, softcap=None) -> bool:
    """Whether this kernel computes a call on a CUDA device: capability, dtype, head_dim, memory layout and options."""
    if compute_capability(query.device.index) != 90:
        return False
    if query.dtype not in (torch.float16, torch.bfloat16) or query.shape[3] not in (64, 128) or softcap is not None:
        return False
    if kept_blocks is not None and kept_blocks.block_size % max(BLOCK_M, BLOCK_N):
        return False
    return all(_is_copyable(x) for x in (query, key, value))


def _is_copyable(x: torch.Tensor) -> bool:
    """Whether TMA can read `x` `[B, H, S, D]`: channels together, everything else at multiples of 16 bytes."""
    aligned = all(stride > 0 and stride % 8 == 0 for size, stride in zip(x.shape[:3], x.stride()) if size > 1)
    # A graph that is being compiled has no addresses; PyTorch allocates at multiples of more.
    return x.stride(3) == 1 and aligned and (torch.compiler.is_compiling() or x.data_ptr() % 16 == 0)


@functools.cache
def _shared_layout(rows: int, head_dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, head_dim], element)


def _descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    head_dim = x.shape[3]
    # The stride of an axis of one entry is never used, but it has to be a legal one.
    strides = [stride if size > 1 else head_dim for size, stride in zip(x.shape, x.stride())]
    strides[3] = 1
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, head_dim], _shared_layout(rows, head_dim, x.dtype))


def routed_attention_forward_hopper(
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
    """Launches the kernel; arguments as `routed_attention`, which validates them, within what `supports` allows.

    Returns:
        The output `[B, Hq, Q, D]` in query's dtype, and its log-sum-exp, float32 `[B, Hq, Q]`, or `None`.
    """
    launch = prepare_prefill(
        query, key, gate, mode_pair=mode_pair, sink_size=sink_size, window_size=window_size, start=start,
        cu_seqlens=cu_seqlens, kept_blocks=kept_blocks, sinks=sinks, scale=scale, with_lse=with_lse,
        sampled=sampled, block_m=BLOCK_M,
    )  # fmt: skip
    lanes = query.shape[3] // 8
    with on_device(query):
        _routed_attention_fwd_hopper_kernel[launch.grid](
            _descriptor(query, BLOCK_M // 2), _descriptor(key, BLOCK_N), _descriptor(value, BLOCK_N),
            *launch.pointers, *launch.strides, *launch.sizes, **launch.constants,
            STORED=gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0]),
            num_warps=4, maxnreg=_LAUNCH_REGISTERS, enable_fp_fusion=True,
        )  # fmt: skip
    return launch.out, launch.lse
