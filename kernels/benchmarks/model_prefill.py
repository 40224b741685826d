"""Rows `model_prefill/...`: the prefill of a whole routed model against the same model with its adapter disabled.

Llama-3.1-8B shapes with random weights; decisions forced to a mean model sparsity ratio of 0.70 over the layers.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from benchmark import Times, compare, peak_memory, wall_milliseconds
from inputs import HEADS, label
from torch.nn.attention import SDPBackend, sdpa_kernel
from whole_model import MODE_PAIRS, make_decisions, make_model

from elastic_kernels import KeptBlocks, block_selection
from elastic_peft import forced_routing, last_routing, operators


CONDITIONS = (
    "Llama-3.1-8B shapes, random bf16 weights, one prompt, decisions forced; baseline: the same model on causal cuDNN "
    "SDPA with the adapter disabled; alternating runs after a short one of each, median"
)
BLOCK_SIZE, DENSITY = 128, 0.1
WARM_UP = 4096
XA_CONDITIONS = (
    f"random weights give the selection nothing to find: it runs, and a random choice of {DENSITY:.0%} of the causal "
    "block pairs, first and diagonal block included, takes the place of its result"
)


def rows(lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The rows of each length, one a mode pair."""
    model, decisions = make_model(MODE_PAIRS), make_decisions().cuda()
    measure(model, decisions, WARM_UP, MODE_PAIRS)
    for length in lengths:
        yield from measure(model, decisions, length, choose_pairs(length))


def choose_pairs(length: int) -> Sequence[str]:
    """XAttention pays for its selection at long prompts only."""
    return MODE_PAIRS if length >= 262_144 else MODE_PAIRS[:1]


def choose_rounds(length: int) -> int:
    """Timed runs of each model: one of dense attention over 256K tokens takes most of a minute."""
    return {262_144: 1, 131_072: 2}.get(length, 3)


@torch.no_grad()
def measure(
    model: torch.nn.Module, decisions: torch.Tensor, length: int, pairs: Sequence[str]
) -> list[dict[str, Any]]:
    """The rows of one length."""
    ids = torch.randint(3, 512, (1, length), device="cuda")
    kept: KeptBlocks | None = None
    implementations: dict[str, str] = {}

    def routed(pair: str) -> None:
        model.set_adapter(pair)
        with forced_routing(model, decisions), contextlib.nullcontext() if kept is None else keeping(kept):
            model(ids, use_cache=False, logits_to_keep=1)
        implementations[pair] = last_routing(model).implementation

    def dense() -> None:
        with model.disable_adapter(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            model(ids, use_cache=False, logits_to_keep=1)

    runs: dict[str, Callable[[], None]] = {"dense": dense}
    runs |= {pair: (lambda pair=pair: routed(pair)) for pair in pairs}
    peak: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(choose_rounds(length)):
        for name, run in runs.items():
            # The list that stands in for the selection's is there besides what the selection allocates itself.
            kept = random_kept_blocks(HEADS, -(-length // BLOCK_SIZE), device="cuda") if "XA" in name else None
            peak[name] = peak_memory(lambda run=run, name=name: times[name].append(wall_milliseconds(run)))
    result = []
    for pair in pairs:
        fields = {
            "msr": decisions.float().mean().item(),
            "peak_memory_ratio": peak[pair] / peak["dense"],
            "implementation": implementations[pair],
        }
        if "XA" in pair:
            assert kept is not None  # of the last pair that ran, alike for all
            density = kept.computed_share(torch.tensor([length])).mean().item()
            fields |= {"density": density, "conditions": XA_CONDITIONS}
        name = f"model_prefill/{label(length)}/{pair.lower()}"
        result.append(compare(name, Times(times[pair], "wall"), "cudnn", Times(times["dense"], "wall"), **fields))
    return result


@contextlib.contextmanager
def keeping(kept: KeptBlocks) -> Iterator[None]:
    """Context in which routed layers select blocks as ever and then attend `kept` instead of what was selected."""

    def select(*args: Any, **kwargs: Any) -> KeptBlocks:
        block_selection(*args, **kwargs)
        return kept

    with mock.patch.object(operators, "block_selection", select):
        yield


def random_kept_blocks(heads: int, blocks: int, *, device: str) -> KeptBlocks:
    """The first and the diagonal block of each row, and as many others as make `DENSITY` of it on average."""
    row = torch.arange(blocks, device=device)
    others = (row - 1).clamp(min=1)
    chance = (DENSITY * (row + 1) - 2).clamp(min=0) / others
    generator = torch.Generator(device).manual_seed(blocks)
    mask = torch.rand(1, heads, blocks, blocks, generator=generator, device=device) < chance[:, None]
    mask |= (row[:, None] == row) | (row == 0)
    return KeptBlocks.from_mask(mask & (row <= row[:, None]), BLOCK_SIZE)
