"""How alike tasks look to the routers: the representations behind their decisions, before and after the Task MLP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.functional import normalize, silu

from .context import decoder_scope, routed_decoder
from .hooks import active_routers


@contextmanager
def pooled_keys(model: nn.Module) -> Iterator[dict[int, torch.Tensor]]:
    """Collects what the routers pool from the prompts that run inside.

    Args:
        model: a model with an ELASTIC adapter.

    Returns:
        Context manager of the layer index to pooled keys `[N, H, head_dim]`, float32, of the last N prompts that ran.

    Raises:
        ValueError: `model` has no ELASTIC adapter.
    """
    scope = decoder_scope(routed_decoder(model))
    before, scope.pooled = scope.pooled, {}
    try:
        yield scope.pooled
    finally:
        scope.pooled = before


@torch.no_grad()
def task_similarity(model: nn.Module, pooled: Mapping[str, Mapping[int, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Cosine similarity between tasks, each the mean of its prompts' vectors; means over layers and heads.

    Args:
        model: a model with an active ELASTIC adapter.
        pooled: task name to its prompts' keys by layer, as `pooled_keys` collects them.

    Returns:
        Three matrices `[tasks, tasks]` on the CPU: `"keys"` of the pooled keys, `"input"` of what the routers see of
        them, standardised, and `"task_mlp"` of the Task MLP's output.

    Raises:
        ValueError: no tasks, or one without prompts; `model` has no active ELASTIC adapter.
    """
    if not pooled:
        raise ValueError("`pooled` must hold at least one task, got none.")
    routers = active_routers(routed_decoder(model))
    if not routers:
        raise ValueError("`model` must have an active adapter, got one whose adapters are disabled.")
    for task, by_layer in pooled.items():
        missing = [router.layer.index for router in routers if not len(by_layer.get(router.layer.index, ()))]
        if missing:
            raise ValueError(f"`pooled[{task!r}]` must hold keys of a prompt, got none in layer {missing[0]}.")
    similarities: dict[str, list[torch.Tensor]] = {"keys": [], "input": [], "task_mlp": []}
    for router in routers:
        by_task = [keys[router.layer.index] for keys in pooled.values()]
        keys = torch.cat(by_task)  # [N, H, head_dim]
        seen = keys if router.standardizer is None else router.standardizer(keys)
        name = router.active_adapters[0]
        outputs = router.elastic_task_down[name](silu(router.elastic_task_up[name](seen)))
        for similarity, vectors in zip(similarities.values(), (keys, seen, outputs)):
            means = [of_task.mean(dim=0) for of_task in vectors.split(list(map(len, by_task)))]
            directions = normalize(torch.stack(means), dim=-1)  # [tasks, H, head_dim]
            similarity.append(torch.einsum("shd,thd->hst", directions, directions).mean(dim=0).cpu())
    return {stage: torch.stack(layers).mean(dim=0) for stage, layers in similarities.items()}
