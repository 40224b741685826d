"""Rows `prefill/...`: routed attention of one layer against what a user would run instead; rows `peak_memory/...`."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from baselines import DENSE, FlexAttention, flash_attn_4_version, serial_dispatch
from benchmark import Times, compare, peak_memory, require_agreement, time_runs
from inputs import SHAPES, SIZES, label, make_gate, make_inputs
from torch import Tensor

from elastic_kernels import routed_attention
from elastic_kernels.routed_attention.dispatch import choose_implementation


CONDITIONS = (
    f"B=1, {SHAPES}; normal inputs; rounds of all candidates alternate, median; up to 8K from CUDA graphs; "
    "serial: heads gathered by mode, a dense launch (FA2, or flash-attn-4) and a streaming launch (ours), scattered "
    "back; flex: compiled FlexAttention, block mask built anew"
)
SHARES = (0.0, 0.5, 0.75, 0.875, 1.0)
SERIAL = {"serial": ("fa2", (0.75, 0.875)), "serial-fa4": ("fa4", (0.75,))}
FLEX = (131_072, 0.75)
MEMORY_SHARE = 0.75
GRAPH_LENGTH, GRAPH_LAUNCHES = 8192, 10
# Dense attention of one layer takes about this many seconds a squared token; a candidate's round should take 0.2 s.
DENSE_SECONDS, ROUND_SECONDS = 1.7e-11, 0.2


def rows(lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The rows of each length.

    Raises:
        RuntimeError: a baseline computes something else than `routed_attention`.
    """
    for length in lengths:
        inputs = make_inputs(length)
        yield memory_row(length, inputs)  # while nothing but the inputs is allocated
        yield from attention_rows(length, measure(length, inputs), choose_implementation(None, *inputs))


def measure(length: int, inputs: tuple[Tensor, Tensor, Tensor]) -> dict[tuple, Times]:
    """Times of all candidates at one length."""
    runs = candidates(length, inputs)
    check(runs)
    launches = GRAPH_LAUNCHES if length <= GRAPH_LENGTH else 1
    return time_runs(runs, repeats=choose_repeats(length, launches), launches=launches)


def baseline_names(length: int, share: float, *, has_flash_attn_4: bool) -> list[str]:
    """What routed attention at this length and share of sparse heads is compared with."""
    names = list(DENSE) + [name for name, (_, shares) in SERIAL.items() if share in shares]
    names += ["flex"] if (length, share) == FLEX else []
    return [name for name in names if has_flash_attn_4 or not name.endswith("fa4")]


def candidates(length: int, inputs: tuple[Tensor, Tensor, Tensor]) -> dict[tuple, Callable[[], Any]]:
    """Everything to time at one length, by (name, share); dense kernels have no share."""
    runs: dict[tuple, Callable[[], Any]] = {}
    for share in SHARES:
        gate = make_gate(share, device=inputs[0].device)
        runs["ours", share] = functools.partial(routed_attention, *inputs, gate, **SIZES)
        for name in baseline_names(length, share, has_flash_attn_4=flash_attn_4_version() is not None):
            if name in DENSE:
                runs[name,] = functools.partial(DENSE[name], *inputs)
            elif name in SERIAL:
                runs[name, share] = serial_dispatch(*inputs, gate, DENSE[SERIAL[name][0]])
            else:
                flex = FlexAttention(*inputs, gate)
                runs["flex-mask", share] = flex.mask
                runs["flex", share] = functools.partial(flex.attend, flex.mask())
    return runs


def check(runs: dict[tuple, Callable[[], Any]]) -> None:
    """Run every candidate once, and raise RuntimeError if one disagrees with `routed_attention`."""
    outputs = {key: run() for key, run in runs.items()}
    for (name, *share), output in outputs.items():
        if name in ("ours", "flex-mask"):
            continue
        require_agreement(name, output, outputs["ours", share[0] if share else 0.0])


def choose_repeats(length: int, launches: int) -> int:
    """Runs a round, from the expected time of dense attention."""
    return max(1, min(20, round(ROUND_SECONDS / (DENSE_SECONDS * length**2 * launches))))


def attention_rows(length: int, times: dict[tuple, Times], implementation: str) -> Iterator[dict[str, Any]]:
    """The rows of one length from the times of its candidates."""
    version = flash_attn_4_version()
    for share in SHARES:
        for name in baseline_names(length, share, has_flash_attn_4=version is not None):
            fields: dict[str, Any] = {"implementation": implementation}
            theirs = times[(name,) if name in DENSE else (name, share)]
            if name.endswith("fa4"):
                fields["baseline_version"] = version
            if name == "flex":
                mask = times["flex-mask", share]
                fields |= {"baseline_mask_ms": mask.median, "baseline_attention_ms": theirs.median}
                both = [sum(pair) for pair in zip(mask.milliseconds, theirs.milliseconds)]
                theirs = Times(both, theirs.timed_by)
            row = f"prefill/{label(length)}/msr{share:g}/{name}"
            yield compare(row, times["ours", share], name, theirs, **fields)


def memory_row(length: int, inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
    """Peak memory of a routed layer's attention over that of dense cuDNN attention, inputs included in both."""
    gate = make_gate(MEMORY_SHARE)
    ours = peak_memory(lambda: routed_attention(*inputs, gate, **SIZES))
    theirs = peak_memory(lambda: DENSE["cudnn"](*inputs))
    fields = {"ours_bytes": ours, "baseline": "cudnn", "baseline_bytes": theirs, "ratio": ours / theirs}
    return {"name": f"peak_memory/{label(length)}", "msr": MEMORY_SHARE} | fields
