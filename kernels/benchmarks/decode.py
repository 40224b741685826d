"""Rows `decode/...`: one new token attends a full cache, routed against dense."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from benchmark import compare, copy_bandwidth, require_agreement, time_runs
from inputs import HEAD_DIM, HEADS, KV_HEADS, SHAPES, SINK_SIZE, WINDOW_SIZE, label, make_gate
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from elastic_kernels.routed_decode import routed_decode


SHARE = 0.75
# Caches that take turns, so that none is left in L2 when its turn comes.
COPIES = {1: 4, 8: 2}
LAUNCHES = 8
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
CONDITIONS = (
    f"one query token, {SHAPES}; plain cache; normal inputs; several caches take turns in a CUDA graph; rounds "
    "alternate, median; the baseline is the fastest of SDPA's backends and all_full, routed_decode with every head "
    "full; bandwidth_share: bytes of keys and values that the routing needs, a second, over the bytes read and "
    "written a second by a device-to-device copy"
)


def rows(lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The rows of each length, one a batch size."""
    bandwidth = copy_bandwidth()
    for length, (batch, copies) in itertools.product(lengths, COPIES.items()):
        yield measure(length, batch, copies, bandwidth)


def measure(length: int, batch: int, copies: int, bandwidth: float) -> dict[str, Any]:
    """One row; `bandwidth` in bytes a second."""
    query = torch.randn(batch, HEADS, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    shape = (2, batch, KV_HEADS, length, HEAD_DIM)
    caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).unbind() for _ in range(copies)]
    gates = {"routed": make_gate(SHARE, batch=batch), "all_full": make_gate(0, batch=batch)}
    sizes = {"sink_size": SINK_SIZE, "window_size": WINDOW_SIZE}
    attend: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        name: functools.partial(routed_decode, gate=gate, **sizes) for name, gate in gates.items()
    }
    expected = attend["all_full"](query, *caches[0])
    for name, backend in BACKENDS.items():
        sdpa = functools.partial(dense, backend=backend)
        try:
            output = sdpa(query, *caches[0])
        except RuntimeError:  # not every backend takes grouped heads and one query
            continue
        require_agreement(name, output, expected)
        attend[name] = sdpa
    runs = {name: take_turns(run, query, caches) for name, run in attend.items()}
    times = time_runs(runs, repeats=10, launches=LAUNCHES)
    routed = times.pop("routed")
    fastest = min(times, key=lambda name: times[name].median)
    share = needed_bytes(length, batch, SHARE) / (routed.median / 1e3) / bandwidth
    fields = {f"{name}_ms": x.median for name, x in times.items()} | {"bandwidth_share": share}
    fields["copy_bandwidth_gb_per_s"] = bandwidth / 1e9
    return compare(f"decode/{label(length)}/msr{SHARE:g}/batch{batch}", routed, fastest, times[fastest], **fields)


def dense(query: Tensor, key: Tensor, value: Tensor, *, backend: SDPBackend) -> Tensor:
    """SDPA of the newest token, which sees every key."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def take_turns(run: Callable[..., Tensor], query: Tensor, caches: Sequence[Sequence[Tensor]]) -> Callable[[], Tensor]:
    """Calls `run` with the next cache each time."""
    turns = itertools.cycle(caches)
    return lambda: run(query, *next(turns))


def needed_bytes(length: int, batch: int, share: float) -> int:
    """Bytes of keys and values that routed decoding reads at least, in bf16."""
    sparse = round(share * KV_HEADS)
    tokens = (KV_HEADS - sparse) * length + sparse * min(length, SINK_SIZE + WINDOW_SIZE)
    return batch * tokens * 2 * HEAD_DIM * 2
