"""Rows `router/...`: one layer's router, from the keys of the boundary tokens to the heads' decisions."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from benchmark import compare, time_runs
from inputs import HEAD_DIM, KV_HEADS, label
from torch import Tensor

from elastic_kernels.router import LinearWeights, RouterWeights, router


POOL_SIZE, EXPANSION, HIDDEN_SIZE = 100, 4, 4096
# Weights that take turns, as the layers of a model do, so that they come from memory and not from L2.
LAYERS = 128
CONDITIONS = (
    f"one sequence, {KV_HEADS} key-value heads of dimension {HEAD_DIM}, bf16 keys of its first and last {POOL_SIZE} "
    f"tokens, standardised, float32 weights, expansion {EXPANSION}; {LAYERS} routers take turns in a CUDA graph; the "
    "baseline is the plain torch reference in a CUDA graph; reference_eager_ms: without one; "
    f"gather_and_projection_ms: those tokens gathered from hidden states of size {HIDDEN_SIZE} and projected to keys"
)


def rows(lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The row of each length."""
    for length in lengths:
        yield measure(length)


@torch.no_grad()
def measure(length: int) -> dict[str, Any]:
    """One row."""
    tokens = boundary_tokens(length).cuda()
    keys = torch.randn(1, len(tokens), KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    valid = torch.ones(1, len(tokens), dtype=torch.bool, device="cuda")
    statistics = {
        "mean": torch.randn(KV_HEADS, HEAD_DIM, device="cuda"),
        "deviation": torch.rand(KV_HEADS, HEAD_DIM, device="cuda") + 0.5,
    }
    layers = [make_weights() for _ in range(LAYERS)]

    def run_by(implementation: str | None) -> Callable[[], object]:
        turns = itertools.cycle(layers)
        return lambda: router(keys, valid, next(turns), **statistics, implementation=implementation)

    hidden = torch.randn(length, HIDDEN_SIZE, device="cuda", dtype=torch.bfloat16)
    projections = itertools.cycle(torch.randn(8, KV_HEADS * HEAD_DIM, HIDDEN_SIZE, device="cuda").bfloat16().unbind())
    reference = run_by("reference")
    runs = {"router": run_by(None), "reference": reference}
    times = time_runs(runs, repeats=10, launches=LAYERS)
    eager = time_runs({"eager": reference}, repeats=10)["eager"]
    gather = time_runs(
        {"gather": lambda: gather_and_project(hidden, tokens, next(projections))}, repeats=10, launches=8
    )
    fields = {"reference_eager_ms": eager.median, "gather_and_projection_ms": gather["gather"].median}
    return compare(f"router/{label(length)}", times["router"], "reference", times["reference"], **fields)


def boundary_tokens(length: int) -> Tensor:
    """Positions of the first and the last `POOL_SIZE` tokens, int64."""
    return torch.cat([torch.arange(POOL_SIZE), torch.arange(length - POOL_SIZE, length)])


def gather_and_project(hidden: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
    """Keys of the boundary tokens, `[tokens, KV_HEADS * HEAD_DIM]`, from hidden states `[S, HIDDEN_SIZE]`."""
    return F.linear(hidden[tokens], weight)


def make_weights(device: str = "cuda") -> RouterWeights:
    """Random weights of one router."""
    width = EXPANSION * HEAD_DIM
    shapes = [(width, HEAD_DIM), (HEAD_DIM, width), (width, HEAD_DIM), (HEAD_DIM, width), (2, HEAD_DIM)]
    return RouterWeights(
        *(
            LinearWeights(torch.randn(shape, device=device) / shape[1] ** 0.5, torch.randn(shape[0], device=device))
            for shape in shapes
        )
    )
