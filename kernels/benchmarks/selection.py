"""Rows `selection/...`: choosing XAttention's blocks, as a share of the time of dense attention.

Random keys have no block worth keeping, so the inputs have planted ones. Each key-value head gives every key block one
of `TOPICS` orthogonal directions, drawn at random, and each query block of a query head asks for one of them: a query
scores the keys of its topic about `STRENGTH` above the others. About one block in `TOPICS` is kept, besides the first
and the diagonal one.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from baselines import DENSE
from benchmark import compare, time_runs
from inputs import HEAD_DIM, HEADS, KV_HEADS, SHAPES, SIZES, label, make_gate
from torch import Tensor

from elastic_kernels import block_selection, routed_attention


BLOCK_SIZE, TOPICS, STRENGTH = 128, 10, 8.0
CONDITIONS = (
    f"B=1, {SHAPES}; all heads; blocks of {BLOCK_SIZE}, stride 16, threshold 0.9; normal inputs, in which each key "
    f"block carries one of {TOPICS} orthogonal directions and each query block asks for one, worth {STRENGTH:g} of "
    "score; density: share of causal query-key pairs in kept blocks; the baseline is the faster of dense "
    "routed_attention and cuDNN"
)


def rows(lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The row of each length."""
    for length in lengths:
        query, key, value = planted_inputs(length)
        runs = {
            "selection": functools.partial(block_selection, query, key),
            "ours": functools.partial(routed_attention, query, key, value, make_gate(0), **SIZES),
            "cudnn": functools.partial(DENSE["cudnn"], query, key, value),
        }
        outputs = {name: run() for name, run in runs.items()}
        density = outputs["selection"].computed_share(torch.tensor([length], device="cuda")).mean().item()
        times = time_runs(runs, repeats=3)
        selection, dense = times.pop("selection"), {name: x.median for name, x in times.items()}
        faster = min(dense, key=dense.__getitem__)
        shares = {f"share_of_dense_{name}": selection.median / x for name, x in dense.items()}
        shares |= {"share_of_dense": selection.median / dense[faster], "density": density}
        yield compare(f"selection/{label(length)}", selection, faster, times[faster], **shares)


def planted_inputs(
    length: int, *, heads: int = HEADS, kv_heads: int = KV_HEADS, device: str = "cuda"
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value `[1, heads, length, HEAD_DIM]` in bf16 with planted blocks."""
    generator = torch.Generator(device).manual_seed(length)

    def normal(heads: int) -> Tensor:
        shape = (1, length, heads, HEAD_DIM)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    topics = torch.linalg.qr(torch.randn(HEAD_DIM, TOPICS, generator=generator, device=device)).Q.T
    topics = topics * (STRENGTH * HEAD_DIM**0.5) ** 0.5  # the product of a topic with itself, scaled, is STRENGTH

    def plant(tensor: Tensor) -> Tensor:
        blocks = -(-length // BLOCK_SIZE)
        topic = torch.randint(TOPICS, (blocks, tensor.shape[2]), generator=generator, device=device)
        tensor += topics.to(tensor.dtype)[topic].repeat_interleave(BLOCK_SIZE, 0)[:length]
        return tensor.transpose(1, 2)

    return plant(normal(heads)), plant(normal(kv_heads)), normal(kv_heads).transpose(1, 2)
