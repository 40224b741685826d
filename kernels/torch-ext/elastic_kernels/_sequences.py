"""Where each sequence of a batch lies: left-padded rows, or segments of packed rows."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class SequenceSlice(NamedTuple):
    """One sequence inside a `[B, H, tokens, D]` batch: its row, its valid queries and its valid keys."""

    row: int
    queries: slice
    keys: slice

    @property
    def query_count(self) -> int:
        return self.queries.stop - self.queries.start

    @property
    def key_count(self) -> int:
        return self.keys.stop - self.keys.start


def split_sequences(
    batch: int, query_length: int, key_length: int, *, start: Tensor | None, cu_seqlens: Tensor | None
) -> list[SequenceSlice]:
    """The slices of every sequence, in order. Reads the tensors' values, so it waits for their device.

    Args:
        batch: rows of the batch.
        query_length: tokens a row of the query; they sit at the end of the keys.
        key_length: tokens a row of the key.
        start: int `[B]`, first valid key of each row.
        cu_seqlens: int `[N + 1]`, bounds of the packed segments in the flattened `batch * key_length` tokens.

    Returns:
        One `SequenceSlice` a row, or one a segment when `cu_seqlens` is given.

    Raises:
        ValueError: a start outside the row; bounds that decrease, leave tokens out or cross a row.
    """
    if cu_seqlens is not None:
        return _split_segments(batch, key_length, cu_seqlens.tolist())
    starts = [0] * batch if start is None else start.tolist()
    slices = []
    for row, first in enumerate(starts):
        if not 0 <= first <= key_length:
            raise ValueError(f"`start` must lie between 0 and the key length {key_length}, got {first} for row {row}.")
        first_query = query_length - min(query_length, key_length - first)
        slices.append(SequenceSlice(row, slice(first_query, query_length), slice(first, key_length)))
    return slices


def _split_segments(batch: int, length: int, bounds: list[int]) -> list[SequenceSlice]:
    if bounds[0] != 0 or bounds[-1] != batch * length:
        raise ValueError(
            f"`cu_seqlens` must run from 0 to the {batch * length} tokens of the batch, "
            f"got {bounds[0]} to {bounds[-1]}."
        )
    slices = []
    for begin, end in pairwise(bounds):
        if end < begin:
            raise ValueError(f"`cu_seqlens` must not decrease, got {begin} before {end}.")
        row = min(begin // length, batch - 1)
        if end > (row + 1) * length:
            raise ValueError(f"`cu_seqlens` must not cross a row of {length} tokens, got a segment {begin}:{end}.")
        tokens = slice(begin - row * length, end - row * length)
        slices.append(SequenceSlice(row, tokens, tokens))
    return slices


def segment_ids(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """The segment that each of the flattened `tokens` belongs to, int64 `[tokens]`, on the bounds' device."""
    positions = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True)
