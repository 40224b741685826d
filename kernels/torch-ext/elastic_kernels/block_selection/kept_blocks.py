"""The result of block selection: which key blocks each query block of each head attends."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeptBlocks:
    """Key blocks that each query block of each query head attends; blocks count from a sequence's first valid token.

    Args:
        mask: bool `[N, Hq, nQ, nK]` for N sequences. Row 0 is the block of the sequence's first valid query. A valid
            row keeps at least its diagonal block; blocks after the diagonal and rows past the sequence are False.
        block_size: tokens a block.

    Raises:
        ValueError: a mask of another shape or dtype, or a block size below 1.
    """

    mask: Tensor
    block_size: int

    def __post_init__(self) -> None:
        if self.mask.dim() != 4 or self.mask.dtype != torch.bool:
            raise ValueError(
                f"`mask` must be bool [sequences, heads, query blocks, key blocks], "
                f"got {self.mask.dtype} {tuple(self.mask.shape)}."
            )
        if self.block_size < 1:
            raise ValueError(f"`block_size` must be at least 1, got {self.block_size}.")

    def computed_share(self, lengths: Tensor) -> Tensor:
        """The share of each head's causal query-key pairs that lie in kept blocks.

        Args:
            lengths: int `[N]`, valid tokens of each sequence.

        Returns:
            float32 `[N, Hq]`; 1 for an empty sequence, which leaves nothing out.

        Raises:
            ValueError: `lengths` is not one number a sequence, or the mask is of a chunk (nQ < nK) and so has no
                share of the whole.

        Numerics:
            Pairs are counted exactly, in int64; the counts and their quotient are rounded to float32.
        """
        sequences, _, query_blocks, key_blocks = self.mask.shape
        if lengths.shape != (sequences,):
            raise ValueError(f"`lengths` must have shape {(sequences,)}, got {tuple(lengths.shape)}.")
        if query_blocks != key_blocks:
            raise ValueError(f"`mask` must be of whole sequences, got {query_blocks} x {key_blocks} blocks.")
        lengths = lengths.to(device=self.mask.device, dtype=torch.int64)
        first = torch.arange(query_blocks, device=self.mask.device) * self.block_size
        tokens = (lengths[:, None] - first).clamp(0, self.block_size)[:, None]  # [N, 1, nQ]
        before = self.mask.tril(-1).sum(-1) * tokens * self.block_size
        diagonal = self.mask.diagonal(dim1=2, dim2=3) * (tokens * (tokens + 1) // 2)
        total = (lengths * (lengths + 1) // 2)[:, None]
        share = (before + diagonal).sum(-1).float() / total.float()
        return share.masked_fill(total == 0, 1.0)
