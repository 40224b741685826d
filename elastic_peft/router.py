"""The attention router: boundary pooling of the pre-rotary keys, input standardisation, Task MLP, Router MLP."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from elastic_kernels.router import LinearWeights, RouterOutput, RouterWeights
from elastic_kernels.router.reference import hard_gate, masked_mean, router_logits, standardize

from . import operators


MIN_DEVIATION = 1e-4


def boundary_indices(
    first: torch.Tensor, end: torch.Tensor, pool_size: int | None, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the tokens that boundary pooling averages: the first and the last `pool_size` of each prompt.

    A prompt shorter than `2 * pool_size` lists every token exactly once.

    Args:
        first: int64 `[N]`, position of each prompt's first token.
        end: int64 `[N]`, position after each prompt's last token.
        pool_size: tokens at each end; `None` = the whole prompt.
        width: upper bound of any prompt's length, known without looking at `end`.

    Returns:
        positions, int64 `[N, T]`, and valid, bool `[N, T]`; T = min(2 * pool_size, width). Positions of invalid
        slots point at the sequence's first token.

    Source: Elastic Attention, arXiv 2601.17367.
    """
    length = (end - first).clamp(min=0)[:, None]
    slot = torch.arange(width if pool_size is None else min(2 * pool_size, width), device=first.device)[None]
    if pool_size is None:
        offset = slot
    else:  # a prompt shorter than both ends together is counted through, so no token comes twice
        in_head = (slot < pool_size) | (length < 2 * pool_size)
        offset = torch.where(in_head, slot, length - 2 * pool_size + slot)
    valid = slot < length
    return first[:, None] + torch.where(valid, offset, 0), valid


class InputStandardizer(nn.Module):
    """Subtracts a calibrated mean from the pooled keys and divides by a calibrated deviation.

    Without it the part of the pooled keys that all inputs share hides the part that tells tasks apart.

    Args:
        num_key_value_heads: H.
        head_dim: dimension of a head.

    Numerics: the statistics stay in float32 when the model is cast to another dtype.
    """

    def __init__(self, num_key_value_heads: int, head_dim: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_key_value_heads, head_dim, dtype=torch.float32))
        self.register_buffer("deviation", torch.ones(num_key_value_heads, head_dim, dtype=torch.float32))
        self.register_buffer("calibrated", torch.zeros((), dtype=torch.uint8))

    def _apply(self, fn, recurse=True):
        # Small differences between large keys decide: casting the model must not round the statistics.
        def keep_dtype(tensor):
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)

    @torch.no_grad()
    def calibrate(self, mean: torch.Tensor, deviation: torch.Tensor) -> None:
        """Fixes the statistics, both `[H, head_dim]`; deviations below 1e-4 are raised to it."""
        self.mean.copy_(mean)
        self.deviation.copy_(deviation.clamp(min=MIN_DEVIATION))
        self.calibrated.fill_(1)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """Standardises float32 `[N, H, head_dim]`."""
        return standardize(pooled, self.mean, self.deviation)


class RouterLinear(nn.Linear):
    """A linear layer that computes in float32 whatever dtype the model, autocast or FSDP gave its weights."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type=input.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return F.linear(input.float(), self.weight.float(), bias)


def make_router(head_dim: int, expansion: int) -> dict[str, nn.Module]:
    """The linear layers of one router, by name.

    Args:
        head_dim: dimension of a head, d'.
        expansion: hidden width of both MLPs in multiples of `head_dim`.

    Returns:
        `task_up`, `task_down` (Task MLP), `router_up`, `router_down`, `router_out` (Router MLP), float32.
    """
    hidden = expansion * head_dim
    layers = {
        "task_up": RouterLinear(head_dim, hidden, dtype=torch.float32),
        "task_down": RouterLinear(hidden, head_dim, dtype=torch.float32),
        "router_up": RouterLinear(head_dim, hidden, dtype=torch.float32),
        "router_down": RouterLinear(hidden, head_dim, dtype=torch.float32),
        "router_out": RouterLinear(head_dim, 2, dtype=torch.float32),
    }
    # Neutral decisions at first, with gradients for every layer of the router from the first step.
    nn.init.normal_(layers["router_out"].weight, std=1e-3)
    nn.init.zeros_(layers["router_out"].bias)
    return layers


def decide(
    keys: torch.Tensor,
    valid: torch.Tensor,
    layers: Mapping[str, nn.Module],
    standardizer: InputStandardizer | None,
    sparsity_bias: float,
) -> RouterOutput:
    """Pools the boundary keys and decides for each head; differentiable where an input requires a gradient.

    Args:
        keys: `[N, T, H, head_dim]`, pre-rotary keys of the boundary tokens.
        valid: bool `[N, T]`.
        layers: as `make_router` returns them.
        standardizer: input standardisation; `None` takes the pooled keys as they are.
        sparsity_bias: added to the sparse logit before the decision.

    Returns:
        Logits float32 `[N, H, 2]` without the bias, gate bool `[N, H]`, pooled keys float32 `[N, H, head_dim]`.

    Numerics: float32 whatever the keys' dtype.
    """
    if keys.dtype == torch.float64:
        keys = keys.float()
    weights = _resident_weights(layers, keys)
    if weights is None or (standardizer is not None and standardizer.mean.device != keys.device):
        pooled = masked_mean(keys, valid)
        logits = router_logits(pooled if standardizer is None else standardizer(pooled), layers)
        return RouterOutput(logits, hard_gate(logits, sparsity_bias), pooled)
    mean, deviation = (None, None) if standardizer is None else (standardizer.mean, standardizer.deviation)
    return operators.router(keys, valid, weights, mean=mean, deviation=deviation, sparsity_bias=sparsity_bias)


def _resident_weights(layers: Mapping[str, nn.Module], keys: torch.Tensor) -> RouterWeights | None:
    """The layers' weights where they can be read; `None` where the layers must be called.

    Layers that learn are called, and so are those whose weights FSDP, ZeRO or offloading keeps elsewhere until then.
    """
    learns = torch.is_grad_enabled()
    if learns and keys.requires_grad:
        return None
    weights = {}
    for name, layer in layers.items():
        weight, bias = layer.weight, layer.bias
        here = type(weight) is nn.Parameter and weight.device == keys.device
        if not here or weight.shape != (layer.out_features, layer.in_features) or (learns and weight.requires_grad):
            return None
        weights[name] = LinearWeights(weight, bias)
    return RouterWeights(**weights)
