"""Kept blocks as lists: the block-sparse kernels walk positions, not a mask."""

import torch
import triton
import triton.language as tl

from .._launch import on_device


@triton.jit
def _kept_list_kernel(mask_ptr, list_ptr, count_ptr, stride_mr, num_blocks, BLOCK: tl.constexpr):
    """Turns one row of the kept-block mask into the ascending list of its set positions."""
    row = tl.program_id(0).to(tl.int64)
    count = 0
    for first in range(0, num_blocks, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        kept = tl.load(mask_ptr + row * stride_mr + offs, mask=offs < num_blocks, other=0).to(tl.int32)
        place = count + tl.cumsum(kept, 0) - kept
        tl.store(list_ptr + row * num_blocks + place, offs.to(list_ptr.dtype.element_ty), mask=kept != 0)
        count += tl.sum(kept, 0)
    tl.store(count_ptr + row, count)


def kept_lists(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists the kept blocks of every block row.

    Args:
        mask: bool `[N, Hq, nQ, nK]`.

    Returns:
        The ascending positions `[N, Hq, nQ, nK]`, int16 or for 32,768 blocks and more int32, of which each row's first
        entries are written, and the number of them, int32 `[N, Hq, nQ]`.
    """
    mask = mask.contiguous()
    narrow = mask.shape[3] < 2**15
    lists = torch.empty(mask.shape, dtype=torch.int16 if narrow else torch.int32, device=mask.device)
    counts = torch.empty(mask.shape[:3], dtype=torch.int32, device=mask.device)
    columns = mask.shape[3]
    with on_device(mask):
        _kept_list_kernel[(counts.numel(),)](
            mask.view(torch.uint8), lists, counts, columns, columns, BLOCK=min(triton.next_power_of_2(columns), 1024)
        )
    return lists, counts
