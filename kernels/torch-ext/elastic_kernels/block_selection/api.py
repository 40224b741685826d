"""`block_selection`: checks its arguments once and runs an implementation."""

from typing import Any

import torch
from torch import Tensor

from .._implementations import choose, is_opaque, kernel_obstacle
from .._validation import check_device, check_heads, check_positive, check_sequences, contiguous
from .kept_blocks import KeptBlocks
from .reference import block_selection_reference


_MAX_STRIDES_PER_BLOCK = 128


def block_selection(
    query: Tensor,
    key: Tensor,
    *,
    heads: Tensor | None = None,
    block_size: int = 128,
    stride: int = 16,
    threshold: float = 0.9,
    start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> KeptBlocks:
    """The fewest key blocks that hold `threshold` of each query block's estimated attention, per query head.

    Tokens are cut into groups of `stride`. Query group a scores key group b by the sum along the antidiagonal,
    `scale / stride * sum_s q[a * stride + stride - 1 - s] . k[b * stride + s]`; a causal softmax over the key groups
    and a sum inside each block pair give the block scores. The first block and the diagonal block are always kept and
    count towards the threshold; the others join from the highest score down, the lower block first among equals.

    Args:
        query: `[B, Hq, Q, D]`; with Q < K the queries sit at the end of the keys and begin on a block boundary.
        key: `[B, Hkv, K, D]`, query's dtype; Hq is a multiple of Hkv.
        heads: bool `[N, Hkv]`, key-value heads whose blocks are wanted, for N = B rows or packed segments; the others
            keep none and cost nothing. All by default.
        block_size: tokens a block, a multiple of `stride`.
        stride: tokens a group.
        threshold: share of a query block's total score to reach, in (0, 1].
        start: int32 or int64 `[B]`, first valid key of each row (left padding); blocks count from there.
        cu_seqlens: int32 or int64 `[N + 1]`, bounds of packed segments in the flattened `B * K` tokens, none crossing
            a row; needs Q == K.
        scale: factor of the scores, `D ** -0.5` by default.
        implementation: None to choose, or `"reference"` (plain torch, any device) or `"triton"` (one fused kernel); a
            named one never gives way to another.

    Returns:
        `KeptBlocks` for the B rows or the N segments, with room for all Q queries and K keys in each. A query block's
        row does not depend on later tokens outside it, so a chunk that ends on a block boundary keeps what the whole
        keeps.

    Raises:
        ValueError: an argument that breaks a rule above. Where `start` decides whether queries begin on a block
            boundary, only the reference checks it: the fused kernel does not wait for the device, and treats a row
            that breaks the rule as though its queries sat at the boundary before.

    Numerics:
        Scores, softmax and sums in float32 (float64 for float64 inputs); a block whose score lies within rounding of
        the others at the threshold may be kept by one implementation and not by the other. A last group of fewer than
        `stride` tokens is filled with zeros: the missing tokens add nothing to a score, and the group counts as one
        row and one column. Not differentiated.

    Source:
        Xu et al., XAttention: Block Sparse Attention with Antidiagonal Scoring, arXiv 2503.16428.
    """
    check_heads(query, key)
    check_positive("stride", stride)
    check_positive("block_size", block_size)
    if block_size % stride:
        raise ValueError(f"`block_size` must be a multiple of `stride` {stride}, got {block_size}.")
    if not 0 < threshold <= 1:
        raise ValueError(f"`threshold` must be above 0 and at most 1, got {threshold}.")
    sequences = check_sequences(query, key, start, cu_seqlens)
    offset = key.shape[2] - query.shape[2]
    if start is None and offset % block_size:
        raise ValueError(f"`query` must begin on a block of {block_size} tokens, got an offset of {offset}.")
    if heads is not None:
        check_device("heads", heads, query)
        if heads.shape != (sequences, key.shape[1]) or heads.dtype != torch.bool:
            raise ValueError(
                f"`heads` must be bool [sequences, key-value heads] = {(sequences, key.shape[1])}, "
                f"got {heads.dtype} {tuple(heads.shape)}."
            )
    start, cu_seqlens = contiguous(start, cu_seqlens)
    options: dict[str, Any] = {
        "heads": heads,
        "block_size": block_size,
        "stride": stride,
        "threshold": threshold,
        "start": start,
        "cu_seqlens": cu_seqlens,
        "scale": scale,
    }
    if is_opaque(()):
        from .._compiled import block_selection_op

        return block_selection_op(query.detach(), key.detach(), implementation=implementation, **options)
    chosen = choose(implementation, query.device, lambda: _obstacle(query, block_size, stride))
    select = _triton if chosen == "triton" else block_selection_reference
    return select(query, key, **options)


def _triton(*inputs, **options) -> KeptBlocks:
    from .forward import block_selection_forward

    return block_selection_forward(*inputs, **options)


def _obstacle(query: Tensor, block_size: int, stride: int) -> str | None:
    """Why the fused kernel cannot compute the call, None if it can."""
    obstacle = kernel_obstacle([query])
    if obstacle is not None:
        return obstacle
    # Without tensor cores Triton 3.6 compiles a kernel that adds up the wrong columns.
    if query.is_cuda and query.dtype == torch.float32:
        return "it takes fp16 and bf16 on a GPU, not torch.float32"
    if block_size & block_size - 1 or stride & stride - 1 or not 2 <= block_size // stride <= _MAX_STRIDES_PER_BLOCK:
        return (
            f"it takes powers of two and 2 to {_MAX_STRIDES_PER_BLOCK} strides a block, "
            f"not blocks of {block_size} and strides of {stride}"
        )
    return None
