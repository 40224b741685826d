"""Made-up results of every job of the reproduction, as the jobs would leave them."""

import random
from dataclasses import asdict
from pathlib import Path
from statistics import mean

from reproduction.examples import SENSITIVE, TASKS
from reproduction.jobs import all_jobs
from reproduction.masks import CATEGORIES, CURVE
from reproduction.results import write_result
from reproduction.workplace import Workplace


#: Says which recipe a job has; nothing runs there.
PLACE = Workplace(Path(), Path(), Path(), "cpu")
LAYERS, HEADS = 30, 3
#: NLL of each set under full attention; every set loses twice its share of sparse heads squared.
FULL = dict(zip(TASKS, (1.3, 3.1, 0.3, 2.0, 2.6, 2.0, 4.3)))
BIASES = (-4.0, -2.0, -1.0, 1.0, 2.0, 4.0)


def table(msr, offset=0.0, count=2):
    """A table in which each set has the MSR that `msr` says, and loses by it.

    Each example is harder than the one before it: a mean over another `count` than two is another mean.
    """
    draw = random.Random(str(sorted(msr.items())))
    rows = []
    for name, task in TASKS.items():
        share = msr[name]
        frequency = [[min(max(draw.gauss(share, 0.25), 0), 1) for _ in range(HEADS)] for _ in range(LAYERS)]
        nll_by_example = [FULL[name] + 2 * share**2 + offset + index - 0.5 for index in range(count)]
        nll = mean(nll_by_example)
        figures = {
            "nll": nll,
            "nll_by_example": nll_by_example,
            "accuracy": 1 / (1 + nll),
            "msr": share,
            "esr": 0.8 * share,
            "esr_last_layer": share,
        }
        rows.append({"task": task, "set": name, "n": count, **figures, "frequency": frequency})
    return {"implementations": ["triton"], "tasks": rows}


def routed(shift=0.0, offset=-0.8):
    def clip(share):
        return min(max(share + shift, 0), 1)

    return table({name: clip(0.67 if name in SENSITIVE else 0.83) for name in TASKS}, offset)


def flat(share, count=2):
    return table(dict.fromkeys(TASKS, share), count=count)


def log(tasks, steps=300):
    lines = []
    for step in range(10, steps + 1, 10):
        line = {"step": step, "lm_loss": 3 - step / 300, "sparsity_loss": 0.2 * (1 - step / 400), "temperature": 1.0}
        for index, task in enumerate(tasks):
            line[f"msr/{task}"] = 0.5 + 0.3 * step / steps * (1 + index / 10)
            line[f"lambda1/{task}"] = 0.2 + step / 400 + index / 10
            line[f"lambda2/{task}"] = 0.3 + step / 500 - index / 20
        lines.append(line)
    return lines


def result(job):
    head = {"job": asdict(job), "recipe": PLACE.recipe(job)._asdict(), "seconds": 60.0}
    head |= {"hardware": "NVIDIA H200", "versions": {"torch": "2.11.0"}}
    if job.kind == "train":
        targets = head["recipe"]["config"]["t_values"]
        body = {"log": log(targets), "targets": targets, **routed(shift=0.01 * job.seed)}
        if job.is_blind:
            body["scores"] = [[layer + head for head in range(HEADS)] for layer in range(LAYERS)]
        if job.phrasing in ("seen", "varied"):
            body["unseen"] = {"routed": routed(0.02), "full": flat(0.0)}
    elif job.kind == "masks":
        body = {"masks": masks(job)}
    elif job.kind == "ruler":
        body = {"ruler": ruler(job)}
    else:
        body = conditions(job)
    return {**head, **body}


def ruler(job):
    row = {"length": int(job.what), "mode_pair": job.config["mode_pair"], "msr": 0.7, "esr": 0.5, "n": 20}
    return [{"task": task, **row, "score": {"full": 50.0, "routed": 49.0}} for task in ("vt", "cwe")]


def masks(job):
    if job.what == "bounds":
        dense = "all_retrieval" if "xa-ssa" in job.name else "full"
        return {dense: flat(0.0), "all_sparse": flat(1.0)}
    if job.what == "random":
        return {f"random{seed}": {**flat(0.73 + seed / 100), "mask": [[0, 1, 1]] * LAYERS} for seed in range(5)}
    if job.what == "category":
        return {"category": {**flat(0.75), "mask": {name: [] for name in CATEGORIES}}}
    if job.what == "curve":
        return {f"{name} {share}": flat(share) for name in job.needs for share in CURVE}
    return {job.what: {**flat(0.75), "mask": [[1, 0, 1]] * LAYERS}}


def conditions(job):
    if job.what == "mixed":
        return {"same_decisions": 1.0, "together": routed(), "alone": routed()}
    if job.what == "bias":
        return {"bias": {str(bias): routed(bias / 20, -0.8 + bias / 40) for bias in BIASES}}
    if job.what == "sampled":
        return {"sampled": routed(-0.03)}
    if job.what == "similarity":
        matrix = [[1.0 if row == column else 0.3 for column in range(len(TASKS))] for row in range(len(TASKS))]
        return {"similarity": {"sets": list(TASKS), "keys": matrix, "input": matrix, "task_mlp": matrix}}
    if job.what == "crossed":
        ways = {"routed": routed(), "full": flat(0.0), "all_sparse": flat(1.0)}
        return {"crossed": {way: of_other_tasks(of_sets) for way, of_sets in ways.items()}}
    return {"lengths": {"1024": {"routed": routed(), "full": flat(0.0), "all_sparse": flat(1.0)}}}


def of_other_tasks(of_sets):
    rows = [{**row, "set": f"{row['set']}-question", "task": "single_qa"} for row in of_sets["tasks"]]
    return {**of_sets, "tasks": rows}


def all_results():
    return {job.name: result(job) for job in all_jobs()}


def write_all(output, results):
    (output / "jobs").mkdir()
    for name, of_job in results.items():
        write_result(output, name, of_job)
