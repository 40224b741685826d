"""The sample of queries from which the gradient of a decision is estimated; see `elastic_kernels.routed_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic_kernels.routed_attention.counterfactual import num_strata, tiles_per_stratum

from .checks import is_number


def check_fraction(fraction: Any) -> float:
    """The field `counterfactual_fraction`: 1 over an integer.

    Args:
        fraction: what the field was given.

    Returns:
        The fraction as a float, that of the integer also for a number of less precision.

    Raises:
        ValueError: it is no number, or not 1 over an integer.
    """
    if not is_number(fraction):
        raise ValueError(f"`counterfactual_fraction` must be a number, got {fraction!r}.")
    return 1 / tiles_per_stratum(fraction)


def counterfactual_noise(
    seeds: Sequence[int], num_heads: Sequence[int], length: int, fraction: float
) -> list[torch.Tensor]:
    """The noise that draws a sample; it depends on each sequence's own seed alone, not on the batch around it.

    Args:
        seeds: one per sequence; the sample's stream of random numbers is another than the decisions' of the same seed.
        num_heads: key-value heads of each routed layer, in layer order.
        length: tokens of the longest sequence, or more.
        fraction: share of queries that is sampled.

    Returns:
        One float32 CPU tensor `[N, H_l, strata]` in [0, 1) per routed layer.
    """
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed ^ 1)
        # Stratum by stratum, so that a longer batch only appends to what a sequence draws.
        rows.append(torch.rand(num_strata(length, fraction), sum(num_heads), generator=generator).t())
    return list(torch.stack(rows).split(list(num_heads), dim=1))
