"""Kept blocks seen from the keys: the gradient of a key block walks the query blocks that keep it."""

import torch
import triton
import triton.language as tl

from .._launch import on_device
from ..block_selection import KeptBlocks


@triton.jit
def _query_lists_kernel(
    index_ptr, count_ptr, list_ptr, length_ptr, rows, columns, BITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program lists the query blocks of one head of one sequence whose ascending lists hold one key block."""
    head = (tl.program_id(0) // columns).to(tl.int64)
    column = tl.program_id(0) % columns
    out = head * columns + column
    length = 0
    for first in range(0, rows, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        row = head * rows + offs
        low = tl.zeros([BLOCK], tl.int32)
        count = tl.load(count_ptr + row, mask=offs < rows, other=0)
        high = count
        # Binary search for the first entry that is not below `column`.
        for _ in range(BITS):
            middle = (low + high) // 2
            searching = low < high
            entry = tl.load(index_ptr + row * columns + middle, mask=searching, other=0).to(tl.int32)
            low = tl.where(searching & (entry < column), middle + 1, low)
            high = tl.where(searching & (entry >= column), middle, high)
        found = tl.load(index_ptr + row * columns + low, mask=low < count, other=-1).to(tl.int32) == column
        place = length + tl.cumsum(found.to(tl.int32), 0) - 1
        tl.store(list_ptr + out * rows + place, offs.to(list_ptr.dtype.element_ty), mask=found)
        length += tl.sum(found.to(tl.int32), 0)
    tl.store(length_ptr + out, length)


def query_lists(kept_blocks: KeptBlocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists, for every key block, the query blocks that keep it.

    Args:
        kept_blocks: lists `[N, Hq, nQ, nK]`.

    Returns:
        The ascending query blocks `[N, Hq, nK, nQ]`, of which each row's first entries are written, in the dtype of
        the lists, and the number of them, int32 `[N, Hq, nK]`.
    """
    indices, counts = kept_blocks.indices.contiguous(), kept_blocks.counts.contiguous()
    sequences, heads, rows, columns = indices.shape
    lists = indices.new_empty((sequences, heads, columns, rows))
    lengths = counts.new_empty((sequences, heads, columns))
    with on_device(indices):
        _query_lists_kernel[(lengths.numel(),)](
            indices, counts, lists, lengths, rows, columns,
            BITS=columns.bit_length(), BLOCK=min(triton.next_power_of_2(rows), 1024),
        )  # fmt: skip
    return lists, lengths
