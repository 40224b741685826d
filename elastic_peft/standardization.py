"""Calibration of the routers' input standardisation: the mean and deviation of the pooled keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .context import RoutingTape, evaluation_mode, forced_routing, routed_decoder
from .hooks import active_routers
from .router import InputStandardizer
from .similarity import pooled_keys


@torch.no_grad()
def calibrate_standardization(model: nn.Module, batches: Iterable[dict[str, Any]]) -> None:
    """Fixes the mean and deviation that the active adapter's routers standardise their input with.

    Runs the batches with every head in retrieval mode. Each sequence counts once; where `torch.distributed` is
    initialised the sums are taken over all ranks.

    Args:
        model: a model with an ELASTIC adapter that has `standardize_input=True`.
        batches: keyword arguments of `model`, on its device; `labels` or `prompt_end` keep answers out of the pool.

    Raises:
        ValueError: the adapter takes raw input; fewer than two sequences were given; keys that are not finite.

    Numerics: sums in float64, statistics in float32, deviation floored at 1e-4.
    """
    standardizers = _standardizers(model)
    if not standardizers:
        raise ValueError("`model` must have an active adapter with `standardize_input=True`, got one without.")
    moments: dict[int, torch.Tensor] = {}
    for pooled_by_layer in _retrieval_keys(model, batches):
        for index in standardizers:
            pooled = pooled_by_layer[index].double()  # [sequences, H, head_dim]
            count = pooled.new_full(pooled.shape[1:], pooled.shape[0])
            batch_moments = torch.stack([count, pooled.sum(dim=0), pooled.square().sum(dim=0)])
            moments[index] = moments[index] + batch_moments if index in moments else batch_moments
    if not moments:
        raise ValueError("`batches` must hold at least one batch, got none.")

    statistics = {}
    for index, layer_moments in moments.items():
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(layer_moments)
        count, total, squares = layer_moments
        if count.min() < 2:
            raise ValueError(f"`batches` must hold at least 2 sequences, got {int(count.min())}.")
        mean = total / count
        deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
        if not (mean.isfinite().all() and deviation.isfinite().all()):
            raise ValueError(f"`model` must give finite keys, got others in layer {index}.")
        statistics[index] = (mean, deviation)
    for index, standardizer in standardizers.items():
        standardizer.calibrate(*statistics[index])


def _standardizers(model: nn.Module) -> dict[int, InputStandardizer]:
    """The active adapter's standardisations by layer index."""
    routers = active_routers(routed_decoder(model))
    return {r.layer.index: r.standardizer for r in routers if r.standardizer is not None}


def _retrieval_keys(model: nn.Module, batches: Iterable[dict[str, Any]]) -> Iterator[dict[int, torch.Tensor]]:
    """Each batch's pooled keys by layer, `[sequences, H, head_dim]`, with every head in retrieval mode."""
    with evaluation_mode(model), forced_routing(model, "retrieval"), pooled_keys(model) as pooled:
        for batch in batches:
            tape = RoutingTape()
            model(**batch, elastic_tape=tape)
            assert tape.lengths is not None
            valid = tape.lengths > 0
            yield {index: keys[valid.to(keys.device)] for index, keys in pooled.items()}


def is_calibrated(model: nn.Module) -> bool:
    """Whether every router of the active adapter that standardises its input has been calibrated.

    Args:
        model: a model with an ELASTIC adapter.

    Returns:
        True too where no router standardises its input.
    """
    return all(bool(standardizer.calibrated) for standardizer in _standardizers(model).values())
