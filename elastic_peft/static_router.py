"""A router that gives each head a fixed decision: how a static head pattern becomes an ordinary adapter."""

from __future__ import annotations

import torch

from .router import make_router


#: Divides the router's input: no key is so large that it still counts beside a margin.
SCALE = 2.0**64
SMALLEST_MARGIN = torch.finfo(torch.float32).eps


def is_static(deviation: torch.Tensor) -> bool:
    """Whether a router of this input standardisation decides without its input, as `static_router` makes them."""
    return bool((deviation == SCALE).all())


def static_router(margins: torch.Tensor, head_dim: int) -> dict[str, torch.Tensor]:
    """Weights of a router whose logits are (m, 0) for a head with margin m, whatever the keys.

    A layer's heads share the MLPs, so the input standardisation tells them apart: its deviation is so large that the
    keys vanish beside its mean, which leaves m in the first dimension. `silu(x) - silu(-x) = x` takes m through the
    MLPs.

    Args:
        margins: `[H]`, by how much a head prefers the retrieval mode; negative = sparse.
        head_dim: dimension of a head, at least 2.

    Returns:
        float32 tensors of a router with expansion 1 and of its input standardisation, by their names in an adapter.

    Numerics: a decision is the sign of its margin in any dtype, for every sum on the way has terms of one sign.
        Margins nearer to 0 than float32's epsilon are moved there, 0 itself to the retrieval side.
    """
    margins = margins.float()
    margins = torch.where(margins < 0, margins.clamp(max=-SMALLEST_MARGIN), margins.clamp(min=SMALLEST_MARGIN))
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in make_router(head_dim, expansion=1).items():
        tensors |= {f"{name}.{key}": torch.zeros_like(tensor) for key, tensor in layer.state_dict().items()}
    signs = torch.tensor([1.0, -1.0])
    tensors["task_up.weight"][:2, 0] = signs
    tensors["task_down.weight"][0, :2] = signs
    tensors["router_up.weight"][:2, 0] = signs
    tensors["router_down.weight"][:2, :2] = signs[:, None] * signs
    tensors["router_out.weight"][0, :2] = signs
    mean = torch.zeros(len(margins), head_dim)
    mean[:, 0] = -SCALE * margins
    tensors["standardizer.mean"] = mean
    tensors["standardizer.deviation"] = torch.full_like(mean, SCALE)
    tensors["standardizer.calibrated"] = torch.ones((), dtype=torch.uint8)
    return tensors
