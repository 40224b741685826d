"""Steps that the kernels of the backward share."""

import triton
import triton.language as tl

from .._primitives import soft_cap


_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(rows, present, offs_d, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """Loads the rows at `rows` `[R, D]`; those not `present` and the channels beyond `HEAD_DIM` are zero."""
    even_d: tl.constexpr = offs_d.shape[0] == HEAD_DIM
    if MASKED:
        tile = tl.load(rows, mask=present[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    elif even_d:
        tile = tl.load(rows)
    else:
        tile = tl.load(rows, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
    return tile


@triton.jit
def probabilities(s, lse, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """`exp(scores - lse)`, with `lse` in log2, and the derivative of the scores by `scale * q k^T`."""
    if HAS_SOFTCAP:
        s = soft_cap(s * scale, softcap)
        p = tl.exp2(s * _LOG2E - lse)
        slope = 1.0 - (s / softcap) * (s / softcap)
    else:
        p = tl.exp2(s * (scale * _LOG2E) - lse)
        slope = 1.0
    return p, slope


@triton.jit
def seen(offs_i, offs_j, sink_size, window_size):
    """Whether queries at `offs_i` attend keys at `offs_j`, causally within the window or the sink."""
    # As unsigned numbers distances to later keys are beyond any window.
    distance = (offs_i - offs_j).to(tl.uint32, bitcast=True)
    return (distance < window_size.to(tl.uint32)) | (offs_j <= tl.minimum(sink_size - 1, offs_i))
