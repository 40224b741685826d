"""What launchers need to know before they start a kernel."""

import contextlib
import functools

import torch
import triton


FULL, STREAMING, BLOCK_SPARSE = 0, 1, 2
"""Attention modes as the kernels know them."""

MAX_INT32 = 2**31 - 1

_MODES = {"FA": FULL, "SSA": STREAMING, "XA": BLOCK_SPARSE}


def pair_modes(mode_pair: str) -> tuple[int, int]:
    """The retrieval mode and the sparse mode of a kernel mode pair such as `"FA-SSA"`, as kernel constants."""
    retrieval, sparse = mode_pair.split("-")
    return _MODES[retrieval], _MODES[sparse]


def is_interpreting() -> bool:
    """Whether kernels run under Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


@functools.cache
def compute_capability(index: int) -> int:
    """Compute capability of CUDA device `index`, as 10 * major + minor; 0 where another maker counts otherwise."""
    if torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


@functools.cache
def multiprocessors(index: int) -> int:
    """Multiprocessors of CUDA device `index`."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Context in which a launch goes to `tensor`'s device, which need not be the current one."""
    if tensor.device.type == "cuda":
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


def count_tiles(batch: int, length: int, block: int, cu_seqlens: torch.Tensor | None) -> int:
    """Tiles of `block` tokens of all sequences; an upper bound for packed rows, without a look at their bounds."""
    if cu_seqlens is None:
        return batch * triton.cdiv(length, block)
    return batch * length // block + cu_seqlens.numel() - 1


def tile_constants(
    gate: torch.Tensor, num_heads: int, start: torch.Tensor | None, cu_seqlens: torch.Tensor | None
) -> dict[str, int | bool]:
    """What `locate_tile` and its like know at compile time; `gate` is `[N, Hkv]`, `num_heads` counts query heads."""
    packed = cu_seqlens is not None
    return {
        "GROUP": num_heads // gate.shape[1],
        "HAS_START": start is not None,
        "HAS_CU_SEQLENS": packed,
        "BLOCK_G": triton.next_power_of_2(gate.shape[0] if packed else gate.numel()),
    }


def empty_outputs(query: torch.Tensor, with_lse: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Memory for the attention output, like `query` `[B, H, Q, D]`, and if asked its log-sum-exp, float32 `[B, H, Q]`.

    The output lies in memory as `[B, Q, H, D]`, which the projection after attention reads without a copy.
    """
    batch, heads, length, head_dim = query.shape
    out = query.new_empty((batch, length, heads, head_dim)).transpose(1, 2)
    return out, query.new_empty((batch, heads, length), dtype=torch.float32) if with_lse else None
