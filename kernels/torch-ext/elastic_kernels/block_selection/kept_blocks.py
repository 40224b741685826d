"""The result of block selection: which key blocks each query block of each head attends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeptBlocks:
    """Key blocks that each query block of each query head attends; blocks count from a sequence's first valid token.

    Lists rather than a mask: block-sparse kernels walk them, and their lengths are all that a computed share needs.

    Args:
        indices: int16, or int32 from 32,768 key blocks on, `[N, Hq, nQ, nK]` for N sequences: ascending in each row,
            only as many entries as `counts` says are written. Row 0 is the block of the sequence's first valid query.
        counts: int32 `[N, Hq, nQ]`. A valid row keeps at least its diagonal block, which closes its list; rows past
            the sequence, and those of heads whose blocks nobody asked for, keep none; attention takes the diagonal
            block of a valid row whether it is listed or not.
        block_size: tokens a block.

    Raises:
        ValueError: tensors of another shape or dtype, or a block size below 1.
    """

    indices: Tensor
    counts: Tensor
    block_size: int

    def __post_init__(self) -> None:
        if self.indices.dim() != 4 or self.indices.dtype not in (torch.int16, torch.int32):
            raise ValueError(
                f"`indices` must be int16 or int32 [sequences, heads, query blocks, key blocks], "
                f"got {self.indices.dtype} {tuple(self.indices.shape)}."
            )
        if self.counts.shape != self.indices.shape[:3] or self.counts.dtype != torch.int32:
            raise ValueError(
                f"`counts` must be int32 of shape {tuple(self.indices.shape[:3])}, "
                f"got {self.counts.dtype} {tuple(self.counts.shape)}."
            )
        if self.block_size < 1:
            raise ValueError(f"`block_size` must be at least 1, got {self.block_size}.")

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], block_size: int, device: torch.device) -> KeptBlocks:
        """Memory for the lists of `[N, Hq, nQ, nK]` blocks, to be written by a kernel."""
        dtype = torch.int16 if shape[3] < 2**15 else torch.int32
        return cls(
            torch.empty(shape, dtype=dtype, device=device),
            torch.empty(shape[:3], dtype=torch.int32, device=device),
            block_size,
        )

    @classmethod
    def from_mask(cls, mask: Tensor, block_size: int) -> KeptBlocks:
        """The blocks that a bool mask `[N, Hq, nQ, nK]` keeps."""
        kept = cls.empty(tuple(mask.shape), block_size, mask.device)
        kept.indices.copy_((~mask).to(torch.uint8).sort(dim=-1, stable=True).indices)
        kept.counts.copy_(mask.sum(-1))
        return kept

    def contiguous(self) -> KeptBlocks:
        """The same lists without gaps between them in memory."""
        if self.indices.is_contiguous() and self.counts.is_contiguous():
            return self
        return KeptBlocks(self.indices.contiguous(), self.counts.contiguous(), self.block_size)

    def to_mask(self) -> Tensor:
        """bool `[N, Hq, nQ, nK]`, True for a kept block."""
        columns = self.indices.shape[3]
        written = torch.arange(columns, device=self.indices.device) < self.counts[..., None]
        # Unwritten entries go to a column of their own.
        targets = torch.where(written, self.indices.long(), columns)
        mask = torch.zeros(*self.indices.shape[:3], columns + 1, dtype=torch.bool, device=self.indices.device)
        return mask.scatter_(-1, targets, True)[..., :columns]

    def computed_share(self, lengths: Tensor) -> Tensor:
        """The share of each head's causal query-key pairs that lie in kept blocks.

        Args:
            lengths: int `[N]`, valid tokens of each sequence.

        Returns:
            float32 `[N, Hq]`; 1 for an empty sequence, which leaves nothing out.

        Raises:
            ValueError: `lengths` is not one number a sequence, or the lists are of a chunk (nQ < nK) and so have no
                share of the whole.

        Numerics:
            Pairs are counted exactly, in int64; the counts and their quotient are rounded to float32.
        """
        sequences, _, query_blocks, key_blocks = self.indices.shape
        if lengths.shape != (sequences,):
            raise ValueError(f"`lengths` must have shape {(sequences,)}, got {tuple(lengths.shape)}.")
        if query_blocks != key_blocks:
            raise ValueError(f"`indices` must be of whole sequences, got {query_blocks} x {key_blocks} blocks.")
        lengths = lengths.to(device=self.counts.device, dtype=torch.int64)
        first = torch.arange(query_blocks, device=self.counts.device) * self.block_size
        tokens = (lengths[:, None] - first).clamp(0, self.block_size)[:, None]  # [N, 1, nQ]
        before = (self.counts.long() - 1).clamp(min=0) * tokens * self.block_size
        diagonal = (self.counts > 0) * (tokens * (tokens + 1) // 2)
        total = (lengths * (lengths + 1) // 2)[:, None]
        share = (before + diagonal).sum(-1).float() / total.float()
        return share.masked_fill(total == 0, 1.0)
