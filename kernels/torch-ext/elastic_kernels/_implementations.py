"""Which implementation of an operator computes a call: by shapes, dtypes and devices, never by values."""

import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


IMPLEMENTATIONS = ("reference", "triton")

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_HEAD_DIM = 256
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def choose(
    implementation: str | None,
    device: torch.device,
    find_obstacle: Callable[[], str | None],
    names: Sequence[str] = IMPLEMENTATIONS,
) -> str:
    """The fused kernel where it computes the call on a CUDA device, else the reference; or the named implementation.

    Args:
        implementation: one of `names`, or None to choose.
        device: where the call's tensors are.
        find_obstacle: says why the fused kernels cannot compute the call, None if they can.
        names: implementations of the operator; `"triton"` is chosen where it can be.

    Returns:
        The name of the implementation that shall run.

    Raises:
        ValueError: an unknown name, or a named implementation that does not compute the call.
    """
    if implementation not in (None, *names):
        raise ValueError(f"`implementation` must be None or one of {tuple(names)}, got {implementation!r}.")
    if implementation == "reference" or (implementation is None and device.type != "cuda"):
        return "reference"
    obstacle = find_obstacle()
    if obstacle is None:
        return implementation or "triton"
    if implementation is None:
        return "reference"
    raise ValueError(f"`implementation` must compute the call, got {implementation!r}: {obstacle}.")


def kernel_obstacle(tensors: Sequence[Tensor], head_dim: int = _MAX_HEAD_DIM) -> str | None:
    """Why no Triton kernel of this package takes such tensors, None if one may."""
    if not _HAS_TRITON:
        return "triton is not installed"
    device = tensors[0].device
    if device.type != "cuda":
        from ._launch import is_interpreting

        if device.type != "cpu" or not is_interpreting():
            return f"it needs a CUDA device, not {device}"
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            return f"it takes fp16, bf16 and fp32, not {tensor.dtype}"
    if not 1 <= head_dim <= _MAX_HEAD_DIM:
        return f"it takes a head_dim up to {_MAX_HEAD_DIM}, not {head_dim}"
    return None


def gradient_obstacle(tensors: Sequence[Tensor]) -> str | None:
    """Why a kernel without a backward cannot take such tensors, None if it can."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "it has no backward, and an input requires a gradient"
    return None


def is_opaque(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a call is part of a graph that is being compiled, and no tensor that it reads needs a gradient."""
    return torch.compiler.is_compiling() and not (
        torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    )
