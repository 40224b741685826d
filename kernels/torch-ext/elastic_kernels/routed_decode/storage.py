"""Ragged storage: one flat tensor for the keys (or values) of all heads, streaming heads without their middle.

An entry, one key-value head of one sequence, owns a run of slots. A full entry keeps position p in slot p of its run.
A streaming entry keeps its first `sink_size` positions there too; behind them lies a ring, where position
p >= sink_size has slot `sink_size + (p - sink_size) % ring_size`, so a new token takes the place of the oldest.

Up to Q tokens are written before their queries run, so the ring is longer than the window by at least Q - 1:
`window_size + 7` serves every number of queries that `routed_decode` takes, and rejecting up to 7 of the newest tokens
uncovers nothing that was overwritten.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .._implementations import choose, gradient_obstacle, kernel_obstacle
from .._validation import INTEGER_DTYPES, check_positive


@dataclass(frozen=True)
class RaggedRows:
    """Where each entry lies in flat keys and values `[T, D]`.

    Args:
        offsets: int64 `[B, Hkv]`, first slot of each entry.
        lengths: int32 or int64 `[B]`, tokens seen so far; for `routed_decode` with the current queries included.
        ring_size: slots of a streaming entry's ring, the same for all.

    Raises:
        ValueError: an argument of another shape or dtype, or a ring size below 1.
    """

    offsets: Tensor
    lengths: Tensor
    ring_size: int

    def __post_init__(self) -> None:
        if self.offsets.dim() != 2 or self.offsets.dtype != torch.int64:
            raise ValueError(
                f"`offsets` must be int64 [batch, key-value heads], "
                f"got {self.offsets.dtype} {tuple(self.offsets.shape)}."
            )
        if self.lengths.shape != self.offsets.shape[:1] or self.lengths.dtype not in INTEGER_DTYPES:
            raise ValueError(
                f"`lengths` must be integers of shape {tuple(self.offsets.shape[:1])}, "
                f"got {self.lengths.dtype} {tuple(self.lengths.shape)}."
            )
        check_positive("ring_size", self.ring_size)


def count_slots(gate: Tensor, lengths: Tensor, *, room: int, sink_size: int, ring_size: int) -> Tensor:
    """Slots that each entry needs to hold its sequence and `room` more tokens.

    Args:
        gate: bool or int `[B, Hkv]`, 0 = full, 1 = streaming.
        lengths: int `[B]`, tokens of each sequence.
        room: tokens that will follow, at least 0.
        sink_size: tokens at the beginning that a streaming entry keeps.
        ring_size: slots behind them.

    Returns:
        int64 `[B, Hkv]`. Their exclusive running sum gives the entries' offsets.
    """
    tokens = (lengths.to(torch.int64) + room)[:, None].expand(gate.shape)
    return torch.where(gate.bool(), tokens.clamp(max=sink_size + ring_size), tokens)


def token_slots(rows: RaggedRows, gate: Tensor, positions: Tensor, *, sink_size: int) -> Tensor:
    """The slots of given positions; a ring holds the newest of the positions that share a slot.

    Args:
        rows: where the entries lie.
        gate: bool or int `[B, Hkv]`, 0 = full, 1 = streaming.
        positions: int `[B, n]`.
        sink_size: tokens at the beginning that a streaming entry keeps.

    Returns:
        int64 `[B, Hkv, n]`.
    """
    positions = positions.to(torch.int64)[:, None]
    in_ring = sink_size + (positions - sink_size) % rows.ring_size
    ringed = gate.bool()[:, :, None] & (positions >= sink_size)
    return rows.offsets[:, :, None] + torch.where(ringed, in_ring, positions)


def next_slots(rows: RaggedRows, gate: Tensor, count: int, *, sink_size: int) -> Tensor:
    """The slots of the next `count` tokens, for `index_copy_` on the flat keys and values.

    Args:
        rows: where the entries lie, its `lengths` still without these tokens.
        gate: bool or int `[B, Hkv]`, 0 = full, 1 = streaming.
        count: new tokens a sequence, at most `ring_size`, so that no slot is written twice.
        sink_size: tokens at the beginning that a streaming entry keeps.

    Returns:
        int64 `[B, Hkv, count]`. A full entry without room would write into the next one: the owner of the storage
        counts its steps and lays it out anew in time.
    """
    new = torch.arange(count, device=rows.lengths.device)
    return token_slots(rows, gate, rows.lengths[:, None] + new, sink_size=sink_size)


def append_tokens(
    key: Tensor,
    value: Tensor,
    new_key: Tensor,
    new_value: Tensor,
    gate: Tensor,
    rows: RaggedRows,
    *,
    sink_size: int,
    implementation: str | None = None,
) -> None:
    """Writes the next tokens of every sequence, and counts them in `rows.lengths`; launches depend on shapes alone.

    Args:
        key: flat `[T, D]`, changed in place.
        value: flat `[T, D]`, changed in place.
        new_key: `[B, Hkv, Q, D]`, Q at most `ring_size`; full entries need room for it.
        new_value: `[B, Hkv, Q, D]`.
        gate: bool or int `[B, Hkv]`, 0 = full, 1 = streaming.
        rows: where the entries lie, its `lengths` still without these tokens.
        sink_size: tokens at the beginning that a streaming entry keeps.
        implementation: None to choose, or `"reference"` (plain torch) or `"triton"` (one launch).

    Raises:
        ValueError: an unknown implementation, or one that does not take such tensors.
    """
    count = new_key.shape[2]

    def find_obstacle() -> str | None:
        return kernel_obstacle([new_key], new_key.shape[3]) or gradient_obstacle([new_key, new_value])

    if choose(implementation, key.device, find_obstacle) == "triton":
        from .append import append_forward

        sizes = {"sink_size": sink_size, "ring_size": rows.ring_size}
        append_forward(key, value, new_key, new_value, gate, rows.offsets, rows.lengths, **sizes)
    else:
        slots = next_slots(rows, gate, count, sink_size=sink_size).flatten()
        key.index_copy_(0, slots, new_key.flatten(0, 2))
        value.index_copy_(0, slots, new_value.flatten(0, 2))
        rows.lengths.add_(count)


def pack_prompt(
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    *,
    room: int,
    sink_size: int,
    ring_size: int,
    start: Tensor | None = None,
    total: int | None = None,
) -> tuple[Tensor, Tensor, RaggedRows]:
    """Moves a prompt's keys and values into ragged storage, leaving padding and the middle of streaming heads behind.

    Args:
        key: `[B, Hkv, S, D]`.
        value: `[B, Hkv, S, D]`.
        gate: bool or int `[B, Hkv]`, 0 = full, 1 = streaming.
        room: tokens that will follow, at least 0.
        sink_size: tokens at the beginning that a streaming head keeps.
        ring_size: slots behind them.
        start: int `[B]`, first valid token of each row (left padding).
        total: sum of `count_slots`, where the host knows it.

    Returns:
        Flat keys and values `[T, D]` and where the entries lie in them. Slots that hold no token yet have unspecified
        content, which `routed_decode` never reads.

    Numerics:
        Copies bits. Waits for the device once without `total`, to size the allocation; holds no other tensor of the
        prompt's size.
    """
    batch, heads, length, _ = key.shape
    start = torch.zeros(batch, dtype=torch.int64, device=key.device) if start is None else start.to(torch.int64)
    lengths = length - start
    counts = count_slots(gate, lengths, room=room, sink_size=sink_size, ring_size=ring_size)
    ends = counts.flatten().cumsum(0)
    rows = RaggedRows((ends - counts.flatten()).view(batch, heads), lengths, ring_size)
    slots = torch.arange(int(ends[-1]) if total is None else total, device=key.device)
    entry = torch.searchsorted(ends, slots, right=True)
    row, head = entry // heads, entry % heads
    slot = slots - rows.offsets.flatten()[entry]
    # The newest position that shares the ring's slot.
    newest = lengths[row] - 1
    in_ring = newest - (newest - slot) % ring_size
    position = torch.where(gate.bool().flatten()[entry] & (slot >= sink_size), in_ring, slot)
    source = (start[row] + position).clamp(0, length - 1)
    return key[row, head, source], value[row, head, source], rows
