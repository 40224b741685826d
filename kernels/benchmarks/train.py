"""Rows `train/...`: forward and backward of one layer's attention with a routing decision that learns."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from baselines import DENSE, Attention, flash_attn_4_version
from benchmark import compare, require_agreement, time_runs
from inputs import SHAPES, SIZES, label, make_gate, make_inputs
from torch import Tensor

from elastic_kernels import routed_attention
from elastic_kernels.routed_attention.counterfactual import num_strata


SHARE = 0.75
FRACTIONS = (0.25, 0.125)
CONDITIONS = (
    f"B=1, {SHAPES}; forward and backward to query, key, value and decision; normal inputs; rounds alternate, median; "
    "dual: the named dense kernel and streaming attention (routed_attention with every head sparse) forward and "
    "backward for all heads, mixed by the decision; dense: the named kernel alone, no decision; "
    "counterfactual: the decision's gradient from the named share of queries, against that from all"
)


def rows(lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The rows of each length, one a baseline."""
    for length in lengths:
        yield from measure(length)


def measure(length: int) -> Iterator[dict[str, Any]]:
    """The rows of one length."""
    inputs = [x.requires_grad_() for x in make_inputs(length)]
    gate = make_gate(SHARE).float().requires_grad_()
    version = flash_attn_4_version()
    kernels = {name: kernel for name, kernel in DENSE.items() if name != "fa4" or version is not None}
    ours = functools.partial(routed_attention, gate=gate, **SIZES)
    duals = {f"dual-{name}": functools.partial(dual_pass, gate=gate, dense=x) for name, x in kernels.items()}
    expected = ours(*inputs).detach()
    for name, attend in duals.items():
        require_agreement(name, attend(*inputs).detach(), expected)
    upstream = torch.randn_like(expected)
    sampled = {f"counterfactual{x:g}": functools.partial(ours, **sample(gate, length, x)) for x in FRACTIONS}
    routed = {"ours": ours} | duals | sampled
    plain = {f"dense-{name}": kernel for name, kernel in kernels.items() if name != "fa2"}
    runs = {name: forward_and_backward(attend, [*inputs, gate], upstream) for name, attend in routed.items()}
    runs |= {name: forward_and_backward(attend, inputs, upstream) for name, attend in plain.items()}
    for run in runs.values():
        run()
    times = time_runs(runs, repeats=2)
    for name in [*duals, *plain]:
        fields = {"baseline_version": version} if name.endswith("fa4") else {}
        yield compare(f"train/{label(length)}/msr{SHARE:g}/{name}", times["ours"], name, times[name], **fields)
    for name in sampled:
        yield compare(f"train/{label(length)}/msr{SHARE:g}/{name}", times[name], "counterfactual1", times["ours"])


def sample(gate: Tensor, length: int, fraction: float) -> dict[str, Any]:
    """Options of `routed_attention` that draw a random share of the queries."""
    noise = torch.rand(*gate.shape, num_strata(length, fraction), device=gate.device)
    return {"counterfactual_fraction": fraction, "counterfactual_noise": noise}


def dual_pass(query: Tensor, key: Tensor, value: Tensor, *, gate: Tensor, dense: Attention) -> Tensor:
    """Both modes of every head, mixed by the float gate `[1, Hkv]`."""
    all_sparse = torch.ones_like(gate, dtype=torch.bool)
    streaming = routed_attention(query, key, value, all_sparse, **SIZES)
    weight = gate.repeat_interleave(query.shape[1] // key.shape[1], 1)[:, :, None, None].to(query.dtype)
    return (1 - weight) * dense(query, key, value) + weight * streaming


def forward_and_backward(attend: Attention, leaves: Sequence[Tensor], upstream: Tensor) -> Callable[[], object]:
    """One step: attention of the first three leaves, and the gradients of all of them."""
    return lambda: torch.autograd.grad(attend(*leaves[:3]), leaves, upstream)
