"""How alike the sets look to the routers: cosine similarity of their inputs before and after the Task MLP."""

from collections.abc import Sequence

import torch
from reproduction.examples import Example
from torch import nn

from elastic_peft import similarity


@torch.inference_mode()
def task_similarity(model: nn.Module, examples: Sequence[Example]) -> dict[str, list]:
    """Cosine similarity between sets, see `elastic_peft.similarity.task_similarity`.

    Args:
        model: with an ELASTIC adapter, in evaluation mode.
        examples: of several sets.

    Returns:
        `sets`, their names, and three matrices `[sets, sets]`, `keys`, `input` and `task_mlp`.
    """
    by_set: dict[str, list[dict[int, torch.Tensor]]] = {}
    for example in examples:
        ids = torch.tensor([example.ids[: example.prompt_end]], device=model.device)
        with similarity.pooled_keys(model) as keys:
            model(input_ids=ids, logits_to_keep=1, use_cache=False)
        by_set.setdefault(example.set, []).append(keys)
    pooled = {
        name: {layer: torch.cat([keys[layer] for keys in of_set]) for layer in of_set[0]}
        for name, of_set in by_set.items()
    }
    matrices = {stage: matrix.tolist() for stage, matrix in similarity.task_similarity(model, pooled).items()}
    return {"sets": list(by_set), **matrices}
