"""One dtype for tensors that meet in a product."""

from __future__ import annotations

from typing import Any

import torch


_LOW = (torch.float16, torch.bfloat16, torch.float32)


def in_one_dtype(*tensors: torch.Tensor) -> Any:
    """The tensors in the dtype that autocast would multiply them in; without it, in the first one's.

    Under autocast a rotary embedding leaves queries and keys in float32 beside values of a lower precision.

    Args:
        tensors: floating-point tensors on one device.

    Returns:
        A tuple of as many tensors.
    """
    dtype, kind = tensors[0].dtype, tensors[0].device.type
    if dtype in _LOW and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor.to(dtype) for tensor in tensors)
