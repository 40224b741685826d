"""How each kind of job runs: trained adapters, static masks, an adapter in other conditions."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from reproduction.examples import ROBUST, SENSITIVE, Example, choose_phrasing, interleave, load_examples
from reproduction.jobs import STATIC, Job
from reproduction.lengths import resize
from reproduction.measuring import Measured, measure
from reproduction.results import mean_msr, read_result
from reproduction.training import CONFIG, load_base, train
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from elastic_peft import ElasticConfig
from elastic_peft.evaluation.static_masks import (
    loss_scores,
    mask_from_scores,
    random_mask,
    retrieval_scores,
    static_preferences,
)


@dataclass(frozen=True)
class Workplace:
    """Where jobs run and what they read.

    Args:
        model: folder of the backbone.
        data: file of the examples, see `reproduction.examples`.
        output: folder of the results and adapters.
        device: `"cpu"` or a CUDA device.
        rows: evaluation examples of each set.
        batch_size: rows of a measured batch.
        lengths: tokens of the examples that are made longer and shorter.
        overrides: fields of `ElasticSFTConfig` that every job takes.
    """

    model: Path
    data: Path
    output: Path
    device: str
    rows: int = 48
    batch_size: int = 8
    lengths: tuple[int, ...] = (1024, 2048, 8192)
    overrides: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The backbone's tokenizer."""
        return AutoTokenizer.from_pretrained(self.model)

    @cached_property
    def training(self) -> dict[str, list[Example]]:
        """Training examples by set."""
        return load_examples(self.data, "train")

    @cached_property
    def evaluation(self) -> dict[str, list[Example]]:
        """Evaluation examples by set."""
        return load_examples(self.data, "eval")

    def evaluation_rows(self) -> list[Example]:
        """The first evaluation examples of each set, set by set."""
        return [example for members in self.evaluation.values() for example in members[: self.rows]]

    def adapter(self, name: str) -> Path:
        """Folder of the adapter that a job trained."""
        return self.output / "adapters" / name

    def load(self, name: str) -> torch.nn.Module:
        """The backbone with the adapter that a job trained, in evaluation mode."""
        return PeftModel.from_pretrained(load_base(self.model, self.device), self.adapter(name)).eval()

    def measure(self, model: torch.nn.Module, examples: list[Example], forced: Any = None) -> dict[str, Any]:
        """Measures examples; the table, and what computed the prompts."""
        return summary(measure(model, examples, self.batch_size, forced))


def summary(measured: Measured) -> dict[str, Any]:
    """A result's entry for what was measured."""
    return {"implementations": list(measured.implementations), "tasks": measured.table()}


def run_job(job: Job, place: Workplace) -> dict[str, Any]:
    """Runs a job; its result, ready for JSON."""
    return {"train": _train, "masks": _masks, "adapter": _adapter}[job.kind](job, place)


def _train(job: Job, place: Workplace) -> dict[str, Any]:
    config = dict(job.config)
    if job.is_blind:  # one target for all, so that the static mask has the routed adapter's mean sparsity
        target = mean_msr(read_result(place.output, job.needs[0]), job.sets)
        config["t_values"] = dict.fromkeys(ElasticConfig().t_values, target)
    examples = choose_phrasing(place.tokenizer, place.training, job.phrasing)
    model, log = train(
        load_base(place.model, place.device),
        place.tokenizer,
        {name: examples[name] for name in job.sets},
        place.output / "trainer" / job.name,
        config=config,
        arguments={**job.arguments, **dict(place.overrides)},
        seed=job.seed,
        is_blind=job.is_blind,
    )
    model.save_pretrained(place.adapter(job.name))
    result = {"log": log, **place.measure(model, place.evaluation_rows())}
    if job.phrasing == "seen":
        pools = (place.evaluation, place.training)
        unseen = [choose_phrasing(place.tokenizer, pool, "unseen") for pool in pools]
        rows = [example for name in job.sets for example in (unseen[0][name] + unseen[1][name])[: place.rows]]
        result["unseen"] = {
            way: place.measure(model, rows, forced) for way, forced in (("routed", None), ("full", "retrieval"))
        }
    return result


def _masks(job: Job, place: Workplace) -> dict[str, Any]:
    torch.manual_seed(job.seed)
    config = ElasticConfig(**{"task_type": "CAUSAL_LM", **CONFIG, **job.config})
    model = get_peft_model(load_base(place.model, place.device), config).eval()
    rows = place.evaluation_rows()
    if job.what == "bounds":
        dense = "full" if config.retrieval_mode == "FA" else "all_retrieval"
        ways = {dense: "retrieval", "all_sparse": "sparse"}
        return {"masks": {way: place.measure(model, rows, forced) for way, forced in ways.items()}}
    heads = model.peft_config["default"].num_key_value_heads
    shape = (len(heads), heads[0])
    reference = read_result(place.output, job.needs[0])

    def choose(scores: torch.Tensor, sets: tuple[str, ...] = (*SENSITIVE, *ROBUST)) -> torch.Tensor:
        return mask_from_scores(scores, round(mean_msr(reference, sets) * scores.numel()))

    if job.what == "random":
        num_sparse = round(mean_msr(reference, (*SENSITIVE, *ROBUST)) * shape[0] * shape[1])
        masks = {f"random{seed}": random_mask(*shape, num_sparse, seed) for seed in range(5)}
    elif job.what == "retrieval":
        needles = place.training["niah_single"][: place.batch_size]
        tokens = [(torch.tensor(needle.ids, device=model.device), needle.prompt_end) for needle in needles]
        masks = {"retrieval": choose(retrieval_scores(model, tokens))}
    elif job.what == "loss":
        examples = interleave(place.training, 2 * len(place.training), job.seed)
        masks = {"loss": choose(loss_scores(_losses(model, examples, place.batch_size), *shape))}
    elif job.what == "learned":
        masks = {"learned": choose(static_preferences(place.load(STATIC)))}
    else:
        categories = {"sensitive": SENSITIVE, "robust": ROBUST}
        parts, chosen = [], {}
        for name, sets in categories.items():
            chosen[name] = choose(static_preferences(place.load(f"{STATIC}-{name}")), sets)
            parts += place.measure(model, [row for row in rows if row.set in sets], chosen[name])["tasks"]
        mask_lists = {name: mask.int().tolist() for name, mask in chosen.items()}
        return {"masks": {"category": {"mask": mask_lists, "tasks": parts}}}
    return {
        "masks": {
            name: {"mask": mask.int().tolist(), **place.measure(model, rows, mask)} for name, mask in masks.items()
        }
    }


def _losses(
    model: torch.nn.Module, examples: list[Example], batch_size: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """From masks `[N, L, H]` to the examples' mean NLL under each, `[N]`."""

    def loss(masks: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(masks))
        for example in examples:
            rows = measure(model, [example] * len(masks), batch_size, masks).rows
            total += torch.tensor([row.nll for row in rows])
        return total / len(examples)

    return loss


def _adapter(job: Job, place: Workplace) -> dict[str, Any]:
    model = place.load(job.needs[0])
    rows = place.evaluation_rows()
    if job.what == "mixed":
        mixed = interleave(place.evaluation, len(rows), job.seed)
        together, alone = measure(model, mixed, len(place.evaluation)), measure(model, mixed, 1)
        same = (together.decisions == alone.decisions).float().mean().item()
        return {"same_decisions": same, "together": summary(together), "alone": summary(alone)}
    if job.what == "bias":
        result = {}
        for bias in (-4.0, -2.0, -1.0, 1.0, 2.0, 4.0):
            model.peft_config["default"].sparsity_bias = bias
            result[str(bias)] = place.measure(model, rows)
        return {"bias": result}
    if job.what == "sampled":
        torch.manual_seed(job.seed)
        model.train()  # decisions are sampled; the temperature changes their gradient, not the draw
        return {"sampled": place.measure(model, rows)}
    ways = {"routed": None, "full": "retrieval", "all_sparse": "sparse"}
    lengths = {}
    for length in place.lengths:
        resized = [resize(place.tokenizer, row, length, place.evaluation[row.set]) for row in rows]
        examples = [example for example in resized if example is not None]
        lengths[str(length)] = {way: place.measure(model, examples, forced) for way, forced in ways.items()}
    return {"lengths": lengths}
