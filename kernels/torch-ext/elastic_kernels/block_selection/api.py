"""`block_selection`: checks its arguments once and runs an implementation."""

from torch import Tensor

from .._validation import check_heads, check_positive, check_sequences
from .kept_blocks import KeptBlocks
from .reference import block_selection_reference


def block_selection(
    query: Tensor,
    key: Tensor,
    *,
    block_size: int = 128,
    stride: int = 16,
    threshold: float = 0.9,
    start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> KeptBlocks:
    """The fewest key blocks that hold `threshold` of each query block's estimated attention, per query head.

    Tokens are cut into groups of `stride`. Query group a scores key group b by the sum along the antidiagonal,
    `scale / stride * sum_s q[a * stride + stride - 1 - s] . k[b * stride + s]`; a causal softmax over the key groups
    and a sum inside each block pair give the block scores. The first block and the diagonal block are always kept and
    count towards the threshold; the others join from the highest score down, the lower block first among equals.

    Args:
        query: `[B, Hq, Q, D]`; with Q < K the queries sit at the end of the keys and begin on a block boundary.
        key: `[B, Hkv, K, D]`, query's dtype; Hq is a multiple of Hkv.
        block_size: tokens a block, a multiple of `stride`.
        stride: tokens a group.
        threshold: share of a query block's total score to reach, in (0, 1].
        start: int32 or int64 `[B]`, first valid key of each row (left padding); blocks count from there.
        cu_seqlens: int32 or int64 `[N + 1]`, bounds of packed segments in the flattened `B * K` tokens, none crossing
            a row; needs Q == K.
        scale: factor of the scores, `D ** -0.5` by default.

    Returns:
        `KeptBlocks` for the B rows or the N segments. A query block's row does not depend on later tokens outside it,
        so a chunk that ends on a block boundary keeps what the whole keeps.

    Raises:
        ValueError: an argument that breaks a rule above.

    Numerics:
        Scores and softmax in float32 (float64 for float64 inputs). A last group of fewer than `stride` tokens is
        filled with zeros: the missing tokens add nothing to a score, and the group counts as one row and one column.
        Not differentiated.

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
    check_sequences(query, key, start, cu_seqlens)
    return block_selection_reference(
        query,
        key,
        block_size=block_size,
        stride=stride,
        threshold=threshold,
        start=start,
        cu_seqlens=cu_seqlens,
        scale=scale,
    )
