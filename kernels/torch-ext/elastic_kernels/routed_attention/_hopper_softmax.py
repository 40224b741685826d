"""Steps of the online softmax in the registers of one warp group, in Gluon, for the Hopper prefill kernel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _row_max(s):
    """Maximum of each row, as a tree: one after the other, a lane's 32 columns would be a long chain."""
    ROWS: gl.constexpr = s.shape[0]
    COLUMNS: gl.constexpr = s.shape[1] // 32
    x = s.reshape([ROWS, 2, 2, COLUMNS, 4, 2])
    x = gl.max(gl.max(gl.max(gl.max(x, 5), 1), 1), 1)
    return gl.convert_layout(gl.max(x, 1), gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def lane_sums(p):
    """Sums of each row over the columns that one lane holds, `[rows, 4]`: four lanes share a row."""
    x = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(x, 3), 1)


@gluon.jit
def _mask(s, offs_i, last_sink, window):
    """-inf for keys beyond the window and the sink; positions count from the tile's first key.

    As unsigned numbers distances to later keys are beyond any window. Written out because the compiler packs the
    conditions of many elements into words, which costs more than all other steps of the softmax.
    """
    offs_n = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return gl.inline_asm_elementwise(
        """{
        .reg .pred seen;
        .reg .u32 distance;
        sub.u32 distance, $2, $3;
        setp.lt.u32 seen, distance, $5;
        setp.le.or.s32 seen, $3, $4, seen;
        selp.f32 $0, $1, 0fFF800000, seen;
        }""",
        "=f,f,r,r,r,r",
        [s, offs_i[:, None], offs_n[None, :], last_sink[:, None], window],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def softmax(s, m_i, l_i, offs_i, first_key, limits, to_log2, MASKED: gl.constexpr):
    """Folds a tile of scores into the running maximum (in log2) and the lanes' sums; the factor of older terms too."""
    sink, window = limits
    if MASKED:
        s = _mask(s, offs_i - first_key, gl.minimum(sink - 1, offs_i) - first_key, window)
    m_new = gl.maximum(m_i, _row_max(s) * to_log2)
    # A row that has seen no key yet keeps -inf as its maximum; subtracting it would give NaN.
    shift = gl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
    p = gl.exp2(s * to_log2 - shift[:, None])
    alpha = gl.exp2(m_i - shift)
    lane_alpha = gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout), assert_trivial=True)
    return p, m_new, l_i * lane_alpha[:, None] + lane_sums(p), alpha


@gluon.jit
def rescale(acc, alpha):
    """`acc * alpha`, idle in rows whose maximum did not change: most rows of most tiles."""
    acc, alpha = gl.broadcast(acc, gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None])
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
def settled(x):
    """`x` (never negative), computed before anything that follows.

    The assembler hoists a wait for the tensor cores over arithmetic, which would end their overlap with the softmax.
    It does not hoist it over a store, even one that never happens.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred negative;
        .reg .u32 nowhere;
        mov.u32 nowhere, 0;
        setp.lt.f32 negative, $1, 0f00000000;
        @negative st.shared.f32 [nowhere], $1;
        mov.f32 $0, $1;
        }""",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )
