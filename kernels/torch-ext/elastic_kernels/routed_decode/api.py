"""`routed_decode`: checks its arguments once and runs an implementation."""

from typing import Any

from torch import Tensor

from .._implementations import choose, gradient_obstacle, is_opaque, kernel_obstacle
from .._validation import (
    INTEGER_DTYPES,
    check_device,
    check_heads,
    check_like,
    check_positive,
    check_scores,
    check_sequences,
)
from .reference import routed_decode_reference
from .storage import RaggedRows


MAX_QUERIES = 8


def routed_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    *,
    sink_size: int,
    window_size: int,
    start: Tensor | None = None,
    length: Tensor | None = None,
    storage: RaggedRows | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a sequence's newest tokens over its cache, each key-value head full or streaming.

    Query i attends key j <= i; where its head streams, only if `j < sink_size or i - j < window_size`, counted from
    the sequence's first valid token. The queries are the newest tokens, and the cache holds them already.

    Args:
        query: `[B, Hq, Q, D]`, fp16, bf16, fp32 or fp64, Q from 1 to 8.
        key: `[B, Hkv, K, D]`, or with `storage` flat `[T, D]`; query's dtype, any strides that leave D contiguous;
            Hq is a multiple of Hkv.
        value: key's shape and dtype, likewise.
        gate: bool or int `[B, Hkv]` on query's device, 0 = full, 1 = streaming.
        sink_size: tokens at the beginning of a sequence that a streaming head attends, at least 0.
        window_size: tokens up to and including the query that it attends, at least 1.
        start: int32 or int64 `[B]`, first valid key of each row (left padding).
        length: int32 or int64 `[B]` or `[]` on query's device, slots of each row that are filled, padding included,
            at most K; all by default. The launch does not depend on its value.
        storage: where each entry lies in flat keys and values; excludes `start` and `length`.
        softcap: scores become `softcap * tanh(scores / softcap)` before masking.
        sinks: floating point `[Hq]`, a logit per head that joins the softmax's denominator and has no value.
        scale: factor of the scores, `D ** -0.5` by default.
        return_lse: also return the log of the softmax's denominator.
        implementation: None to choose by shapes, dtypes and device, or `"reference"` (plain torch, any device) or
            `"triton"` (fused kernels, forward only); a named one never gives way to another.

    Returns:
        The output `[B, Hq, Q, D]` in query's dtype, zero for queries before a sequence's first token. With
        `return_lse`, also `[B, Hq, Q]` in float32 (float64 for float64 inputs), the sink's term included, -inf for
        those queries, without gradient.

    Raises:
        ValueError: an argument that breaks a rule above.

    Numerics:
        Scores, softmax and sums in float32 (float64 for float64 inputs). The fused kernels split the keys among
        programs and add the parts in a fixed order: results repeat bit by bit on one kind of device.
    """
    _check_keys(query, key, value, storage)
    batch = query.shape[0]
    kv_heads = key.shape[1] if storage is None else storage.offsets.shape[1]
    if not 1 <= query.shape[2] <= MAX_QUERIES:
        raise ValueError(f"`query` must hold 1 to {MAX_QUERIES} tokens, got {query.shape[2]}.")
    check_positive("sink_size", sink_size, minimum=0)
    check_positive("window_size", window_size)
    check_device("gate", gate, query)
    if gate.shape != (batch, kv_heads):
        raise ValueError(
            f"`gate` must be [batch, key-value heads] = {(batch, kv_heads)}, got shape {tuple(gate.shape)}."
        )
    if gate.is_floating_point() or gate.is_complex():
        raise ValueError(f"`gate` must be bool or integer, got {gate.dtype}.")
    if storage is None:
        check_sequences(query, key, start, None)
        _check_length(length, query)
    else:
        _check_storage(storage, query, window_size, start, length)
    check_scores(softcap, sinks, query)
    options: dict[str, Any] = {
        "sink_size": sink_size,
        "window_size": window_size,
        "start": start,
        "length": length,
        "storage": storage,
        "softcap": softcap,
        "sinks": sinks,
        "scale": query.shape[3] ** -0.5 if scale is None else scale,
    }
    if is_opaque((query, key, value, sinks)):
        from .._compiled import routed_decode_op

        options |= {"return_lse": return_lse, "implementation": implementation}
        return routed_decode_op(query, key, value, gate, **options)
    if choose_implementation(implementation, query, key, value, sinks) == "reference":
        output, lse = routed_decode_reference(query, key, value, gate, **options)
    else:
        from .forward import routed_decode_forward

        output, lse = routed_decode_forward(query, key, value, gate, **options)
    return (output, lse) if return_lse else output


def choose_implementation(
    implementation: str | None, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
) -> str:
    """What computes a call of `routed_decode`, whose arguments these are."""
    tensors = (query, key, value) if sinks is None else (query, key, value, sinks)

    def find_obstacle() -> str | None:
        return kernel_obstacle(tensors[:1], query.shape[3]) or gradient_obstacle(tensors)

    return choose(implementation, query.device, find_obstacle)


def _check_keys(query: Tensor, key: Tensor, value: Tensor, storage: RaggedRows | None) -> None:
    if storage is None:
        check_heads(query, key)
    else:
        if query.dim() != 4 or not query.is_floating_point():
            raise ValueError(
                f"`query` must be floating point [batch, heads, tokens, head_dim], "
                f"got {query.dtype} {tuple(query.shape)}."
            )
        check_like("key", key, query)
        if key.dim() != 2 or key.shape[1] != query.shape[3]:
            raise ValueError(f"`key` must be [slots, {query.shape[3]}] with `storage`, got shape {tuple(key.shape)}.")
    check_like("value", value, query)
    if value.shape != key.shape:
        raise ValueError(f"`value` must have key's shape {tuple(key.shape)}, got {tuple(value.shape)}.")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"`{name}` must be contiguous along head_dim, got strides {tensor.stride()}.")


def _check_length(length: Tensor | None, query: Tensor) -> None:
    if length is None:
        return
    check_device("length", length, query)
    if length.shape not in ((), query.shape[:1]) or length.dtype not in INTEGER_DTYPES:
        raise ValueError(
            f"`length` must be integers of shape () or {tuple(query.shape[:1])}, "
            f"got {length.dtype} {tuple(length.shape)}."
        )


def _check_storage(
    storage: RaggedRows, query: Tensor, window_size: int, start: Tensor | None, length: Tensor | None
) -> None:
    if start is not None or length is not None:
        raise ValueError("`start` and `length` must be None with `storage`, which holds no padding, got one of them.")
    batch, heads, count, _ = query.shape
    check_device("storage", storage.offsets, query)
    check_device("storage", storage.lengths, query)
    if storage.offsets.shape[0] != batch or storage.offsets.shape[1] == 0 or heads % storage.offsets.shape[1]:
        raise ValueError(
            f"`storage` must be for {batch} sequences and a divisor of {heads} heads, "
            f"got offsets of shape {tuple(storage.offsets.shape)}."
        )
    if storage.ring_size < window_size + count - 1:
        raise ValueError(
            f"`storage` must have rings of at least {window_size + count - 1} slots, the window and the earlier "
            f"queries, got {storage.ring_size}."
        )
