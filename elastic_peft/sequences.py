"""Which tokens of a forward pass form which sequence: padded rows, packed rows, prompts and answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Sequences:
    """The sequences of one forward pass: rows, or segments of packed rows.

    Args:
        shape: (B, S), rows and columns.
        origin: int64 `[N]`, flattened position (row * S + column) of each sequence's first slot, padding included.
        first: int64 `[N]`, flattened position of its first valid token.
        prompt_end: int64 `[N]`, flattened position after its prompt.
        end: int64 `[N]`, flattened position after its last valid token.
        open_ended: whether tokens may follow a prompt in its row or segment: an answer, or padding.
        start: int64 `[B]`, first valid column of each row, or `None` when no row is left-padded.
        cu_seqlens: int32 `[N + 1]` over the flattened tokens for packed rows, else `None`.
        is_padded_right: whether padding is known to follow a row.
    """

    shape: tuple[int, int]
    origin: torch.Tensor
    first: torch.Tensor
    prompt_end: torch.Tensor
    end: torch.Tensor
    open_ended: bool
    start: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    is_padded_right: bool = False
    # Worked out once for all layers, in graphs too, which take no `cached_property` that locks.
    _padding: list[int] | None = field(default=None, init=False, repr=False)
    _prompt_bounds: torch.Tensor | None = field(default=None, init=False, repr=False)
    _in_prompt: torch.Tensor | None = field(default=None, init=False, repr=False)

    @property
    def lengths(self) -> torch.Tensor:
        """Valid tokens of each sequence, int64 `[N]`."""
        return self.end - self.first

    @property
    def padding(self) -> list[int]:
        """Left padding of each row, on the host: waits for the device once, if there is any."""
        if self._padding is None:
            self._padding = [0] * self.shape[0] if self.start is None else self.start.tolist()
        return self._padding

    @property
    def prompt_bounds(self) -> torch.Tensor:
        """Bounds of three segments per sequence, left padding, prompt and what follows it, int32 `[3N + 1]`."""
        if self._prompt_bounds is None:
            bounds = torch.stack([self.origin, self.first, self.prompt_end], dim=1).flatten()
            batch, length = self.shape
            self._prompt_bounds = torch.cat([bounds, bounds.new_tensor([batch * length])]).to(torch.int32)
        return self._prompt_bounds

    @property
    def in_prompt(self) -> torch.Tensor:
        """Tokens that belong to a prompt, bool `[B, S]`."""
        if self._in_prompt is None:
            position = torch.arange(self.shape[0] * self.shape[1], device=self.origin.device)
            sequence = torch.bucketize(position, self.origin, right=True) - 1
            inside = (position >= self.first[sequence]) & (position < self.prompt_end[sequence])
            self._in_prompt = inside.view(self.shape)
        return self._in_prompt


def find_sequences(
    batch_size: int,
    length: int,
    device: torch.device,
    *,
    attention_mask: Any = None,
    position_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    prompt_end: torch.Tensor | int | None = None,
    packed: bool = True,
) -> Sequences:
    """Works out the sequences of a forward pass from what the caller gave the model.

    Args:
        batch_size: rows B.
        length: columns S of this forward pass.
        device: device of the hidden states.
        attention_mask: `[B, S]` (1 = valid), a 4D mask `[B, 1, S, K]`, a dict of those by layer type, or `None`.
        position_ids: `[B, S]`; restarts mark packed rows when there is no mask, as in transformers.
        cu_seqlens: `[N + 1]` cumulative lengths of packed rows over the flattened tokens.
        labels: `[B, S]`; the prompt ends before the first label other than -100.
        prompt_end: `[N]` or one integer, in slots from the start of each row or segment; wins over `labels`.
        packed: whether `position_ids` may describe packed rows.

    Returns:
        The rows, or the segments of packed rows, and where the prompt of each ends.

    Raises:
        ValueError: a row with padding inside it; a mask of another kind, or one that hides more or less than padding
            and later tokens; `prompt_end` of another dtype or number of sequences.
    """
    if cu_seqlens is None and packed and attention_mask is None and position_ids is not None:
        cu_seqlens = _packed_boundaries(position_ids, batch_size)
    columns = torch.arange(length, device=device)
    start = None
    padded = False
    if labels is not None and labels.shape != (batch_size, length):
        labels = None  # labels of whole sequences, which answer nothing token by token
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(device=device, dtype=torch.int32)
        first, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        origin = first
    else:
        origin = torch.arange(batch_size, device=device) * length
        visible = _visible(attention_mask, device)
        if visible is None:
            first, end = origin, origin + length
        else:
            # By a 4D mask, a prompt's last token sees every valid token before it.
            valid = visible[:, -length:] if visible.ndim == 2 else visible[:, -1, :length]
            column, stop = _valid_range(valid, columns)
            if visible.ndim == 3:
                _check_causal(visible, columns, column, stop)
            first, end = origin + column, origin + stop
            left, padded = _find_padding(valid, column, stop)
            start = column if left else None
    if prompt_end is None and labels is not None:
        supervised = (labels != -100).reshape(-1)
        position = torch.arange(supervised.numel(), device=device)
        sequence = torch.bucketize(position, origin, right=True) - 1
        candidate = torch.where(supervised.to(device), position, supervised.numel())
        prompt_stop = end.clone().scatter_reduce(0, sequence, candidate, "amin")
    elif prompt_end is None:
        prompt_stop = end
    else:
        slots = torch.as_tensor(prompt_end, device=device)
        if slots.is_floating_point():
            raise ValueError(f"`prompt_end` must hold integers, got {slots.dtype}.")
        if slots.ndim and slots.shape != first.shape:
            raise ValueError(
                f"`prompt_end` must hold one value for each of the {first.shape[0]} sequences, "
                f"got shape {tuple(slots.shape)}."
            )
        prompt_stop = torch.minimum(origin + slots, end)
    # Without a masked prompt there is no answer to keep out: the whole sequence is pooled.
    prompt_stop = torch.where(prompt_stop > first, prompt_stop, end)
    is_whole = prompt_end is None or (isinstance(prompt_end, int) and prompt_end >= length)
    open_ended = padded or not is_whole or (prompt_end is None and labels is not None)
    return Sequences(
        (batch_size, length),
        origin,
        first,
        prompt_stop,
        end,
        open_ended,
        start,
        cu_seqlens,
        is_padded_right=padded and not torch.compiler.is_compiling(),  # a graph that is being compiled assumes padding
    )


def _packed_boundaries(position_ids: torch.Tensor, batch_size: int) -> torch.Tensor | None:
    """Cumulative lengths of the segments that `position_ids` restarts mark, or None for ordinary rows."""
    if position_ids.ndim != 2:
        return None
    position_ids = position_ids.expand(batch_size, -1)
    restart = torch.ones_like(position_ids, dtype=torch.bool)
    restart[:, 1:] = position_ids.diff(dim=1) != 1
    if int(restart.sum()) == batch_size:
        return None
    boundaries = restart.reshape(-1).nonzero().squeeze(1)
    return torch.cat([boundaries, boundaries.new_tensor([position_ids.numel()])]).to(torch.int32)


def _visible(attention_mask: Any, device: torch.device) -> torch.Tensor | None:
    """The mask as bool, True = visible: `[B, S]`, or `[B, S, K]` from a 4D one; None when there is none."""
    if isinstance(attention_mask, dict):  # masks prepared by layer type
        attention_mask = attention_mask.get("full_attention")
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim not in (2, 4):
        raise ValueError(
            "`attention_mask` must be a tensor of 2 or 4 dimensions where heads are routed, got "
            f"{type(attention_mask).__name__}."
        )
    if attention_mask.ndim == 2:
        return attention_mask.to(device).bool()
    mask = attention_mask[:, 0].to(device)
    return mask if mask.dtype == torch.bool else mask == 0


def _check_causal(visible: torch.Tensor, columns: torch.Tensor, column: torch.Tensor, stop: torch.Tensor) -> None:
    """A sparse head knows of padding and order alone, so a 4D mask that says more would hold for full heads only.

    Raises:
        ValueError: a token sees another number of tokens than those of its row up to itself.
    """
    if torch.compiler.is_compiling():
        return
    seen = visible.sum(dim=-1)
    offset = columns - column[:, None]
    # Left padding sees nothing, or everything where an attention implementation cannot take an empty row.
    is_wrong = torch.where(offset < 0, (seen != 0) & (seen != visible.shape[-1]), seen != offset + 1)
    if bool((is_wrong & (columns < stop[:, None])).any()):
        raise ValueError(
            "`attention_mask` of 4 dimensions must hide padding and later tokens, nothing more or less, where "
            "heads are routed, got another pattern."
        )


def _valid_range(valid: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First valid column and the column after the last valid one, int64 `[B]` each; 0 and 0 for an empty row."""
    length = columns.shape[0]
    stop = torch.where(valid, columns + 1, 0).amax(dim=1)
    return torch.minimum(torch.where(valid, columns, length).amin(dim=1), stop), stop


def _find_padding(valid: torch.Tensor, column: torch.Tensor, stop: torch.Tensor) -> tuple[bool, bool]:
    """Whether a row begins and whether one ends with padding; waits for the device once.

    A graph that is being compiled must assume both.

    Raises:
        ValueError: a row has padding between valid tokens.
    """
    if torch.compiler.is_compiling():
        return True, True
    holes = (valid.sum(dim=1) != stop - column).any()
    has_holes, left, right = torch.stack([holes, column.any(), (stop != valid.shape[1]).any()]).tolist()
    if has_holes:
        raise ValueError("`attention_mask` must not have padding between valid tokens of a row, got a row that does.")
    return left, right
