"""Calibration of the routers' input standardisation: the mean and deviation of the pooled keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .context import decoder_scope, forced_routing, routed_decoder
from .hooks import active_routers


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
    decoder = routed_decoder(model)
    routers = [router for router in active_routers(decoder) if router.standardizer is not None]
    if not routers:
        raise ValueError("`model` must have an active adapter with `standardize_input=True`, got one without.")
    sums = {router.layer.index: None for router in routers}
    scope = decoder_scope(decoder)
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    scope.pooled = {}
    try:
        with forced_routing(model, "retrieval"):
            for batch in batches:
                model(**batch)
                lengths = scope.record.lengths
                for index in sums:
                    pooled = scope.pooled[index][(lengths > 0).to(scope.pooled[index].device)].double()
                    count = pooled.new_full(pooled.shape[1:], pooled.shape[0])
                    moments = torch.stack([count, pooled.sum(dim=0), pooled.square().sum(dim=0)])
                    sums[index] = moments if sums[index] is None else sums[index] + moments
    finally:
        scope.pooled = None
        for module, training in was_training.items():
            module.training = training

    statistics = []
    for router in routers:
        moments = sums[router.layer.index]
        if moments is None:
            raise ValueError("`batches` must hold at least one batch, got none.")
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(moments)
        count = moments[0]
        if count.min() < 2:
            raise ValueError(f"`batches` must hold at least 2 sequences, got {int(count.min())}.")
        mean = moments[1] / count
        deviation = (moments[2] / count - mean.square()).clamp(min=0).sqrt()
        if not (mean.isfinite().all() and deviation.isfinite().all()):
            raise ValueError(f"`model` must give finite keys, got others in layer {router.layer.index}.")
        statistics.append((mean, deviation))
    for router, (mean, deviation) in zip(routers, statistics):
        router.standardizer.calibrate(mean, deviation)


def is_calibrated(model: nn.Module) -> bool:
    """Whether every router of the active adapter that standardises its input has been calibrated.

    Args:
        model: a model with an ELASTIC adapter.
    """
    standardizers = [router.standardizer for router in active_routers(routed_decoder(model))]
    return all(bool(standardizer.calibrated) for standardizer in standardizers if standardizer is not None)
