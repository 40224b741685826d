"""What the kernels' own measurements add: how fast a share of sparse heads runs, and what a router takes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from reproduction.chart_style import BLACK, BLUE, ORANGE, RED, finish, new_figure
from reproduction.results import Results


KERNEL_RESULTS = Path(__file__).parents[2] / "kernels" / "benchmarks" / "results" / "nvidia-h200"
LENGTH = "128K"
#: What a router takes in the paper, whatever the length.
PAPER_MS = 0.196
#: Fields whose sum is the time of the fused kernel with what it needs first.
FUSED_AND_BEFORE = ("ours_ms", "gather_and_projection_ms")


def add_speed(ax: Axes) -> None:
    """A scale of speed-ups above one of MSR, as the kernels were measured; times between measured MSRs are linear."""
    prefix = f"prefill/{LENGTH}/msr"
    rows = [row for row in _rows("prefill") if row["name"].startswith(prefix) and row["baseline"] == "cudnn"]
    times = {float(row["name"].split("/msr")[1].split("/")[0]): row["ours_ms"] / row["baseline_ms"] for row in rows}
    shares = sorted(times, key=times.__getitem__)
    scale = ax.secondary_xaxis("top")
    ticks = (1.2, 1.5, 2, 3, 4, 6, 10, 20)
    places = np.interp([1 / speed for speed in ticks], [times[share] for share in shares], shares)
    scale.set_xticks(places, [f"{speed:g}\N{MULTIPLICATION SIGN}" for speed in ticks])
    scale.set_xlabel(
        f"speed-up of prefill attention over cuDNN in a layer of another model: {LENGTH} tokens, NVIDIA H200,\n"
        "32 query and 8 key-value heads of dimension 128, sink 128, window 2048",
        fontsize="small",
    )


def router_latency(results: Results) -> Figure:
    """Time of one layer's router against the length of the prompt, on an NVIDIA H200."""
    rows = {row["name"].removeprefix("router/"): row for row in _rows("router")}
    figure = new_figure(7, 4)
    ax = figure.subplots()
    lines = {
        "plain torch": (("reference_eager_ms",), ORANGE, "^", "-."),
        "plain torch in a CUDA graph": (("baseline_ms",), RED, "s", "--"),
        "fused kernel, with gathering and projecting the pooled tokens": (FUSED_AND_BEFORE, BLACK, "x", ":"),
        "fused kernel": (("ours_ms",), BLUE, "o", "-"),
    }
    lengths = [_tokens(name) for name in rows]
    for label, (fields, color, marker, line) in lines.items():
        times = [sum(row[field] for field in fields) for row in rows.values()]
        ax.plot(lengths, times, color=color, marker=marker, ls=line, label=label)
    ax.axhline(PAPER_MS, color="grey", linewidth=0.8)
    ax.text(lengths[0], PAPER_MS * 1.06, f"the paper, {PAPER_MS} ms", fontsize="small", color="0.3")
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, list(rows))
    ax.set_yscale("log")
    ax.set_yticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1], ["0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1"])
    ax.minorticks_off()
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    finish(ax, "tokens of the prompt", "milliseconds, logarithmic", "Time of one layer's router, NVIDIA H200")
    return figure


def _tokens(name: str) -> int:
    """512 of "512", 131072 of "128K"."""
    unit = {"K": 2**10, "M": 2**20}.get(name[-1], 1)
    return int(name.rstrip("KM")) * unit


def _rows(operator: str) -> list[dict[str, Any]]:
    return json.loads((KERNEL_RESULTS / f"{operator}.json").read_text(encoding="utf-8"))["rows"]
