"""`routed_attention`: checks its arguments once and runs an implementation."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._implementations import is_opaque
from .._validation import (
    check_device,
    check_heads,
    check_like,
    check_positive,
    check_scores,
    check_sequences,
    contiguous,
)
from ..block_selection import KeptBlocks
from .autograd import differentiable
from .counterfactual import sample_tiles
from .dispatch import choose_implementation
from .reference import routed_attention_reference


MODE_PAIRS = ("FA-SSA", "FA-XA", "XA-SSA")


def routed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    *,
    mode_pair: str,
    sink_size: int,
    window_size: int,
    start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    kept_blocks: KeptBlocks | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    counterfactual_fraction: float = 1.0,
    counterfactual_noise: Tensor | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention in which every key-value head of every sequence runs one of two modes.

    The mode pair `{retrieval}-{sparse}` names them: FA attends everything, SSA a sink and a local window, XA the kept
    blocks. A gate of 0 runs the retrieval mode, 1 the sparse mode, for all query heads of the group.

    Args:
        query: `[B, Hq, Q, D]`, fp16, bf16, fp32 or fp64; with Q < K the queries sit at the end of the keys.
        key: `[B, Hkv, K, D]`, query's dtype; Hq is a multiple of Hkv.
        value: `[B, Hkv, K, D]`, query's dtype.
        gate: `[N, Hkv]`, exactly 0 or 1, N = B rows or packed segments; bool or int, or float to receive a gradient.
        mode_pair: `"FA-SSA"`, `"FA-XA"` or `"XA-SSA"`.
        sink_size: tokens at the beginning of a sequence that SSA attends, at least 0.
        window_size: tokens up to and including the query that SSA attends, at least 1.
        start: int32 or int64 `[B]`, first valid key of each row (left padding).
        cu_seqlens: int32 or int64 `[N + 1]`, bounds of packed segments in the flattened `B * K` tokens, none crossing
            a row; needs Q == K.
        kept_blocks: what `block_selection` returned; given exactly when the pair has XA.
        softcap: scores become `softcap * tanh(scores / softcap)` before masking.
        sinks: floating point `[Hq]`, a logit per head that joins the softmax's denominator and has no value.
        scale: factor of the scores, `D ** -0.5` by default.
        counterfactual_fraction: share `1 / n` of tiles of 128 queries for which the mode that a head does not run is
            computed where the gate needs a gradient, which is then an unbiased estimate; 1 = all.
        counterfactual_noise: float32 `[N, Hkv, U]` in [0, 1), the sample at a fraction below 1: tile `floor(n * u)` of
            every `n` tiles from a sequence's first query on; U is at least Q / (128 n), rounded up.
        return_lse: also return the log of the softmax's denominator.
        implementation: None to choose, or `"reference"` (plain torch, any device), `"triton"` or `"hopper"` (fused
            kernels); a named one never gives way to another.

    Returns:
        The output `[B, Hq, Q, D]` in query's dtype, zero for padded queries. With `return_lse`, also `[B, Hq, Q]` in
        float32 (float64 for float64 inputs): the log-denominator of the selected mode, the sink's term included, -inf
        for padded queries, without gradient.

    Raises:
        ValueError: an argument that breaks a rule above.

    Numerics:
        Scores, softmax and sums in float32 (float64 for float64 inputs). Query, key, value and sinks receive gradients
        through the selected mode only; a float gate receives the inner product of the output's gradient with the
        sparse minus the retrieval output, summed over its query heads, its sequence's tokens and the dimensions; of
        sampled tiles it is `n` times the sum over these.
    """
    if mode_pair not in MODE_PAIRS:
        raise ValueError(f"`mode_pair` must be one of {', '.join(MODE_PAIRS)}, got {mode_pair!r}.")
    check_heads(query, key)
    check_like("value", value, query)
    if value.shape != key.shape:
        raise ValueError(f"`value` must have key's shape {tuple(key.shape)}, got {tuple(value.shape)}.")
    check_positive("sink_size", sink_size, minimum=0)
    check_positive("window_size", window_size)
    sequences = check_sequences(query, key, start, cu_seqlens)
    check_device("gate", gate, query)
    if gate.shape != (sequences, key.shape[1]):
        raise ValueError(
            f"`gate` must be [sequences, key-value heads] = {(sequences, key.shape[1])}, got {tuple(gate.shape)}."
        )
    if gate.is_complex():
        raise ValueError(f"`gate` must be bool, integer or floating point, got {gate.dtype}.")
    _check_kept_blocks(kept_blocks, mode_pair, sequences, query, key)
    check_scores(softcap, sinks, query)
    sampled = sample_tiles(counterfactual_fraction, counterfactual_noise, gate, query.shape[2])
    start, cu_seqlens, sinks = contiguous(start, cu_seqlens, sinks)
    kept_blocks = None if kept_blocks is None else kept_blocks.contiguous()
    options: dict[str, Any] = {
        "mode_pair": mode_pair,
        "sink_size": sink_size,
        "window_size": window_size,
        "start": start,
        "cu_seqlens": cu_seqlens,
        "kept_blocks": kept_blocks,
        "softcap": softcap,
        "sinks": sinks,
        "scale": query.shape[3] ** -0.5 if scale is None else scale,
    }
    if is_opaque((query, key, value, gate, sinks)):
        from .._compiled import routed_attention_op

        options |= {"return_lse": return_lse, "implementation": implementation}
        return routed_attention_op(query, key, value, gate, **options)
    chosen = choose_implementation(implementation, query, key, value, kept_blocks=kept_blocks, softcap=softcap)
    if chosen == "reference":
        output, lse = routed_attention_reference(query, key, value, gate, sampled=sampled, **options)
    else:
        options |= {"with_lse": return_lse, "sampled": sampled}
        output, lse = differentiable(_launcher(chosen), query, key, value, gate, **options)
    return (output, lse) if return_lse else output


def _launcher(implementation: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    if implementation == "hopper":
        from .forward_hopper import routed_attention_forward_hopper

        return routed_attention_forward_hopper
    from .forward import routed_attention_forward

    return routed_attention_forward


def _check_kept_blocks(
    kept_blocks: KeptBlocks | None, mode_pair: str, sequences: int, query: Tensor, key: Tensor
) -> None:
    if "XA" not in mode_pair:
        if kept_blocks is not None:
            raise ValueError(f"`kept_blocks` must be None for a pair without XA, got one with {mode_pair}.")
        return
    if kept_blocks is None:
        raise ValueError(f"`kept_blocks` must be given for a pair with XA, got None with {mode_pair}.")
    check_device("kept_blocks", kept_blocks.indices, query)
    if kept_blocks.indices.shape[:2] != (sequences, query.shape[1]):
        raise ValueError(
            f"`kept_blocks` must be for {sequences} sequences and {query.shape[1]} query heads, "
            f"got lists of shape {tuple(kept_blocks.indices.shape)}."
        )
    needed = tuple(-(-tensor.shape[2] // kept_blocks.block_size) for tensor in (query, key))
    if any(held < blocks for held, blocks in zip(kept_blocks.indices.shape[2:], needed)):
        raise ValueError(
            f"`kept_blocks` must have room for {needed} blocks of queries and keys, "
            f"got {tuple(kept_blocks.indices.shape[2:])}."
        )
