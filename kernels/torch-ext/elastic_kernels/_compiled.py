"""The operators as torch.compile sees them: opaque, with the shapes of their results.

A graph that is being compiled has no addresses and no device to ask, by which kernels are chosen, and no values, which
the reference reads; so it takes the call as a whole, and the choice is made when it runs. Forward only.
"""

import torch
from torch import Tensor

from .block_selection import KeptBlocks, block_selection
from .routed_attention import routed_attention
from .routed_decode import RaggedRows, routed_decode
from .router import LinearWeights, RouterOutput, RouterWeights, router


def add_op_namespace_prefix(op_name: str) -> str:
    """An operator's name in the namespace of this copy of the package.

    The Kernel Hub loads each build under a package name of its own, which must also be the namespace of its operators.
    """
    return f"{__package__}::{op_name}"


@torch.library.custom_op(add_op_namespace_prefix("routed_attention"), mutates_args=())
def _routed_attention(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, start: Tensor | None, cu_seqlens: Tensor | None,
    indices: Tensor | None, counts: Tensor | None, sinks: Tensor | None, mode_pair: str, sink_size: int,
    window_size: int, block_size: int, softcap: float | None, scale: float | None, implementation: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    kept = None if indices is None or counts is None else KeptBlocks(indices, counts, block_size)
    output, lse = routed_attention(
        query, key, value, gate, mode_pair=mode_pair, sink_size=sink_size, window_size=window_size, start=start,
        cu_seqlens=cu_seqlens, kept_blocks=kept, softcap=softcap, sinks=sinks, scale=scale, return_lse=True,
        implementation=implementation,
    )  # fmt: skip
    # Every implementation lays its output out as the graph expects.
    return output.transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()


@_routed_attention.register_fake
def _(query, *inputs):
    return _like_attention(query)


@torch.library.custom_op(add_op_namespace_prefix("routed_decode"), mutates_args=())
def _routed_decode(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, start: Tensor | None, length: Tensor | None,
    offsets: Tensor | None, lengths: Tensor | None, sinks: Tensor | None, ring_size: int, sink_size: int,
    window_size: int, softcap: float | None, scale: float | None, implementation: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    storage = None if offsets is None or lengths is None else RaggedRows(offsets, lengths, ring_size)
    output, lse = routed_decode(
        query, key, value, gate, sink_size=sink_size, window_size=window_size, start=start, length=length,
        storage=storage, softcap=softcap, sinks=sinks, scale=scale, return_lse=True, implementation=implementation,
    )  # fmt: skip
    return output.transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()


@_routed_decode.register_fake
def _(query, *inputs):
    return _like_attention(query)


@torch.library.custom_op(add_op_namespace_prefix("router"), mutates_args=())
def _router(
    keys: Tensor, valid: Tensor, weights: list[Tensor], mean: Tensor | None, deviation: Tensor | None,
    sparsity_bias: float, implementation: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    layers = RouterWeights(*map(LinearWeights, weights[::2], weights[1::2]))
    return router(
        keys, valid, layers, mean=mean, deviation=deviation, sparsity_bias=sparsity_bias, implementation=implementation
    )


@_router.register_fake
def _(keys, *inputs):
    sequences, _, heads, head_dim = keys.shape
    dtype = torch.promote_types(keys.dtype, torch.float32)
    shapes = ((sequences, heads, 2), dtype), ((sequences, heads), torch.bool), ((sequences, heads, head_dim), dtype)
    return tuple(keys.new_empty(shape, dtype=kind) for shape, kind in shapes)


@torch.library.custom_op(add_op_namespace_prefix("block_selection"), mutates_args=())
def _block_selection(
    query: Tensor, key: Tensor, heads: Tensor | None, start: Tensor | None, cu_seqlens: Tensor | None,
    block_size: int, stride: int, threshold: float, scale: float | None, implementation: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    kept = block_selection(
        query, key, heads=heads, block_size=block_size, stride=stride, threshold=threshold, start=start,
        cu_seqlens=cu_seqlens, scale=scale, implementation=implementation,
    )  # fmt: skip
    return kept.indices, kept.counts


@_block_selection.register_fake
def _(query, key, heads, start, cu_seqlens, block_size, *options):
    sequences = query.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    rows, columns = (-(-tensor.shape[2] // block_size) for tensor in (query, key))
    kept = KeptBlocks.empty((sequences, query.shape[1], rows, columns), block_size, query.device)
    return kept.indices, kept.counts


def _like_attention(query: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, length, head_dim = query.shape
    output = query.new_empty((batch, length, heads, head_dim)).transpose(1, 2)
    return output, query.new_empty((batch, heads, length), dtype=torch.promote_types(query.dtype, torch.float32))


def routed_attention_op(query, key, value, gate, *, kept_blocks, start, cu_seqlens, sinks, return_lse, **options):
    """`routed_attention` inside a graph."""
    indices, counts, block_size = None, None, 0
    if kept_blocks is not None:
        indices, counts, block_size = kept_blocks.indices, kept_blocks.counts, kept_blocks.block_size
    tensors = (query, key, value, gate, start, cu_seqlens, indices, counts, sinks)
    output, lse = _routed_attention(*tensors, block_size=block_size, **options)
    return (output, lse) if return_lse else output


def routed_decode_op(query, key, value, gate, *, storage, start, length, sinks, return_lse, **options):
    """`routed_decode` inside a graph."""
    offsets, lengths, ring_size = None, None, 0
    if storage is not None:
        offsets, lengths, ring_size = storage.offsets, storage.lengths, storage.ring_size
    tensors = (query, key, value, gate, start, length, offsets, lengths, sinks)
    output, lse = _routed_decode(*tensors, ring_size=ring_size, **options)
    return (output, lse) if return_lse else output


def router_op(keys, valid, weights, **options) -> RouterOutput:
    """`router` inside a graph."""
    return RouterOutput(*_router(keys, valid, [tensor for layer in weights for tensor in layer], **options))


def block_selection_op(query, key, **options) -> KeptBlocks:
    """`block_selection` inside a graph."""
    indices, counts = _block_selection(query, key, **options)
    return KeptBlocks(indices, counts, options["block_size"])
