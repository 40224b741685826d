"""Routed decode in plain torch: the definition that the fused kernels are compared with."""

from typing import Any

import torch
from torch import Tensor

from ..routed_attention.reference import routed_attention_reference
from .storage import RaggedRows, token_slots


def routed_decode_reference(
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
) -> tuple[Tensor, Tensor]:
    """Full and streaming attention of every sequence by itself, and for each head the output that its gate selects.

    Args, Returns, Numerics:
        As for `elastic_kernels.routed_decode`, without its checks; the second result is the log-denominator. Reads the
        lengths, so it waits for their device.

    Raises:
        ValueError: a `start` or `length` outside the row.
    """
    sizes: dict[str, Any] = {"mode_pair": "FA-SSA", "sink_size": sink_size, "window_size": window_size}
    scores: dict[str, Any] = {"softcap": softcap, "scale": scale}
    gate = gate.bool()
    if storage is not None:
        return _attend_ragged(query, key, value, gate, storage, sinks, sizes, scores)
    if length is None:
        return routed_attention_reference(query, key, value, gate, start=start, sinks=sinks, **sizes, **scores)
    batch = query.shape[0]
    if start is None:
        start = length.new_zeros(batch)
    results = []
    for row, held in enumerate(length.expand(batch).tolist()):
        if not 0 <= held <= key.shape[2]:
            raise ValueError(f"`length` must lie between 0 and the {key.shape[2]} keys, got {held} for row {row}.")
        this = slice(row, row + 1)
        keys, values = key[this, :, :held], value[this, :, :held]
        where: dict[str, Any] = {"start": start[this], "sinks": sinks}
        results.append(routed_attention_reference(query[this], keys, values, gate[this], **where, **sizes, **scores))
    outputs, lses = zip(*results)
    return torch.cat(outputs), torch.cat(lses)


def _attend_ragged(query, key, value, gate, storage, sinks, sizes, scores) -> tuple[Tensor, Tensor]:
    """One entry at a time, its keys and values gathered in the order of their positions.

    A position that a ring has lost takes the token in its place, which no query sees there.
    """
    batch, entries = gate.shape
    groups = query.unflatten(1, (entries, -1))
    results = []
    for row, tokens in enumerate(storage.lengths.tolist()):
        positions = torch.arange(tokens, device=query.device).expand(batch, -1)
        slots = token_slots(storage, gate, positions, sink_size=sizes["sink_size"])[row]
        for head in range(entries):
            keys, values = (flat[slots[head]][None, None] for flat in (key, value))
            own_sinks = None if sinks is None else sinks.unflatten(0, (entries, -1))[head]
            rows, one = groups[row : row + 1, head], gate[row : row + 1, head : head + 1]
            where: dict[str, Any] = {"start": slots.new_zeros(1), "sinks": own_sinks}
            results.append(routed_attention_reference(rows, keys, values, one, **where, **sizes, **scores))
    outputs, lses = (torch.cat(pieces).unflatten(0, (batch, entries)).flatten(1, 2) for pieces in zip(*results))
    return outputs, lses
