"""Pictures of what the routers decide, and of what they see."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from reproduction.chart_style import COLORS, LABELS, MARKERS, finish, new_figure
from reproduction.examples import TASKS
from reproduction.jobs import REFERENCE
from reproduction.results import Results
from reproduction.tables import row_of

from elastic_peft.report import similarity_figure, training_figure


def routing_frequency(results: Results) -> Figure:
    """How often each key-value head of each layer ran sparse, by set."""
    return routing_of(results[REFERENCE])


def routing_of(result: Mapping[str, Any]) -> Figure:
    """The same, of a training's result."""
    rows = result["tasks"]
    shares = np.array([np.ravel(row["frequency"]) for row in rows])
    layers, heads = np.shape(rows[0]["frequency"])
    figure = new_figure(10, 3.2)
    ax = figure.subplots()
    image = ax.imshow(shares, vmin=0, vmax=1, cmap="cividis", aspect="auto", interpolation="nearest")
    ax.set_yticks(range(len(rows)), [f"{LABELS[row['set']]}, {row['msr']:.2f}" for row in rows])
    ax.set_xticks(heads * np.arange(layers) + (heads - 1) / 2, map(str, range(layers)), fontsize="small")
    for layer in range(1, layers):
        ax.axvline(heads * layer - 0.5, color="white", linewidth=0.6)
    for row in range(1, len(rows)):
        ax.axhline(row - 0.5, color="white", linewidth=0.6)
    ax.set_xlabel(f"layer, its {heads} key-value heads side by side")
    ax.set_title("How often each head ran sparse; beside each set its MSR", loc="left", fontsize="medium")
    figure.colorbar(image, label="share of prompts", pad=0.01)
    return figure


def similarity(results: Results) -> Figure:
    """How alike the sets look to the routers, before and after the Task MLP: means over layers and heads."""
    measured = results[f"{REFERENCE}-similarity"]["similarity"]
    return similarity_figure(measured, [LABELS[name] for name in measured["sets"]])


def sampled(results: Results) -> Figure:
    """MSR of decisions sampled as in training, beside that of the most likely decisions."""
    figure = new_figure(6.5, 5)
    ax = figure.subplots()
    pairs = {}
    for name in TASKS:
        pairs[name] = [
            row_of(table, name)["msr"] for table in (results[f"{REFERENCE}-sampled"]["sampled"], results[REFERENCE])
        ]
        ax.plot(*pairs[name], color=COLORS[name], marker=MARKERS[name], markersize=9, ls="", label=LABELS[name])
    ends = min(map(min, pairs.values())) - 0.03, min(max(map(max, pairs.values())) + 0.03, 1)
    ax.plot(ends, ends, color="grey", linewidth=0.8, label="the same", zorder=1)
    ax.legend(fontsize="small")
    finish(
        ax, "MSR, decisions sampled as in training", "MSR, most likely decisions", "Sampled and most likely routing"
    )
    return figure


def training(results: Results) -> Figure:
    """MSR, multipliers and losses of each task over training."""
    log, targets = results[REFERENCE]["log"], results[REFERENCE]["targets"]
    return training_figure(log, targets=targets)
