"""Jobs that measure static masks, as sparse as the reference adapter is on average."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import get_peft_model
from reproduction.examples import ROBUST, SENSITIVE, TASKS, Example, interleave
from reproduction.jobs import STATIC, Job
from reproduction.measuring import measure
from reproduction.results import mean_msr, read_result
from reproduction.training import load_base
from reproduction.workplace import Workplace
from torch import nn

from elastic_peft import ElasticConfig
from elastic_peft.evaluation.static_masks import loss_scores, mask_from_scores, random_mask, retrieval_scores


RANDOM_SEEDS = range(5)
CATEGORIES = {"sensitive": SENSITIVE, "robust": ROBUST}
#: Shares of sparse heads at which each ranking is measured beside the reference's.
CURVE = (0.5, 0.7, 0.9)


def measure_masks(job: Job, place: Workplace) -> dict[str, Any]:
    """Runs a job of kind `"masks"`; its result, with the scores that ranked the heads where they are its own."""
    torch.manual_seed(job.seed)
    config = ElasticConfig(task_type="CAUSAL_LM", **place.recipe(job).config)
    model = get_peft_model(load_base(place.model, place.device), config).eval()
    if job.what == "bounds":
        dense = "full" if config.retrieval_mode == "FA" else "all_retrieval"
        ways = {dense: "retrieval", "all_sparse": "sparse"}
        return {"masks": {way: place.measure(model, place.evaluation_rows(), forced) for way, forced in ways.items()}}
    if job.what == "category":
        return {"masks": {"category": _categories(job, place, model)}}
    if job.what == "curve":
        rankings = {name: _saved_scores(place, name) for name in job.needs}
        masks = {
            f"{name} {share}": mask_from_scores(scores, round(share * scores.numel()))
            for name, scores in rankings.items()
            for share in CURVE
        }
        return {"masks": _measured(place, model, masks)}
    heads = model.peft_config["default"].num_key_value_heads
    shape = (len(heads), next(iter(heads.values())))
    num_sparse = _num_sparse(job, place, tuple(TASKS), shape)
    if job.what == "random":
        masks = {f"random{seed}": random_mask(*shape, num_sparse, seed) for seed in RANDOM_SEEDS}
        return {"masks": _measured(place, model, masks)}
    scores = _scores(job, place, model, shape)
    return {
        "scores": scores.tolist(),
        "masks": _measured(place, model, {job.what: mask_from_scores(scores, num_sparse)}),
    }


def _scores(job: Job, place: Workplace, model: nn.Module, shape: tuple[int, int]) -> torch.Tensor:
    if job.what == "retrieval":
        needles = place.training["niah_single"][: place.batch_size]
        tokens = [(torch.tensor(needle.ids, device=model.device), needle.prompt_end) for needle in needles]
        return retrieval_scores(model, tokens)
    if job.what == "loss":
        examples = interleave(place.training, 2 * len(place.training), job.seed)
        return loss_scores(_losses(model, examples, place.batch_size), *shape)
    return _saved_scores(place, job.needs[1])


def _saved_scores(place: Workplace, name: str) -> torch.Tensor:
    return torch.tensor(read_result(place.output, name)["scores"])


def _num_sparse(job: Job, place: Workplace, sets: Sequence[str], shape: tuple[int, int]) -> int:
    """Sparse heads of a mask that is as sparse as the reference adapter is over `sets`."""
    return round(mean_msr(read_result(place.output, job.needs[0]), sets) * shape[0] * shape[1])


def _categories(job: Job, place: Workplace, model: nn.Module) -> dict[str, Any]:
    """A mask for each category of sets, measured on its sets alone."""
    masks, tasks = {}, []
    for name, sets in CATEGORIES.items():
        scores = _saved_scores(place, f"{STATIC}-{name}")
        masks[name] = mask_from_scores(scores, _num_sparse(job, place, sets, tuple(scores.shape)))
        rows = [row for row in place.evaluation_rows() if row.set in sets]
        tasks += place.measure(model, rows, masks[name])["tasks"]
    return {"mask": {name: mask.int().tolist() for name, mask in masks.items()}, "tasks": tasks}


def _measured(place: Workplace, model: nn.Module, masks: dict[str, torch.Tensor]) -> dict[str, Any]:
    rows = place.evaluation_rows()
    return {name: {"mask": mask.int().tolist(), **place.measure(model, rows, mask)} for name, mask in masks.items()}


def _losses(model: nn.Module, examples: list[Example], batch_size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """From masks `[N, L, H]` to the examples' mean NLL under each, `[N]`."""

    def loss(masks: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(masks))
        for example in examples:
            rows = measure(model, [example] * len(masks), batch_size, masks).rows
            total += torch.tensor([row.nll for row in rows])
        return total / len(examples)

    return loss
