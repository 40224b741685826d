"""Which implementation of `routed_attention` computes a call. It depends on shapes, dtypes and devices only."""

import importlib.util

import torch
from torch import Tensor

from ..block_selection import KeptBlocks


IMPLEMENTATIONS = ("reference", "triton", "hopper")


def choose_implementation(
    implementation: str | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    *,
    kept_blocks: KeptBlocks | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> str:
    """The fastest implementation that computes the call, or the named one.

    Args:
        implementation: one of `IMPLEMENTATIONS`, or None to choose: on a CUDA device `"hopper"` or `"triton"`,
            elsewhere and for float64 `"reference"`.
        query: as in `routed_attention`, like the other arguments.
        key: as there.
        value: as there.
        gate: as there.
        kept_blocks: as there.
        softcap: as there.
        sinks: as there.

    Returns:
        A name from `IMPLEMENTATIONS`.

    Raises:
        ValueError: an unknown name, or a named implementation that does not compute the call.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"`implementation` must be None or one of {IMPLEMENTATIONS}, got {implementation!r}.")
    if implementation == "reference" or (implementation is None and query.device.type != "cuda"):
        return "reference"
    obstacle = _obstacle(query, kept_blocks)
    if obstacle is None:
        hopper = _hopper_takes(query, key, value, kept_blocks, softcap)
        if implementation is None:
            return "hopper" if hopper else "triton"
        if implementation == "hopper" and not hopper:
            obstacle = (
                "it takes fp16 or bf16, head_dim 64 or 128, no softcap, kept blocks of a multiple of 128 and "
                "16-byte aligned rows on a GPU of compute capability 9.0"
            )
    if obstacle is not None and implementation is not None:
        raise ValueError(f"`implementation` must compute the call, got {implementation!r}: {obstacle}.")
    return implementation or "reference"


def _hopper_takes(
    query: Tensor, key: Tensor, value: Tensor, kept_blocks: KeptBlocks | None, softcap: float | None
) -> bool:
    if query.device.type != "cuda":
        return False
    from .forward_hopper import supports

    return supports(query, key, value, kept_blocks=kept_blocks, softcap=softcap)


def _obstacle(query: Tensor, kept_blocks: KeptBlocks | None) -> str | None:
    """Why the fused kernels cannot compute the call, None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if query.device.type != "cuda":
        from .._launch import is_interpreting

        if query.device.type != "cpu" or not is_interpreting():
            return f"it needs a CUDA device, not {query.device}"
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it takes fp16, bf16 and fp32, not {query.dtype}"
    if not 1 <= query.shape[3] <= 256:
        return f"it takes a head_dim up to 256, not {query.shape[3]}"
    if kept_blocks is not None and (
        kept_blocks.block_size < 16 or kept_blocks.block_size & kept_blocks.block_size - 1
    ):
        return f"it takes kept blocks of a power of two from 16 on, not {kept_blocks.block_size}"
    return None
