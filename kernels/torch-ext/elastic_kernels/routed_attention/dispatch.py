"""Which implementation of `routed_attention` computes a call. It depends on shapes, dtypes and devices only."""

from torch import Tensor

from .._implementations import IMPLEMENTATIONS, choose, kernel_obstacle
from ..block_selection import KeptBlocks


def choose_implementation(
    implementation: str | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kept_blocks: KeptBlocks | None = None,
    softcap: float | None = None,
) -> str:
    """The fastest implementation that computes the call, or the named one.

    Args:
        implementation: `"reference"`, `"triton"`, `"hopper"`, or None to choose: on a CUDA device `"hopper"` or
            `"triton"`, elsewhere and for float64 `"reference"`.
        query: as in `routed_attention`, like the other arguments.
        key: as there.
        value: as there.
        kept_blocks: as there.
        softcap: as there.

    Returns:
        One of the three names.

    Raises:
        ValueError: an unknown name, or a named implementation that does not compute the call.
    """
    names = (*IMPLEMENTATIONS, "hopper")
    chosen = choose(implementation, query.device, lambda: _obstacle(query, kept_blocks), names)
    if chosen == "reference" or implementation == "triton":
        return chosen
    if _hopper_takes(query, key, value, kept_blocks, softcap):
        return "hopper"
    if implementation == "hopper":
        raise ValueError(
            "`implementation` must compute the call, got 'hopper': it takes fp16 or bf16, head_dim 64 or 128, no "
            "softcap, kept blocks of a multiple of 128 and 16-byte aligned rows on a GPU of compute capability 9.0."
        )
    return "triton"


def _hopper_takes(
    query: Tensor, key: Tensor, value: Tensor, kept_blocks: KeptBlocks | None, softcap: float | None
) -> bool:
    if query.device.type != "cuda":
        return False
    from .forward_hopper import supports

    return supports(query, key, value, kept_blocks=kept_blocks, softcap=softcap)


def _obstacle(query: Tensor, kept_blocks: KeptBlocks | None) -> str | None:
    """Why the fused kernels cannot compute the call, None if they can."""
    obstacle = kernel_obstacle([query], query.shape[3])
    if obstacle is not None:
        return obstacle
    if kept_blocks is not None and (
        kept_blocks.block_size < 16 or kept_blocks.block_size & kept_blocks.block_size - 1
    ):
        return f"it takes kept blocks of a power of two from 16 on, not {kept_blocks.block_size}"
    return None
