"""Times routed prefill attention against what a user would run instead, all in one process.

    python kernels/benchmarks/prefill.py --lengths 8192 32768 131072 --shares 0 0.75 --output rows.json

Baselines are causal: cuDNN and FA2 through SDPA, flash-attn-4 when it can be imported, and `serial-fa4`: the full
heads gathered into one flash-attn-4 call, the others into one streaming launch, scattered back. Refuses to time a
kernel that disagrees with float32 attention. Rounds of all candidates alternate, so that heat and power limits meet
all of them; short launches are replayed from a CUDA graph, which leaves out the host.
"""

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from elastic_kernels import routed_attention


HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SIZES = {"mode_pair": "FA-SSA", "sink_size": 128, "window_size": 2048}
ROUNDS = 3
GRAPH_LENGTH, GRAPH_LAUNCHES = 8192, 10


def make_inputs(length: int) -> list[torch.Tensor]:
    """Query, key and value `[1, heads, length, HEAD_DIM]` as a projection leaves them: heads inside tokens."""
    generator = torch.Generator("cuda").manual_seed(length)
    return [
        torch.randn(1, length, heads, HEAD_DIM, generator=generator, device="cuda", dtype=torch.bfloat16).transpose(
            1, 2
        )
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def make_gate(share: float) -> torch.Tensor:
    """Gate `[1, KV_HEADS]` in which this share of the heads is sparse."""
    return torch.arange(KV_HEADS, device="cuda")[None] < round(share * KV_HEADS)


def check(implementation: str | None) -> None:
    """Exit unless the kernel agrees with masked float32 attention where windows, sinks and edges all occur."""
    query, key, value = make_inputs(3001)
    gate = make_gate(0.5)
    output = routed_attention(query, key, value, gate, **SIZES, implementation=implementation)
    i, j = torch.arange(3001, device="cuda")[:, None], torch.arange(3001, device="cuda")[None]
    near = (i - j < SIZES["window_size"]) | (j < SIZES["sink_size"])
    mask = (j <= i) & (near | ~gate.repeat_interleave(HEADS // KV_HEADS, 1)[0, :, None, None])
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*(x.float() for x in (query, key, value)), mask, enable_gqa=True)
    error = ((output - expected).norm() / expected.norm()).item()
    if not error < 5e-3:
        raise SystemExit(f"not timed: relative error {error:.2e} against float32 attention")


def sdpa(backend: SDPBackend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Callable[[], object]:
    def run():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return run


def flash_attn_4(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """flash-attn-4 on `[1, length, heads, HEAD_DIM]`."""
    from flash_attn.cute import flash_attn_func

    output = flash_attn_func(query, key, value, causal=True)
    return output[0] if isinstance(output, tuple) else output


def serial(inputs: list[torch.Tensor], gate: torch.Tensor, implementation: str | None) -> Callable[[], torch.Tensor]:
    """Each mode's heads gathered, computed by themselves and scattered back."""
    full, sparse = (torch.nonzero(gate[0] == side)[:, 0] for side in (0, 1))
    full_queries, sparse_queries = (
        (HEADS // KV_HEADS * heads[:, None] + torch.arange(HEADS // KV_HEADS, device="cuda")).flatten()
        for heads in (full, sparse)
    )
    rows = [x.transpose(1, 2) for x in inputs]
    all_sparse = torch.ones(1, len(sparse), dtype=torch.bool, device="cuda")

    def run():
        output = torch.empty_like(rows[0])
        dense = flash_attn_4(*(x.index_select(2, n) for x, n in zip(rows, (full_queries, full, full))))
        output.index_copy_(2, full_queries, dense)
        gathered = (x.index_select(2, n).transpose(1, 2) for x, n in zip(rows, (sparse_queries, sparse, sparse)))
        streamed = routed_attention(*gathered, all_sparse, **SIZES, implementation=implementation)
        return output.index_copy_(2, sparse_queries, streamed.transpose(1, 2))

    return run


def capture(run: Callable[[], object]) -> Callable[[], object]:
    """`GRAPH_LAUNCHES` launches as one replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_LAUNCHES):
            run()
    return graph.replay


def milliseconds(run: Callable[[], object], repeats: int) -> list[float]:
    """Device times of `repeats` runs after one that does not count."""
    run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def measure(length: int, shares: list[float], implementation: str | None) -> list[dict]:
    """Rows of one length: median and 20% / 80% quantiles in milliseconds, against each baseline."""
    inputs = make_inputs(length)
    baselines = {
        "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION, *inputs),
        "fa2": sdpa(SDPBackend.FLASH_ATTENTION, *inputs),
    }
    if importlib.util.find_spec("flash_attn") is not None:
        rows = [x.transpose(1, 2) for x in inputs]
        baselines["fa4"] = lambda: flash_attn_4(*rows)
    runs = dict(baselines)
    for share in shares:
        gate = make_gate(share)
        runs[share] = lambda gate=gate: routed_attention(*inputs, gate, **SIZES, implementation=implementation)
        if "fa4" in baselines and 0 < gate.sum() < KV_HEADS:
            runs["serial-fa4", share] = serial(inputs, gate, implementation)
    launches = GRAPH_LAUNCHES if length <= GRAPH_LENGTH else 1
    if launches > 1:
        runs = {name: capture(run) for name, run in runs.items()}
    repeats = max(3, min(20, round(0.3 / (1.7e-11 * length**2 * launches))))
    times = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name] += [time / launches for time in milliseconds(run, repeats)]
    result = []
    for share in shares:
        low, *_, high = statistics.quantiles(times[share], n=5)
        ours = statistics.median(times[share])
        others = {name: times[name] for name in baselines}
        if ("serial-fa4", share) in times:
            others["serial-fa4"] = times["serial-fa4", share]
        for name, other in others.items():
            theirs = statistics.median(other)
            row = f"prefill/{length // 1024}K/msr{share:g}/{name}"
            result.append(
                {
                    "name": row,
                    "ours_ms": ours,
                    "ours_20": low,
                    "ours_80": high,
                    "baseline": name,
                    "baseline_ms": theirs,
                }
                | {"speedup": theirs / ours}
            )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--shares", type=float, nargs="+", default=[0, 0.5, 0.75, 0.875, 1])
    parser.add_argument("--implementation", help="a fused kernel by name; the dispatch's choice by default")
    parser.add_argument("--output", help="file for the rows as JSON")
    arguments = parser.parse_args()
    check(arguments.implementation)
    rows = []
    for length in arguments.lengths:
        for row in measure(length, arguments.shares, arguments.implementation):
            print(
                f"{row['name']:34s} {row['ours_ms']:9.4f} {row['baseline_ms']:9.4f} {row['speedup']:6.2f}", flush=True
            )
            rows.append(row)
        if arguments.output:
            with open(arguments.output, "w", encoding="utf-8") as file:
                json.dump({"hardware": torch.cuda.get_device_name(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
