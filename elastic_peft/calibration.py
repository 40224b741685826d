"""Finds the `sparsity_bias` that gives an adapter a wanted sparsity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from .context import decoder_scope, evaluation_mode, last_routing, routed_decoder
from .hooks import active_routers


MAX_STEPS = 30


class Calibration(NamedTuple):
    """What a calibration reached.

    Attributes:
        sparsity_bias: the bias that it chose.
        msr: mean model sparsity ratio of the prompts under this bias.
    """

    sparsity_bias: float
    msr: float


@torch.no_grad()
def calibrate(
    model: nn.Module, prompts: Iterable[dict[str, Any]], target_msr: float, tolerance: float = 0.01
) -> Calibration:
    """Sets the active adapter's `sparsity_bias` so that prompts reach a wanted mean MSR; it is saved with the adapter.

    Halves an interval of biases, and runs all prompts at each step, since the decisions of a layer change what later
    layers see.

    Args:
        model: a model with an active ELASTIC adapter.
        prompts: keyword arguments of `model`, on its device; `labels` or `prompt_end` keep answers out of the pool.
        target_msr: wanted mean model sparsity ratio, in [0, 1].
        tolerance: distance from it at which the search ends, at least 0.

    Returns:
        The bias and the MSR it gives, the nearest that was found: few heads and prompts allow few values.

    Raises:
        ValueError: no active adapter, no prompts, a ratio or a tolerance outside its range, or decisions that
            `forced_routing` makes. The bias is left as it was.
    """
    if not 0 <= target_msr <= 1:
        raise ValueError(f"`target_msr` must be in [0, 1], got {target_msr}.")
    if not tolerance >= 0:
        raise ValueError(f"`tolerance` must be at least 0, got {tolerance}.")
    decoder = routed_decoder(model)
    routers = active_routers(decoder)
    if not routers:
        raise ValueError("`model` must have an active adapter, got one whose adapters are disabled.")
    if decoder_scope(decoder).forced:
        raise ValueError("`calibrate` must let the routers decide, got a call inside `forced_routing`.")
    prompts = list(prompts)
    if not prompts:
        raise ValueError("`prompts` must hold at least one prompt, got none.")
    if not isinstance(prompts[0], Mapping):
        raise ValueError(f"`prompts` must hold keyword arguments of `model`, got a {type(prompts[0]).__name__}.")

    config = routers[0].active_config
    assert config is not None  # these routers are active
    before = config.sparsity_bias
    found = []
    low, high, step = -math.inf, math.inf, None
    try:
        with evaluation_mode(model):
            for _ in range(MAX_STEPS):
                msr, margin = _run(model, prompts)
                found.append(Calibration(config.sparsity_bias, msr))
                if abs(msr - target_msr) <= tolerance:
                    break
                if msr < target_msr:
                    low = config.sparsity_bias
                else:
                    high = config.sparsity_bias
                if math.isfinite(high - low):
                    config.sparsity_bias = (low + high) / 2
                else:
                    # Logits that are all equal have no distance to begin with.
                    step = (margin or 1.0) if step is None else 2 * step
                    config.sparsity_bias += step if msr < target_msr else -step
    except BaseException:
        config.sparsity_bias = before
        raise
    best = min(found, key=lambda calibration: abs(calibration.msr - target_msr))
    config.sparsity_bias = best.sparsity_bias
    return best


def _run(model: nn.Module, prompts: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean MSR of the prompts, and the mean distance of a head's logits."""
    ratios, margins = [], []
    for prompt in prompts:
        model(**{"use_cache": False, **prompt})
        record = last_routing(model)
        assert record is not None
        valid = (record.lengths > 0).to(record.msr.device)
        ratios.append(record.msr[valid])
        margins.append(record.logits[valid].diff(dim=-1).abs().mean(dim=(1, 2, 3)))
    return torch.cat(ratios).mean().item(), torch.cat(margins).mean().item()
