"""Checks shared by the operators. They look at shapes, dtypes and devices only, never at values on a device."""

import torch
from torch import Tensor


INTEGER_DTYPES = (torch.int32, torch.int64)


def check_positive(name: str, value: int, minimum: int = 1) -> None:
    """Raise ValueError unless `value` is an int of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"`{name}` must be an integer of at least {minimum}, got {value!r}.")


def check_heads(query: Tensor, key: Tensor) -> None:
    """Raise ValueError unless query `[B, Hq, Q, D]` can attend key `[B, Hkv, K, D]`."""
    for name, tensor in (("query", query), ("key", key)):
        if tensor.dim() != 4:
            raise ValueError(f"`{name}` must be [batch, heads, tokens, head_dim], got shape {tuple(tensor.shape)}.")
    if not query.is_floating_point():
        raise ValueError(f"`query` must be a floating-point tensor, got {query.dtype}.")
    check_like("key", key, query)
    if query.shape[0] == 0:
        raise ValueError("`query` must hold at least one row, got a batch of 0.")
    if key.shape[0] != query.shape[0]:
        raise ValueError(f"`key` must have query's batch size {query.shape[0]}, got {key.shape[0]}.")
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"`key` must have query's head_dim {query.shape[3]}, got {key.shape[3]}.")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(f"`query` heads must be a multiple of the {key.shape[1]} key heads, got {query.shape[1]}.")
    if not 1 <= query.shape[2] <= key.shape[2]:
        raise ValueError(f"`query` must hold 1 to {key.shape[2]} tokens (the key's), got {query.shape[2]}.")


def check_like(name: str, tensor: Tensor, query: Tensor) -> None:
    """Raise ValueError unless `tensor` has query's dtype and device."""
    if tensor.dtype != query.dtype:
        raise ValueError(f"`{name}` must have query's dtype {query.dtype}, got {tensor.dtype}.")
    check_device(name, tensor, query)


def check_device(name: str, tensor: Tensor, like: Tensor, owner: str = "query's") -> None:
    """Raise ValueError unless `tensor` lies on the device of `like`, whose `owner` the message names."""
    if tensor.device != like.device:
        raise ValueError(f"`{name}` must be on {owner} device {like.device}, got {tensor.device}.")


def check_scores(softcap: float | None, sinks: Tensor | None, query: Tensor) -> None:
    """Raise ValueError unless `softcap` and `sinks` change the scores of query `[B, Hq, Q, D]` as they may."""
    if softcap is not None and not softcap > 0:
        raise ValueError(f"`softcap` must be positive, got {softcap}.")
    if sinks is None:
        return
    check_device("sinks", sinks, query)
    heads = (query.shape[1],)
    if sinks.shape != heads or not sinks.is_floating_point():
        raise ValueError(f"`sinks` must be floating point of shape {heads}, got {sinks.dtype} {tuple(sinks.shape)}.")


def contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Vectors as kernels read them, without gaps between their entries."""
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)


def check_sequences(query: Tensor, key: Tensor, start: Tensor | None, cu_seqlens: Tensor | None) -> int:
    """Raise ValueError unless `start` or `cu_seqlens` fits the batch; return the number of sequences."""
    batch = query.shape[0]
    if start is not None:
        if cu_seqlens is not None:
            raise ValueError("`start` must be None when `cu_seqlens` is given, got both.")
        if start.shape != (batch,) or start.dtype not in INTEGER_DTYPES:
            raise ValueError(f"`start` must be integers of shape ({batch},), got {start.dtype} {tuple(start.shape)}.")
        check_device("start", start, query)
    if cu_seqlens is None:
        return batch
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in INTEGER_DTYPES:
        raise ValueError(
            f"`cu_seqlens` must be one dimension of at least 2 integers, "
            f"got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}."
        )
    check_device("cu_seqlens", cu_seqlens, query)
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"`cu_seqlens` must come with as many queries as keys, got {query.shape[2]} and {key.shape[2]}."
        )
    return len(cu_seqlens) - 1
