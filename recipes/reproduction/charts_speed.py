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
        f"speed-up of one layer's prefill attention over cuDNN, {LENGTH} tokens, NVIDIA H200", fontsize="small"
    )


def router_latency(results: Results) -> Figure:
    """Time of one layer's router against the length of the prompt, on an NVIDIA H200."""
    rows = {row["name"].removeprefix("router/"): row for row in _rows("router")}
    figure = new_figure(7, 4)
    ax = figure.subplots()
    lines = {
        "plain torch": ("reference_eager_ms", ORANGE, "^", "-."),
        "plain torch in a CUDA graph": ("baseline_ms", RED, "s", "--"),
        "fused kernel": ("ours_ms", BLUE, "o", "-"),
        "gathering and projecting the pooled tokens, besides": ("gather_and_projection_ms", BLACK, "x", ":"),
    }
    for label, (field, color, marker, line) in lines.items():
        ax.plot(list(rows), [row[field] for row in rows.values()], color=color, marker=marker, ls=line, label=label)
    ax.axhline(PAPER_MS, color="grey", linewidth=0.8)
    ax.text(len(rows) - 1, PAPER_MS * 1.04, f"the paper, {PAPER_MS} ms", ha="right", fontsize="small", color="0.3")
    ax.set_ylim(bottom=0)
    ax.legend(fontsize="small")
    finish(ax, "tokens of the prompt", "ms", "Time of one layer's router")
    return figure


def _rows(operator: str) -> list[dict[str, Any]]:
    return json.loads((KERNEL_RESULTS / f"{operator}.json").read_text(encoding="utf-8"))["rows"]
