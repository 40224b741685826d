"""Keys and values of one layer without what its streaming heads never attend again.

A full head keeps every token of its sequence, a streaming head its sink and a ring of the newest tokens; padding is
never kept. `elastic_kernels.routed_decode` reads the flat storage as it lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from elastic_kernels.routed_decode import RaggedRows
from elastic_kernels.routed_decode.api import MAX_QUERIES
from elastic_kernels.routed_decode.storage import count_slots, pack_prompt, token_slots

from . import operators
from .precision import in_one_dtype


# Tokens that a ring holds beyond the window: as many of the newest can be taken back, as a rejected draft is, and one
# step may bring one more.
SLACK = 32

# Tokens that fit before the storage is laid out anew: an eighth of the longest sequence, within these bounds.
MIN_ROOM, MAX_ROOM = 32, 256


class RaggedStore:
    """The keys and values of one layer.

    What a step of up to `SLACK + 1` tokens launches follows from its shapes, and what it changes lies on the device:
    while there is room, it can be captured into a CUDA graph. `length`, `capacity` and `padding` are the host's: a
    replay leaves them as they were.

    Args:
        key: `[B, H, K, head_dim]`, a prompt's; copied.
        value: `[B, H, K, head_dim]`.
        gate: bool `[B, H]`, True = streaming.
        start: int64 `[B]`, first valid token of each row, or `None`.
        padding: `start` as the host knows it, one integer a row.
        sink_size: tokens.
        window_size: tokens.

    Attributes:
        length: slots of a row of the cache that nothing was freed from, padding included.
        capacity: length from which on the storage is laid out anew.
        keys: `[T, head_dim]`.
        values: `[T, head_dim]`.
        rows: where each head's keys and values lie in them, and the tokens of each sequence.

    Numerics:
        Copies bits. Waits for the device to learn how many heads are full: once, when a sequence outgrows sink and
        ring, as a long prompt does at once.
    """

    keys: torch.Tensor
    values: torch.Tensor
    rows: RaggedRows
    length: int
    capacity: int
    #: Length at the newest token ever written: what the rings lost, they lost to it.
    _longest: int

    def __init__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        start: torch.Tensor | None,
        padding: list[int],
        sink_size: int,
        window_size: int,
    ):
        self.padding = padding
        self.sizes: dict[str, Any] = {"sink_size": sink_size, "window_size": window_size}
        self.ring_size = window_size + SLACK
        self._full_heads: list[int] | None = None
        with _ordinary_tensors():
            self.gate, self.start = gate.clone(), None if start is None else start.clone()
        self._pack(*in_one_dtype(key, value))

    @property
    def slots(self) -> torch.Tensor:
        """Slots of each sequence, room for later tokens included, int64 `[B]`."""
        return self._count_slots(self.capacity).sum(dim=1)

    def takes(self, count: int) -> bool:
        """Whether `count` tokens can be appended in one step; `extend` is for more."""
        return count <= SLACK + 1

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes the next tokens, at most `SLACK + 1`.

        Args:
            key: `[B, H, Q, head_dim]`.
            value: `[B, H, Q, head_dim]`.
        """
        count = key.shape[2]
        if self.length + count > self.capacity:
            self._lay_out(self.length + count + self._room(), self.rows.offsets)
        sink_size = self.sizes["sink_size"]
        key, value = key.to(self.keys.dtype), value.to(self.keys.dtype)
        operators.append_tokens(self.keys, self.values, key, value, self.gate, self.rows, sink_size=sink_size)
        self.length += count
        self._longest = max(self._longest, self.length)

    def attend(self, query: torch.Tensor, **scores: Any) -> torch.Tensor:
        """Attention of the tokens that were appended last.

        Args:
            query: `[B, Hq, Q, head_dim]`.
            scores: `softcap`, `sinks` and `scale`.

        Returns:
            `[B, Hq, Q, head_dim]`.
        """
        outputs: list[Any] = []
        later = query.shape[2]
        for piece in query.to(self.keys.dtype).split(MAX_QUERIES, dim=2):
            later -= piece.shape[2]
            rows = replace(self.rows, lengths=self.rows.lengths - later) if later else self.rows
            outputs.append(
                operators.routed_decode(piece, self.keys, self.values, self.gate, storage=rows, **self.sizes, **scores)
            )
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)).to(query.dtype)

    def extend(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes any number of tokens.

        Args:
            key: `[B, H, Q, head_dim]`.
            value: `[B, H, Q, head_dim]`.

        Returns:
            Keys and values of all tokens, `[B, H, K + Q, head_dim]`, for the attention of the new ones: padding, and
            what their streaming heads lost, has other tokens in its place.
        """
        position = torch.arange(self.length, device=key.device)[None]
        if self.start is not None:
            position = (position - self.start[:, None]).clamp(min=0)
        slots = token_slots(self.rows, self.gate, position, sink_size=self.sizes["sink_size"])
        key, value = key.to(self.keys.dtype), value.to(self.keys.dtype)
        key, value = torch.cat([self.keys[slots], key], dim=2), torch.cat([self.values[slots], value], dim=2)
        self._pack(key, value)
        return key, value

    def take_back(self, count: int) -> None:
        """Forgets the newest tokens.

        Args:
            count: tokens of each row to forget.

        Raises:
            ValueError: more tokens than the rings give back, or than a padded row holds.
        """
        length = self.length - count
        has_lost = self._longest - min(self.padding) > self.sizes["sink_size"] + self.ring_size
        if has_lost and self._longest - length > SLACK:
            raise ValueError(
                f"`cache` must keep all but the last {SLACK} tokens when it is cropped, for its streaming heads hold "
                f"no more than them beyond their window, got {self._longest - length} tokens to remove."
            )
        if length < max(self.padding):
            raise ValueError(
                f"`cache` must be cropped to {max(self.padding)} tokens at least, the longest row's padding, "
                f"got {length}."
            )
        self.rows.lengths.sub_(count)
        self.length = length

    def select(self, index: torch.Tensor) -> None:
        """Makes row `index[i]` row i.

        Args:
            index: int64 `[N]`. Where the rows differ in size the device is waited for, by the first of the layers that
                are given the same tensor.
        """
        self.padding = _select(self.padding, index)
        if self._full_heads is not None:
            self._full_heads = _select(self._full_heads, index)
        with _ordinary_tensors():
            self.gate = self.gate[index]
            self.start = None if self.start is None else self.start[index]
            self.rows = replace(self.rows, lengths=self.rows.lengths[index], offsets=self.rows.offsets[index])
        self._lay_out(self.capacity, self.rows.offsets)

    def _room(self) -> int:
        return min(max(self.length // 8, MIN_ROOM), MAX_ROOM)

    def _pack(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self.length = self._longest = key.shape[2]
        self.capacity = self.length + self._room()
        with _ordinary_tensors():
            self.keys, self.values, self.rows = pack_prompt(
                key,
                value,
                self.gate,
                room=self.capacity - self.length,
                sink_size=self.sizes["sink_size"],
                ring_size=self.ring_size,
                start=self.start,
                total=self._count_all_slots(self.capacity),
            )

    def _lay_out(self, capacity: int, offsets: torch.Tensor) -> None:
        """Moves every head from `offsets` to where rows of `capacity` put it; one step of a storage that grows."""
        counts = self._count_slots(capacity).flatten()
        owner = torch.repeat_interleave(counts, output_size=self._count_all_slots(capacity))
        begins = counts.cumsum(0) - counts
        # New slots take whatever lies behind the old ones.
        shift = (offsets.flatten() - begins)[owner]
        source = (torch.arange(owner.shape[0], device=owner.device) + shift).clamp(max=self.keys.shape[0] - 1)
        with _ordinary_tensors():
            self.keys = self.keys.index_select(0, source)
            self.values = self.values.index_select(0, source)
            self.rows = replace(self.rows, offsets=begins.view_as(self.gate).clone())
        self.capacity = capacity

    def _count_slots(self, capacity: int) -> torch.Tensor:
        """Slots of each head, int64 `[B, H]`."""
        room = capacity - self.length
        sink_size, ring_size = self.sizes["sink_size"], self.ring_size
        return count_slots(self.gate, self.rows.lengths, room=room, sink_size=sink_size, ring_size=ring_size)

    def _count_all_slots(self, capacity: int) -> int:
        """The sum of `_count_slots`, from what the host knows."""
        heads = self.gate.shape[1]
        limit = self.sizes["sink_size"] + self.ring_size
        tokens = [capacity - padding for padding in self.padding]
        if max(tokens) <= limit:
            return heads * sum(tokens)
        if self._full_heads is None:
            self._full_heads = (~self.gate).sum(dim=1).tolist()
        return sum(full * n + (heads - full) * min(n, limit) for full, n in zip(self._full_heads, tokens))


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Context in which new tensors may be written to anywhere, as those made in inference mode may not."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _select(values: list[int], index: torch.Tensor) -> list[int]:
    """`values[index]`; waits for the device only if they differ."""
    if len(set(values)) == 1:
        return values[:1] * len(index)
    return [values[i] for i in _read(index)]


def _read(index: torch.Tensor) -> list[int]:
    """The values of `index`, which keeps them: every layer of a cache is reordered by the same tensor."""
    version = None if index.is_inference() else index._version
    known = getattr(index, "elastic_values", None)
    if known is None or known[0] != version:
        known = index.elastic_values = (version, index.tolist())  # type: ignore[attr-defined]
    return known[1]
