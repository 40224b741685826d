"""How alike the tasks look to the routers: cosine similarity of their inputs before and after the Task MLP."""

from collections.abc import Sequence

import torch
from reproduction.examples import Example
from torch import nn
from torch.nn.functional import normalize, silu

from elastic_peft.context import decoder_scope, routed_decoder
from elastic_peft.hooks import active_routers


@torch.inference_mode()
def task_similarity(model: nn.Module, examples: Sequence[Example]) -> dict[str, list]:
    """Cosine similarity between sets, each the mean of its examples' vectors, mean over layers and heads.

    Args:
        model: with an ELASTIC adapter, in evaluation mode.
        examples: of several sets.

    Returns:
        `sets`, their names, and three matrices `[sets, sets]`: `keys` of the pooled keys, `input` of what the routers
        see of them, `task_mlp` of the Task MLP's output.
    """
    names = list(dict.fromkeys(example.set for example in examples))
    pooled = [_pooled(model, example) for example in examples]
    similarities: dict[str, list[torch.Tensor]] = {"keys": [], "input": [], "task_mlp": []}
    for router in active_routers(routed_decoder(model)):
        keys = torch.cat([by_layer[router.layer.index] for by_layer in pooled])
        seen = keys if router.standardizer is None else router.standardizer(keys)
        adapter = router.active_adapters[0]
        hidden = silu(router.elastic_task_up[adapter](seen))
        stages = (keys, seen, router.elastic_task_down[adapter](hidden))
        for similarity, vectors in zip(similarities.values(), stages):
            means = torch.stack([vectors[[e.set == name for e in examples]].mean(dim=0) for name in names])
            directions = normalize(means, dim=-1)  # [sets, H, head_dim]
            similarity.append(torch.einsum("shd,thd->hst", directions, directions).mean(dim=0).cpu())
    matrices = {stage: torch.stack(layers).mean(dim=0).tolist() for stage, layers in similarities.items()}
    return {"sets": names, **matrices}


def _pooled(model: nn.Module, example: Example) -> dict[int, torch.Tensor]:
    """The pooled keys of a prompt by layer index, `[1, H, head_dim]`, as the adapter routes it."""
    scope = decoder_scope(routed_decoder(model))
    scope.pooled = {}
    try:
        ids = torch.tensor([example.ids[: example.prompt_end]], device=model.device)
        model(input_ids=ids, logits_to_keep=1, use_cache=False)
        return scope.pooled
    finally:
        scope.pooled = None
