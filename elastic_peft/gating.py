"""From router logits to hard decisions: Gumbel-softmax, straight-through, temperature schedules. Pure functions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch


TEMPERATURE_SCHEDULES = ("exponential", "cosine")


def straight_through_gate(
    logits: torch.Tensor, uniform: torch.Tensor, temperature: float, decision: torch.Tensor | None = None
) -> torch.Tensor:
    """Sampled decision of each head in training: hard in the forward pass, soft in the backward pass.

    `r = r_hard + (r_soft - stop_grad(r_soft))` with `r_soft = softmax((z + g) / temperature)` and
    `g = -log(-log(u + eps) + eps)`; the sparse column is returned.

    Args:
        logits: float32 `[N, H, 2]`, order (retrieval, sparse).
        uniform: float32 `[N, H, 2]` in [0, 1).
        temperature: positive.
        decision: bool `[N, H]`; replays an earlier decision, as a recomputed forward pass must.

    Returns:
        float32 `[N, H]`, exactly 0.0 or 1.0, with the gradient of the soft value.

    Numerics: float32; added in another order the sum would not be exactly 0 or 1.

    Source: Elastic Attention, arXiv 2601.17367; Gumbel-softmax, arXiv 1611.01144.
    """
    eps = 1e-10
    gumbel = -torch.log(-torch.log(uniform + eps) + eps)
    soft = torch.softmax((logits + gumbel) / temperature, dim=-1)[..., 1]
    hard = soft > 0.5 if decision is None else decision
    return hard.to(soft.dtype) + (soft - soft.detach())


def uniform_noise(seeds: Sequence[int], num_heads: Sequence[int]) -> list[torch.Tensor]:
    """Uniform noise that depends on each sequence's own seed alone, not on the batch around it.

    Args:
        seeds: one per sequence.
        num_heads: key-value heads of each routed layer, in layer order.

    Returns:
        One float32 CPU tensor `[N, H_l, 2]` in [0, 1) per routed layer.
    """
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        rows.append(torch.rand(sum(num_heads), 2, generator=generator))
    return list(torch.stack(rows).split(list(num_heads), dim=1))


def example_seed(seed: int, step: int, example: int) -> int:
    """Seed of one example's noise at one step of training.

    Args:
        seed: the run's seed.
        step: optimizer step.
        example: global index of the example.

    Returns:
        An integer below 2**63, the same on every machine.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{example}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def temperature(schedule: str, progress: float, start: float, end: float) -> float:
    """Gumbel-softmax temperature at a point of training.

    `"exponential"`: `max(end, start * exp(-0.6 * p))`, p in tenths of the training.
    `"cosine"`: from `start` to `end` over the first 60% of the training, then `end`.

    Args:
        schedule: `"exponential"` or `"cosine"`.
        progress: share of the training that is done, in [0, 1].
        start: temperature at the start, positive.
        end: final temperature, positive.

    Returns:
        The temperature, between `end` and `start`.

    Raises:
        ValueError: unknown `schedule`.

    Source: exponential: Elastic Attention, arXiv 2601.17367; cosine: its authors' reference code.
    """
    if schedule == "exponential":
        return max(end, start * math.exp(-0.6 * 10 * progress))
    if schedule == "cosine":
        return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(progress / 0.6, 1.0)))
    raise ValueError(f"`schedule` must be one of {', '.join(map(repr, TEMPERATURE_SCHEDULES))}, got {schedule!r}.")
