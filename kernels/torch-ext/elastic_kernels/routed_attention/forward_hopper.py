import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


LOG2E = gl.constexpr(1.4426950408889634)
UNBOUNDED = gl.constexpr(2**31 - 1)


@gluon.jit
def _first_key(t, keys, BLOCK_N: gl.constexpr):
    """First key of the masked tile `t`: sink tiles, then the window's lower edge, then the diagonal."""
    num_sink, num_low, window_begin, free_begin, free_end, num_masked, num_tiles = keys
    low = window_begin + (t - num_sink) * BLOCK_N
    high = free_end + (t - num_sink - num_low) * BLOCK_N
    return gl.where(t < num_sink, t * BLOCK_N, gl.where(t < num_sink + num_low, low, high))


@gluon.jit
def _load_tile(desc, row, head, first, slot, use, bufs, ready, empty):
    mbarrier.wait(empty.index(slot), (use & 1) ^ 1)
    bar = ready.index(slot)
    mbarrier.expect(bar, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [row, head, first, 0], bar, bufs.index(slot))


@gluon.jit
def _produce(descs, buffers, barriers, where, keys, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    q_desc, k_desc, v_desc = descs
    q_bufs, k_bufs, v_bufs = buffers
    q_ready, k_ready, k_empty, v_ready, v_empty, turns = barriers
    row, head, kv_head, q_first, base = where
    num_sink, num_low, window_begin, free_begin, free_end, num_masked, num_tiles = keys

    HALF: gl.constexpr = q_desc.block_type.shape[2]
    WGS: gl.constexpr = q_bufs.shape[0]
    mbarrier.expect(q_ready, WGS * q_desc.block_type.nbytes)
    for i in gl.static_range(WGS):
        tma.async_copy_global_to_shared(q_desc, [row, head, q_first + i * HALF, 0], q_ready, q_bufs.index(i))
    last = 0
    for t in range(num_tiles):
        first = gl.where(t < num_masked, _first_key(t, keys, BLOCK_N), free_begin + (t - num_masked) * BLOCK_N)
        _load_tile(k_desc, row, kv_head, base + first, t % STAGES, t // STAGES, k_bufs, k_ready, k_empty)
        # Values are needed one tile after their keys.
        if t > 0:
            s = t - 1
            _load_tile(v_desc, row, kv_head, base + last, s % STAGES, s // STAGES, v_bufs, v_ready, v_empty)
        last = first
    s = num_tiles - 1
    _load_tile(v_desc, row, kv_head, base + last, s % STAGES, s // STAGES, v_bufs, v_ready, v_empty)


@gluon.jit
def _lane_sums(p):
    """Sums of each row over the columns that one lane holds, `[rows, 4]`: four neighbouring lanes share a row."""
    x = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(x, 3), 1)


@gluon.jit
def _row_max(s, TREE: gl.constexpr):
    """Maximum of each row, as a tree: the two rows of a lane would otherwise be two long chains."""
    HALF: gl.constexpr = s.shape[0]
    COLUMNS: gl.constexpr = s.shape[1] // 32
    if not TREE:
        return gl.max(s, 1)
    x = s.reshape([HALF, 2, 2, COLUMNS, 4, 2])
    x = gl.max(gl.max(gl.max(gl.max(x, 5), 1), 1), 1)
    return gl.convert_layout(gl.max(x, 1), gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def _softmax(s, m_i, l_i, offs_i, first, limits, to_log2, MASKED: gl.constexpr, TREE: gl.constexpr):
    sink, window = limits
    layout: gl.constexpr = s.type.layout
    if MASKED:
        offs_j = first + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
        near = offs_i[:, None] - offs_j[None, :] < window
        seen = (offs_j[None, :] <= offs_i[:, None]) & (near | (offs_j < sink)[None, :])
        s = gl.where(seen, s, float("-inf"))
    m_new = gl.maximum(m_i, _row_max(s, TREE) * to_log2)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
    p = gl.exp2(s * to_log2 - shift[:, None])
    alpha = gl.exp2(m_i - shift)
    l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout), assert_trivial=True)[
        :, None
    ] + _lane_sums(p)
    return p, m_new, l_i, alpha


@gluon.jit
def _before_wait(x):
    """`x` (never negative), with an ordering point at which it is known.

    The assembler hoists a wait for tensor cores over arithmetic that it does not order, which would end their overlap
    with the exponentials. It does not move the wait over a store, even one that never happens.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred negative;
        .reg .u32 address;
        mov.u32 address, 0;
        setp.lt.f32 negative, $1, 0f00000000;
        @negative st.shared.f32 [address], $1;
        mov.f32 $0, $1;
        }""",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _rescale(acc, alpha):
    """`acc * alpha` that leaves rows whose maximum did not change alone: most rows of most tiles."""
    acc, alpha = gl.broadcast(acc, alpha)
    return gl.inline_asm_elementwise(
        """{
        .reg .pred changed;
        setp.neu.f32 changed, $2, 0f3F800000;
        mov.f32 $0, $1;
        @changed mul.f32 $0, $1, $2;
        }""",
        "=f,f,f",
        [acc, alpha],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _step(
    t, first, acc, p, alpha, m_i, l_i, q, k_bufs, v_bufs, barriers, offs_i, limits, to_log2,
    WG: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr,
    s_layout: gl.constexpr, o_layout: gl.constexpr, COND: gl.constexpr,
):  # fmt: skip
    q_ready, k_ready, k_empty, v_ready, v_empty, turns = barriers
    HALF: gl.constexpr = q.shape[0]
    BLOCK_N: gl.constexpr = k_bufs.shape[3]
    HEAD_DIM: gl.constexpr = k_bufs.shape[4]
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    k_slot = t % STAGES
    v_slot = (t - 1) % STAGES
    mbarrier.wait(k_ready.index(k_slot), (t // STAGES) & 1)
    if PINGPONG:
        mbarrier.wait(turns.index(WG), (t & 1) ^ WG)
    k = k_bufs.index(k_slot).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
    zero = gl.zeros([HALF, BLOCK_N], gl.float32, s_layout)
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    # Rescaling and rounding hide behind the product of queries and keys.
    if COND:
        acc = _rescale(acc, gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None])
    else:
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
    mbarrier.wait(v_ready.index(v_slot), ((t - 1) // STAGES) & 1)
    v = v_bufs.index(v_slot).reshape([BLOCK_N, HEAD_DIM])
    acc = warpgroup_mma(gl.convert_layout(p.to(v.dtype), p_layout), v, acc, is_async=True)
    if PINGPONG:
        mbarrier.arrive(turns.index(1 - WG), count=1)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_empty.index(k_slot), count=1)
    p, m_i, l_i, alpha = _softmax(s, m_i, l_i, offs_i, first, limits, to_log2, MASKED, True)
    l_i = _before_wait(l_i)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(v_slot), count=1)
    return acc, p, alpha, m_i, l_i


@gluon.jit
def _write(acc, m_i, l_i, q_buf, where, num_rows, out, WG: gl.constexpr, STORE_LAYOUT: gl.constexpr):
    row, head, kv_head, q_first, base = where
    out_ptr, lse_ptr, stride_ob, stride_oh, stride_oq, stride_lb, stride_lh = out
    HALF: gl.constexpr = q_buf.shape[0]
    HEAD_DIM: gl.constexpr = q_buf.shape[1]
    rows_layout: gl.constexpr = m_i.type.layout
    o_layout: gl.constexpr = acc.type.layout
    l_i = gl.convert_layout(gl.sum(l_i, 1), rows_layout)
    offs_r = WG * HALF + gl.arange(0, HALF, rows_layout)
    lse_base = lse_ptr + row.to(gl.int64) * stride_lb + head.to(gl.int64) * stride_lh + q_first
    gl.store(lse_base + offs_r, (m_i + gl.log2(l_i)) * (1.0 / LOG2E), mask=offs_r < num_rows)
    # Queries are no longer needed: their buffer turns the output's rows into whole lines of memory.
    inverse = gl.convert_layout(1.0 / l_i, gl.SliceLayout(1, o_layout))
    q_buf.store((acc * inverse[:, None]).to(q_buf.dtype))
    o = q_buf.load(STORE_LAYOUT)
    offs_m = WG * HALF + gl.arange(0, HALF, gl.SliceLayout(1, STORE_LAYOUT))
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, STORE_LAYOUT))
    out_base = out_ptr + row.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh
    rows = (q_first + offs_m).to(gl.int64)[:, None] * stride_oq
    gl.store(out_base + rows + offs_d[None, :], o, mask=(offs_m < num_rows)[:, None])


@gluon.jit
def _consume(
    buffers, barriers, where, keys, limits, tile, out, WG: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr,
    HAS_SINKS: gl.constexpr, STORE_LAYOUT: gl.constexpr, COND: gl.constexpr,
):  # fmt: skip
    q_bufs, k_bufs, v_bufs = buffers
    q_ready, k_ready, k_empty, v_ready, v_empty, turns = barriers
    row, head, kv_head, q_first, base = where
    num_sink, num_low, window_begin, free_begin, free_end, num_masked, num_tiles = keys
    first_query, num_rows, to_log2, sink_logit = tile
    out_ptr, lse_ptr, stride_ob, stride_oh, stride_oq, stride_lb, stride_lh = out

    HALF: gl.constexpr = q_bufs.shape[3]
    BLOCK_N: gl.constexpr = k_bufs.shape[3]
    HEAD_DIM: gl.constexpr = k_bufs.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    rows_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    q_buf = q_bufs.index(WG).reshape([HALF, HEAD_DIM])
    offs_i = first_query + WG * HALF + gl.arange(0, HALF, rows_layout)
    if HAS_SINKS:
        m_i = gl.zeros([HALF], gl.float32, rows_layout) + sink_logit * LOG2E
        l_first = 0.25
    else:
        m_i = gl.full([HALF], float("-inf"), gl.float32, rows_layout)
        l_first = 0.0
    # A quarter of the sink in each of the four lanes of a row.
    l_i = _lane_sums(gl.zeros([HALF, BLOCK_N], gl.float32, s_layout)) + l_first
    acc = gl.zeros([HALF, HEAD_DIM], gl.float32, o_layout)

    mbarrier.wait(q_ready, 0)
    mbarrier.wait(k_ready.index(0), 0)
    k = k_bufs.index(0).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
    zero = gl.zeros([HALF, BLOCK_N], gl.float32, s_layout)
    s = warpgroup_mma(q_buf, k, zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(0), count=1)
    p, m_i, l_i, alpha = _softmax(s, m_i, l_i, offs_i, _first_key(0, keys, BLOCK_N), limits, to_log2, True, True)

    for t in range(1, num_masked):
        acc, p, alpha, m_i, l_i = _step(
            t, _first_key(t, keys, BLOCK_N), acc, p, alpha, m_i, l_i, q_buf, k_bufs, v_bufs, barriers, offs_i, limits,
            to_log2, WG, True, STAGES, PINGPONG, s_layout, o_layout, COND,
        )  # fmt: skip
    for t in range(num_masked, num_tiles):
        acc, p, alpha, m_i, l_i = _step(
            t, 0, acc, p, alpha, m_i, l_i, q_buf, k_bufs, v_bufs, barriers, offs_i, limits,
            to_log2, WG, False, STAGES, PINGPONG, s_layout, o_layout, COND,
        )  # fmt: skip

    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
    last = num_tiles - 1
    v_slot = last % STAGES
    mbarrier.wait(v_ready.index(v_slot), (last // STAGES) & 1)
    v = v_bufs.index(v_slot).reshape([BLOCK_N, HEAD_DIM])
    acc = warpgroup_mma(gl.convert_layout(p.to(v.dtype), p_layout), v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    _write(acc, m_i, l_i, q_buf, where, num_rows, out, WG, STORE_LAYOUT)


@gluon.jit
def _serial_step(
    t, first, acc, m_i, l_i, q, k_bufs, v_bufs, barriers, offs_i, limits, to_log2,
    MASKED: gl.constexpr, STAGES: gl.constexpr, s_layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    q_ready, k_ready, k_empty, v_ready, v_empty, turns = barriers
    HALF: gl.constexpr = q.shape[0]
    BLOCK_N: gl.constexpr = k_bufs.shape[3]
    HEAD_DIM: gl.constexpr = k_bufs.shape[4]
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    slot = t % STAGES
    phase = (t // STAGES) & 1
    mbarrier.wait(k_ready.index(slot), phase)
    k = k_bufs.index(slot).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
    zero = gl.zeros([HALF, BLOCK_N], gl.float32, s_layout)
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(slot), count=1)
    p, m_i, l_i, alpha = _softmax(s, m_i, l_i, offs_i, first, limits, to_log2, MASKED, True)
    acc = _rescale(acc, gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None])
    mbarrier.wait(v_ready.index(slot), phase)
    v = v_bufs.index(slot).reshape([BLOCK_N, HEAD_DIM])
    acc = warpgroup_mma(gl.convert_layout(p.to(v.dtype), p_layout), v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(slot), count=1)
    return acc, m_i, l_i


@gluon.jit
def _consume_serial(
    buffers, barriers, where, keys, limits, tile, out, WG: gl.constexpr, STAGES: gl.constexpr,
    HAS_SINKS: gl.constexpr, STORE_LAYOUT: gl.constexpr,
):  # fmt: skip
    q_bufs, k_bufs, v_bufs = buffers
    q_ready, k_ready, k_empty, v_ready, v_empty, turns = barriers
    num_sink, num_low, window_begin, free_begin, free_end, num_masked, num_tiles = keys
    first_query, num_rows, to_log2, sink_logit = tile
    HALF: gl.constexpr = q_bufs.shape[3]
    BLOCK_N: gl.constexpr = k_bufs.shape[3]
    HEAD_DIM: gl.constexpr = k_bufs.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    q_buf = q_bufs.index(WG).reshape([HALF, HEAD_DIM])
    offs_i = first_query + WG * HALF + gl.arange(0, HALF, rows_layout)
    if HAS_SINKS:
        m_i = gl.zeros([HALF], gl.float32, rows_layout) + sink_logit * LOG2E
        l_first = 0.25
    else:
        m_i = gl.full([HALF], float("-inf"), gl.float32, rows_layout)
        l_first = 0.0
    l_i = _lane_sums(gl.zeros([HALF, BLOCK_N], gl.float32, s_layout)) + l_first
    acc = gl.zeros([HALF, HEAD_DIM], gl.float32, o_layout)
    mbarrier.wait(q_ready, 0)
    for t in range(0, num_masked):
        acc, m_i, l_i = _serial_step(
            t, _first_key(t, keys, BLOCK_N), acc, m_i, l_i, q_buf, k_bufs, v_bufs, barriers, offs_i, limits,
            to_log2, True, STAGES, s_layout, o_layout,
        )  # fmt: skip
    for t in range(num_masked, num_tiles):
        acc, m_i, l_i = _serial_step(
            t, 0, acc, m_i, l_i, q_buf, k_bufs, v_bufs, barriers, offs_i, limits,
            to_log2, False, STAGES, s_layout, o_layout,
        )  # fmt: skip
    _write(acc, m_i, l_i, q_buf, where, num_rows, out, WG, STORE_LAYOUT)


@gluon.jit
def _heavy_first_tile(
    pid, tiles, num_units, gate_ptr, stride_gn, stride_gh, num_kv_heads, GROUP: gl.constexpr, BLOCK_G: gl.constexpr
):
    layout: gl.constexpr = (
        gl.BlockedLayout([BLOCK_G // 32], [32], [gl.num_warps()], [0])
        if BLOCK_G > 32
        else gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    )
    offs = gl.arange(0, BLOCK_G, layout)
    entries = num_units // GROUP
    gate = gl.load(
        gate_ptr + (offs // num_kv_heads).to(gl.int64) * stride_gn + offs % num_kv_heads * stride_gh,
        mask=offs < entries,
        other=1,
    )
    retrieval = ((gate == 0) & (offs < entries)).to(gl.int32)
    before = gl.associative_scan(retrieval, 0, _add) - retrieval
    total = gl.sum(retrieval, 0)
    rank = pid // (tiles * GROUP)
    among = pid % (tiles * GROUP)
    place = gl.where(retrieval != 0, before, total + offs - before)
    entry = gl.sum(gl.where((place == rank) & (offs < entries), offs, 0), 0)
    return entry // num_kv_heads, entry % num_kv_heads * GROUP + among % GROUP, tiles - 1 - among // GROUP


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _routed_attention_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, gate_ptr, start_ptr, sinks_ptr, out_ptr, lse_ptr,
    stride_gn, stride_gh, stride_ob, stride_oh, stride_oq, stride_lb, stride_lh,
    num_sequences, num_kv_heads, q_length, k_length, sink_size, window_size, scale,
    GROUP: gl.constexpr, HAS_START: gl.constexpr, HAS_SINKS: gl.constexpr, BLOCK_G: gl.constexpr,
    STAGES: gl.constexpr, PINGPONG: gl.constexpr, STORE_LAYOUT: gl.constexpr, REGS: gl.constexpr,
    NARROW: gl.constexpr, COND: gl.constexpr, WGS: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = q_desc.block_type.shape[2]
    BLOCK_M: gl.constexpr = WGS * HALF
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    HEAD_DIM: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    sequence, head, tile = _heavy_first_tile(
        gl.program_id(0), gl.cdiv(q_length, BLOCK_M), num_sequences * num_kv_heads * GROUP, gate_ptr,
        stride_gn, stride_gh, num_kv_heads, GROUP, BLOCK_G,
    )  # fmt: skip
    row = sequence
    base = 0
    if HAS_START:
        base = gl.load(start_ptr + row).to(gl.int32)
    length = k_length - base
    num_queries = gl.minimum(q_length, length)
    q_base = q_length - num_queries
    kv_head = head // GROUP
    if HAS_START:
        zero_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
        offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, zero_layout))
        out_z = out_ptr + row.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh
        lse_z = lse_ptr + row.to(gl.int64) * stride_lb + head.to(gl.int64) * stride_lh
        zeros = gl.zeros([HALF, HEAD_DIM], dtype, zero_layout)
        for i in gl.static_range(WGS):
            offs_z = tile * BLOCK_M + i * HALF + gl.arange(0, HALF, gl.SliceLayout(1, zero_layout))
            gl.store(
                out_z + offs_z.to(gl.int64)[:, None] * stride_oq + offs_d[None, :],
                zeros,
                mask=(offs_z < q_base)[:, None],
            )
            gl.store(
                lse_z + offs_z, gl.full([HALF], float("-inf"), gl.float32, offs_z.type.layout), mask=offs_z < q_base
            )

    num_rows = num_queries - tile * BLOCK_M
    streaming = gl.load(gate_ptr + sequence.to(gl.int64) * stride_gn + kv_head * stride_gh) != 0
    window = gl.where(streaming, window_size, UNBOUNDED)
    sink = gl.where(streaming, sink_size, 0)
    first_query = length - num_queries + tile * BLOCK_M
    last_query = gl.minimum(first_query + BLOCK_M, length) - 1
    free_end = first_query - first_query % BLOCK_N
    window_begin = first_query + 1 - gl.minimum(window, first_query + 1)
    window_begin = gl.minimum(window_begin - window_begin % BLOCK_N, free_end)
    free_begin = gl.minimum(gl.cdiv(last_query + 1 - gl.minimum(window, last_query + 1), BLOCK_N) * BLOCK_N, free_end)
    num_sink = gl.cdiv(gl.minimum(sink, window_begin), BLOCK_N)
    num_low = (free_begin - window_begin) // BLOCK_N
    num_masked = num_sink + num_low + gl.cdiv(last_query + 1 - free_end, BLOCK_N)
    num_tiles = num_masked + (free_end - free_begin) // BLOCK_N
    # A tile of nothing but padding folds one tile of keys and stores nothing.
    num_masked = gl.where(num_rows > 0, num_masked, 1)
    num_tiles = gl.where(num_rows > 0, num_tiles, 1)

    q_bufs = gl.allocate_shared_memory(dtype, [WGS, 1, 1, HALF, HEAD_DIM], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], v_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=WGS)
        mbarrier.init(v_empty.index(i), count=WGS)

    sink_logit = 0.0
    if HAS_SINKS:
        sink_logit = gl.load(sinks_ptr + head).to(gl.float32)
    buffers = (q_bufs, k_bufs, v_bufs)
    barriers = (q_ready, k_ready, k_empty, v_ready, v_empty, turns)
    where = (row, head, kv_head, q_base + tile * BLOCK_M, base)
    keys = (num_sink, num_low, window_begin, free_begin, free_end, num_masked, num_tiles)
    limits = (sink, window)
    tile_args = (first_query, num_rows, scale * LOG2E, sink_logit)
    out = (out_ptr, lse_ptr, stride_ob, stride_oh, stride_oq, stride_lb, stride_lh)
    if NARROW:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        buffers,
                        barriers,
                        where,
                        keys,
                        limits,
                        tile_args,
                        out,
                        gl.constexpr(0),
                        STAGES,
                        PINGPONG,
                        HAS_SINKS,
                        STORE_LAYOUT,
                        COND,
                    ),
                ),
                (
                    _consume,
                    (
                        buffers,
                        barriers,
                        where,
                        keys,
                        limits,
                        tile_args,
                        out,
                        gl.constexpr(1),
                        STAGES,
                        PINGPONG,
                        HAS_SINKS,
                        STORE_LAYOUT,
                        COND,
                    ),
                ),
                (_produce, ((q_desc, k_desc, v_desc), buffers, barriers, where, keys, BLOCK_N, STAGES)),
            ],
            [4, 1],
            [REGS, 24],
        )
    elif WGS == 3:
        gl.warp_specialize(
            [
                (_produce, ((q_desc, k_desc, v_desc), buffers, barriers, where, keys, BLOCK_N, STAGES)),
                (
                    _consume_serial,
                    (
                        buffers,
                        barriers,
                        where,
                        keys,
                        limits,
                        tile_args,
                        out,
                        gl.constexpr(0),
                        STAGES,
                        HAS_SINKS,
                        STORE_LAYOUT,
                    ),
                ),
                (
                    _consume_serial,
                    (
                        buffers,
                        barriers,
                        where,
                        keys,
                        limits,
                        tile_args,
                        out,
                        gl.constexpr(1),
                        STAGES,
                        HAS_SINKS,
                        STORE_LAYOUT,
                    ),
                ),
                (
                    _consume_serial,
                    (
                        buffers,
                        barriers,
                        where,
                        keys,
                        limits,
                        tile_args,
                        out,
                        gl.constexpr(2),
                        STAGES,
                        HAS_SINKS,
                        STORE_LAYOUT,
                    ),
                ),
            ],
            [4, 4, 4],
            [REGS, REGS, REGS],
        )
    else:
        gl.warp_specialize(
            [
                (_produce, ((q_desc, k_desc, v_desc), buffers, barriers, where, keys, BLOCK_N, STAGES)),
                (
                    _consume,
                    (
                        buffers,
                        barriers,
                        where,
                        keys,
                        limits,
                        tile_args,
                        out,
                        gl.constexpr(0),
                        STAGES,
                        PINGPONG,
                        HAS_SINKS,
                        STORE_LAYOUT,
                        COND,
                    ),
                ),
                (
                    _consume,
                    (
                        buffers,
                        barriers,
                        where,
                        keys,
                        limits,
                        tile_args,
                        out,
                        gl.constexpr(1),
                        STAGES,
                        PINGPONG,
                        HAS_SINKS,
                        STORE_LAYOUT,
                        COND,
                    ),
                ),
            ],
            [4, 4],
            [REGS, REGS],
        )


def routed_attention_forward_hopper(
    query,
    key,
    value,
    gate,
    *,
    sink_size,
    window_size,
    start=None,
    sinks=None,
    scale,
    block_n=128,
    stages=2,
    pingpong=True,
    regs=240,
    maxnreg=168,
    narrow=False,
    cond=True,
    wgs=2,
):
    batch, num_heads, q_length, head_dim = query.shape
    _, num_kv_heads, k_length, _ = key.shape
    dtype = gl.bfloat16 if query.dtype == torch.bfloat16 else gl.float16

    def descriptor(x, rows):
        block = [1, 1, rows, head_dim]
        layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
        return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)

    out = torch.empty_like(query)
    lse = torch.empty(batch, num_heads, q_length, dtype=torch.float32, device=query.device)
    lanes = head_dim // 8
    _routed_attention_fwd_hopper_kernel[(triton.cdiv(q_length, 64 * wgs) * batch * num_heads,)](
        descriptor(query, 64),
        descriptor(key, block_n),
        descriptor(value, block_n),
        gate,
        start,
        sinks,
        out,
        lse,
        *gate.stride(),
        *out.stride()[:3],
        *lse.stride()[:2],
        batch,
        num_kv_heads,
        q_length,
        k_length,
        sink_size,
        window_size,
        scale,
        GROUP=num_heads // num_kv_heads,
        HAS_START=start is not None,
        HAS_SINKS=sinks is not None,
        BLOCK_G=triton.next_power_of_2(batch * num_kv_heads),
        STAGES=stages,
        PINGPONG=pingpong,
        STORE_LAYOUT=gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0]),
        REGS=regs,
        NARROW=narrow,
        COND=cond,
        WGS=wgs,
        num_warps=4,
        maxnreg=maxnreg,
    )
    return out, lse
