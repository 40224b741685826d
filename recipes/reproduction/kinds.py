"""How each kind of job runs: a training, static masks, a trained adapter in other conditions, or on RULER."""

from typing import Any

import torch
from demo_model import MODEL_ID
from reproduction.crossed import crossed
from reproduction.examples import CROSSED, choose_phrasing, interleave
from reproduction.jobs import Job
from reproduction.lengths import resize
from reproduction.masks import measure_masks
from reproduction.measuring import measure
from reproduction.phrasings import varied
from reproduction.representations import task_similarity
from reproduction.results import mean_msr, read_result, static_masks
from reproduction.training import load_base, train
from reproduction.workplace import Workplace, summary

from elastic_peft.evaluation.ruler import build_examples
from elastic_peft.evaluation.ruler_run import evaluate
from elastic_peft.evaluation.static_masks import static_preferences


def run_job(job: Job, place: Workplace) -> dict[str, Any]:
    """Runs a job; its result, ready for JSON."""
    return {"train": _train, "masks": measure_masks, "adapter": _adapter, "ruler": _ruler}[job.kind](job, place)


def _train(job: Job, place: Workplace) -> dict[str, Any]:
    config, arguments = place.recipe(job)
    if job.is_blind:  # one target for all, so that the static mask has the routed adapter's mean sparsity
        target = mean_msr(read_result(place.output, job.needs[0]), job.sets)
        config["t_values"] = dict.fromkeys(config["t_values"], target)
    keeps_unseen = job.phrasing in ("seen", "varied")
    examples = choose_phrasing(place.tokenizer, place.training, "seen" if keeps_unseen else job.phrasing)
    if job.phrasing == "varied":
        examples = varied(place.tokenizer, examples, job.seed)
    examples = {name: examples[name] for name in job.sets}
    if job.is_crossed:
        examples = crossed(place.tokenizer, examples, job.seed)
    model, log = train(
        load_base(place.model, place.device),
        place.tokenizer,
        {name: [example.cut(job.answer_tokens) for example in members] for name, members in examples.items()},
        place.output / "trainer" / job.name,
        config=config,
        arguments=arguments,
        seed=job.seed,
        is_blind=job.is_blind,
    )
    model.peft_config["default"].base_model_name_or_path = MODEL_ID  # wherever it was loaded from here
    model.save_pretrained(place.adapter(job.name), save_embedding_layers=False)  # "auto" would ask the Hub
    targets = model.peft_config["default"].t_values
    result = {"log": log, "targets": targets, **place.measure(model, place.evaluation_rows())}
    if job.is_blind:
        result["scores"] = static_preferences(model).tolist()
    if keeps_unseen:
        pools = (place.evaluation, place.training)
        unseen = [choose_phrasing(place.tokenizer, pool, "unseen") for pool in pools]
        rows = [example for name in job.sets for example in (unseen[0][name] + unseen[1][name])[: place.rows]]
        result["unseen"] = {
            way: place.measure(model, rows, forced) for way, forced in (("routed", None), ("full", "retrieval"))
        }
    return result


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
    if job.what == "similarity":
        return {"similarity": task_similarity(model, rows)}
    if job.what == "sampled":
        torch.manual_seed(job.seed)
        model.train()  # decisions are sampled; the temperature changes their gradient, not the draw
        return {"sampled": place.measure(model, rows)}
    ways: dict[str, str | None] = {"routed": None, "full": "retrieval", "all_sparse": "sparse"}
    if job.what == "crossed":
        documents = {name: members[: place.rows] for name, members in place.evaluation.items()}
        members = crossed(place.tokenizer, documents, job.seed).values()
        others = [example for of_set in members for example in of_set if example.set in CROSSED]
        return {"crossed": {way: place.measure(model, others, forced) for way, forced in ways.items()}}
    lengths = {}
    for length in place.lengths:
        resized = [resize(place.tokenizer, row, length, place.evaluation[row.set]) for row in rows]
        examples = [example for example in resized if example is not None]
        lengths[str(length)] = {way: place.measure(model, examples, forced) for way, forced in ways.items()}
    return {"lengths": lengths}


def _ruler(job: Job, place: Workplace) -> dict[str, Any]:
    adapter, *jobs = job.needs
    masks = static_masks({name: read_result(place.output, name) for name in jobs})
    examples = build_examples(place.tokenizer, place.ruler_sources, int(job.what), samples=place.ruler_samples)
    static = {way: torch.tensor(mask, dtype=torch.bool) for way, mask in masks.items()}
    rows = evaluate(
        place.load(adapter), place.tokenizer, examples, static=static, batch_tokens=place.ruler_batch_tokens
    )
    return {"ruler": rows}
