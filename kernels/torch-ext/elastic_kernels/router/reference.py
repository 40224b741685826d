"""The router in plain torch: the definition that the fused kernels are compared with. Differentiable."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LinearWeights(NamedTuple):
    """A linear layer, which computes in its input's dtype.

    Args:
        weight: `[out, in]`.
        bias: `[out]`.
    """

    weight: Tensor
    bias: Tensor

    def __call__(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype), self.bias.to(input.dtype))


class RouterWeights(NamedTuple):
    """The linear layers of a router.

    Args:
        task_up: `[hidden, head_dim]`, first of the Task MLP.
        task_down: `[head_dim, hidden]`, second of the Task MLP.
        router_up: `[hidden, head_dim]`, first of the Router MLP.
        router_down: `[head_dim, hidden]`, second of the Router MLP.
        router_out: `[2, head_dim]`, the logits' layer.
    """

    task_up: LinearWeights
    task_down: LinearWeights
    router_up: LinearWeights
    router_down: LinearWeights
    router_out: LinearWeights


class RouterOutput(NamedTuple):
    """What a router makes of its keys.

    Args:
        logits: `[N, H, 2]`, order (retrieval, sparse).
        gate: bool `[N, H]`, True = sparse.
        pooled: `[N, H, head_dim]`, mean keys before standardisation.
    """

    logits: Tensor
    gate: Tensor
    pooled: Tensor


def router_reference(
    keys: Tensor,
    valid: Tensor,
    weights: RouterWeights,
    *,
    mean: Tensor | None = None,
    deviation: Tensor | None = None,
    sparsity_bias: float = 0.0,
) -> RouterOutput:
    """The router's decision and what led to it.

    Args, Returns, Numerics:
        As for `elastic_kernels.router`, without its checks.
    """
    pooled = masked_mean(keys, valid)
    with torch.autocast(device_type=keys.device.type, enabled=False):
        standardized = pooled if mean is None or deviation is None else standardize(pooled, mean, deviation)
        logits = router_logits(standardized, weights._asdict())
    return RouterOutput(logits, hard_gate(logits, sparsity_bias), pooled)


def masked_mean(keys: Tensor, valid: Tensor) -> Tensor:
    """Mean of each sequence's valid keys; zero for a sequence without any.

    Args:
        keys: `[N, T, H, head_dim]`.
        valid: bool `[N, T]`.

    Returns:
        float32 `[N, H, head_dim]` (float64 for float64 keys).
    """
    kept = torch.where(valid[:, :, None, None], keys.to(torch.promote_types(keys.dtype, torch.float32)), 0.0)
    return kept.sum(dim=1) / valid.sum(dim=1).clamp(min=1)[:, None, None]


def standardize(pooled: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Pooled keys `[N, H, head_dim]` minus a mean, divided by a deviation, `[H, head_dim]` each."""
    return (pooled - mean.to(pooled.dtype)) / deviation.to(pooled.dtype)


def router_logits(pooled: Tensor, layers: Mapping[str, Callable[[Tensor], Tensor]]) -> Tensor:
    """Logits of the two modes for each head.

    Task MLP: Linear(d' to hidden), SiLU, Linear(hidden to d'). Router MLP: the same, SiLU, Linear(d' to 2).

    Args:
        pooled: `[N, H, head_dim]`, standardised pooled keys.
        layers: linear layers, named as in `RouterWeights`.

    Returns:
        `[N, H, 2]`, order (retrieval, sparse).

    Source:
        Elastic Attention, arXiv 2601.17367.
    """
    task = layers["task_down"](F.silu(layers["task_up"](pooled)))
    hidden = layers["router_down"](F.silu(layers["router_up"](task)))
    return layers["router_out"](F.silu(hidden))


def hard_gate(logits: Tensor, sparsity_bias: float = 0.0) -> Tensor:
    """Decision of each head at inference: argmax of the logits, without noise; ties go to retrieval.

    Args:
        logits: `[N, H, 2]`, order (retrieval, sparse).
        sparsity_bias: added to the sparse logit.

    Returns:
        bool `[N, H]`, True = sparse.
    """
    return logits[..., 1] + sparsity_bias > logits[..., 0]
