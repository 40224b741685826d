"""Static head masks: one choice of sparse heads for every input, what routing by input is compared with.

A mask is bool `[L, H]`, True = sparse, as `elastic_peft.forced_routing` takes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

import torch
from torch import nn
from transformers import DynamicCache

from ..context import evaluation_mode, last_routing, routed_decoder
from ..hooks import active_routers
from ..static_router import SCALE, is_static


def random_mask(num_layers: int, num_heads: int, num_sparse: int, seed: int) -> torch.Tensor:
    """A mask with `num_sparse` sparse heads drawn at random.

    Args:
        num_layers: routed layers L.
        num_heads: key-value heads H of each.
        num_sparse: number of sparse heads.
        seed: of the draw.

    Returns:
        bool `[L, H]`.

    Raises:
        ValueError: `num_sparse` is not between 0 and L * H.
    """
    generator = torch.Generator().manual_seed(seed)
    return mask_from_scores(torch.rand(num_layers, num_heads, generator=generator), num_sparse)


def mask_from_scores(scores: torch.Tensor, num_sparse: int) -> torch.Tensor:
    """Makes the heads with the lowest scores sparse.

    Args:
        scores: `[L, H]`, how much each head needs its retrieval mode.
        num_sparse: number of sparse heads. Of equal scores the first come first.

    Returns:
        bool `[L, H]` on the CPU.

    Raises:
        ValueError: `num_sparse` is not between 0 and L * H; a score is NaN.
    """
    if not 0 <= num_sparse <= scores.numel():
        raise ValueError(f"`num_sparse` must be between 0 and {scores.numel()}, got {num_sparse}.")
    if scores.isnan().any():
        raise ValueError("`scores` must be numbers, got NaN.")
    mask = torch.zeros(scores.numel(), dtype=torch.bool)
    mask[scores.flatten().cpu().argsort(stable=True)[:num_sparse]] = True
    return mask.view(scores.shape)


@torch.inference_mode()
def retrieval_scores(model: nn.Module, examples: Iterable[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """How much attention each head pays to a passage while the model repeats it.

    The mean over answer tokens, over the query heads of a group and over examples of the attention that the token's
    query pays to the earlier occurrence of the answer.

    Args:
        model: with an active ELASTIC adapter, which is disabled meanwhile.
        examples: int64 tokens `[S]` on the model's device, and the number of them that are the prompt's. The rest,
            less a final end-of-turn token, is a passage of the prompt.

    Returns:
        float32 `[L, H]` in [0, 1], on the CPU, for `mask_from_scores`.

    Raises:
        ValueError: no examples; a prompt that does not contain its answer.

    Source: retrieval heads, arXiv 2404.15574; as a static choice of full heads, DuoAttention, arXiv 2410.10819.
    """
    routers = active_routers(routed_decoder(model))
    layers = [routed_decoder(model).layers[router.layer.index].self_attn for router in routers]
    total = torch.zeros(len(layers), routers[0].layer.num_key_value_heads)
    count = 0
    base = model.get_base_model()
    implementation = base.config._attn_implementation
    # transformers 5.24 renamed the argument.
    cache_name = "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"
    with evaluation_mode(model), model.disable_adapter():
        try:
            for ids, prompt_end in examples:
                first = _earlier_occurrence(ids, prompt_end)
                length = len(ids) - prompt_end - 1
                # The prompt without attention weights, which take memory by the square of its length.
                base.set_attn_implementation("sdpa")
                cache = {cache_name: DynamicCache(config=base.config)}
                base(ids[None, : prompt_end - 1], **cache, use_cache=True, logits_to_keep=1)
                base.set_attn_implementation("eager")
                weights = _attention_weights(base, layers, ids[None, prompt_end - 1 : -2], cache)
                for row, weight in zip(total, weights):
                    on_passage = weight[0, :, :, first : first + length].float().sum(dim=-1).mean(dim=-1)  # [Hq]
                    row += on_passage.view(len(row), -1).mean(dim=1).cpu()
                count += 1
        finally:
            base.set_attn_implementation(implementation)
    if not count:
        raise ValueError("`examples` must hold at least one example, got none.")
    return total / count


def _earlier_occurrence(ids: torch.Tensor, prompt_end: int) -> int:
    answer = ids[prompt_end:-1]
    windows = ids[:prompt_end].unfold(0, len(answer), 1)
    found = (windows == answer).all(dim=1).nonzero()
    if not len(found):
        raise ValueError("`examples` must have answers that their prompts contain, got one whose prompt does not.")
    return int(found[-1])


def _attention_weights(
    base: nn.Module, layers: list[nn.Module], ids: torch.Tensor, cache: dict[str, DynamicCache]
) -> list[torch.Tensor]:
    """Each layer's attention weights `[1, Hq, Q, K]` for tokens that continue a cache."""
    weights: list[torch.Tensor] = []
    handles = [layer.register_forward_hook(lambda _, __, output: weights.append(output[1])) for layer in layers]
    try:
        base(ids, **cache, use_cache=True)
    finally:
        for handle in handles:
            handle.remove()
    return weights


def loss_scores(loss: Callable[[torch.Tensor], torch.Tensor], num_layers: int, num_heads: int) -> torch.Tensor:
    """How much the loss grows when one head alone runs sparse.

    Args:
        loss: from masks, bool `[N, L, H]`, to the loss under each, `[N]`.
        num_layers: routed layers L.
        num_heads: key-value heads H of each.

    Returns:
        float32 `[L, H]` on the CPU, for `mask_from_scores`.
    """
    single = torch.eye(num_layers * num_heads, dtype=torch.bool).view(-1, num_layers, num_heads)
    losses = loss(torch.cat([torch.zeros_like(single[:1]), single])).float().cpu()
    return (losses[1:] - losses[0]).view(num_layers, num_heads)


@torch.no_grad()
def blind_routers(model: nn.Module, seed: int) -> None:
    """Hides the input from the active adapter's routers: each head sees a fixed random code instead of its keys.

    Trained like any other adapter, it learns static gates: one logit pair a head for every input, under the same
    loss and schedule as the routers that it is compared with. `static_preferences` then reads them.

    Args:
        model: with an active ELASTIC adapter that has `standardize_input=True`.
        seed: of the codes.

    Raises:
        ValueError: the adapter takes raw input.

    Source: learned static gates, PruLong, arXiv 2506.17121.
    """
    generator = torch.Generator().manual_seed(seed)
    for router in active_routers(routed_decoder(model)):
        standardizer = router.standardizer
        if standardizer is None:
            raise ValueError("`model` must have an active adapter with `standardize_input=True`, got one without.")
        code = torch.randn(standardizer.mean.shape, generator=generator).to(standardizer.mean.device)
        # Keys vanish beside a mean this large, and the deviation scales it back to the code.
        standardizer.calibrate(-SCALE * code, torch.full_like(standardizer.deviation, SCALE))


@torch.inference_mode()
def static_preferences(model: nn.Module) -> torch.Tensor:
    """How much each head of an adapter with blind routers prefers its retrieval mode.

    Args:
        model: with an active ELASTIC adapter whose routers do not see their input, see `blind_routers`.

    Returns:
        float32 `[L, H]` on the CPU: the retrieval logit less the sparse one, for `mask_from_scores`.

    Raises:
        ValueError: the routers see their input.
    """
    standardizers = [router.standardizer for router in active_routers(routed_decoder(model))]
    if not all(standardizer is not None and is_static(standardizer.deviation) for standardizer in standardizers):
        raise ValueError("`model` must have routers that do not see their input, got others: see `blind_routers`.")
    with evaluation_mode(model):
        model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    record = last_routing(model)
    assert record is not None
    retrieval, sparse = record.logits[0].unbind(dim=-1)
    return (retrieval - sparse).cpu()
