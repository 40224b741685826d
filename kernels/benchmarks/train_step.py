"""Rows `train_step/...`: a training step of a whole model's routers, against the same step with both modes in full."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from baselines import DENSE
from benchmark import Times, compare, peak_memory, wall_milliseconds
from inputs import label
from torch import Tensor
from train import dual_pass
from whole_model import make_decisions, make_model

from elastic_peft import RoutingTape, hooks, operators


ANSWER = 1024
ROUNDS = 2
WARM_UP = 4096
# The number of tokens of the paper's training: 300 steps of 48 sequences of 64K.
PAPER_TOKENS = 300 * 48 * 65_536
CONDITIONS = (
    f"Llama-3.1-8B shapes, random bf16 weights, frozen but for the routers, FA-SSA, one sequence with an answer of "
    f"{ANSWER} tokens, non-reentrant gradient checkpointing, forward and backward of the loss of the answer and the "
    "sparsity; sampled decisions forced by the noise; baseline: the same step with both modes of every head forward "
    "and backward, dense ones by the named kernel; rounds alternate, host's clock, median; h200_hours: "
    "300 steps of 48 sequences of 64K tokens at ours_tokens_per_s"
)


def rows(lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The rows of each length, one a dense kernel of the baseline."""
    model = make_model(["FA-SSA"]).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for length in lengths:
        yield from measure(model, length)


def measure(model: torch.nn.Module, length: int) -> Iterator[dict[str, Any]]:
    """The rows of one length."""
    runs = {"ours": make_step(model, length, None)}
    runs |= {f"dual-{name}": make_step(model, length, name) for name in ("fa2", "cudnn")}
    for name in runs:
        make_step(model, WARM_UP, name.removeprefix("dual-") if name != "ours" else None)()
    times: dict[str, list[float]] = {name: [] for name in runs}
    peak: dict[str, int] = {}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            peak[name] = peak_memory(lambda run=run, name=name: times[name].append(wall_milliseconds(run)))
    for baseline, suffix in (("dual-fa2", ""), ("dual-cudnn", "/dual-cudnn")):
        row = compare(
            f"train_step/{label(length)}{suffix}",
            Times(times["ours"], "wall"),
            baseline,
            Times(times[baseline], "wall"),
            msr=make_decisions().float().mean().item(),
            peak_bytes=peak["ours"],
            peak_memory_ratio=peak["ours"] / peak[baseline],
        )
        for prefix in ("ours", "baseline"):
            row[f"{prefix}_tokens_per_s"] = length / row[f"{prefix}_ms"] * 1e3
        yield row | {"h200_hours": PAPER_TOKENS / row["ours_tokens_per_s"] / 3600}


def make_step(model: torch.nn.Module, length: int, dense: str | None) -> Callable[[], Tensor]:
    """A step on one sequence, its gradients thrown away; returns its loss.

    Args:
        model: the routed model in training mode.
        length: tokens.
        dense: dense kernel of a step that runs both modes; `None` for ours.
    """
    ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(length))
    ids, prompt_end = ids.to(model.device), torch.tensor([length - ANSWER], device=model.device)

    def step() -> Tensor:
        tape = RoutingTape()
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(hooks, "uniform_noise", forcing_noise))
            if dense is not None:
                attend = functools.partial(both_modes, dense=dense)
                stack.enter_context(mock.patch.object(operators, "routed_attention", attend))
            options: dict[str, Any] = {"prompt_end": prompt_end, "elastic_tape": tape, "use_cache": False}
            logits = model(ids, logits_to_keep=ANSWER + 1, **options).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, -ANSWER:].flatten())
            loss = loss + (tape.msr() - 0.7).abs().mean()
            loss.backward()  # recomputes each layer, with the same attention
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def forcing_noise(seeds: Sequence[int], num_heads: Sequence[int]) -> list[Tensor]:
    """Noise in the place of `elastic_peft.gating.uniform_noise` that samples `make_decisions()`."""
    decisions = make_decisions()[: len(num_heads), : max(num_heads)].expand(len(seeds), -1, -1)
    return list(torch.stack([~decisions, decisions], dim=-1).mul(1 - 1e-7).float().unbind(dim=1))


def both_modes(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, *, dense: str, **options: Any) -> Tensor:
    """`dual_pass` in the place of `routed_attention`, for one sequence without padding."""
    return dual_pass(query, key, value, gate=gate, dense=DENSE[dense])
