"""Pictures of prompts that training did not hold: sets and phrasings left out, other lengths."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from reproduction.chart_style import (
    BLUE,
    COLORS,
    GREEN,
    LABELS,
    MARKERS,
    MSR,
    RED,
    RISE,
    finish,
    logarithmic_rise,
    new_figure,
    offsets,
    set_rows,
)
from reproduction.examples import TASKS
from reproduction.findings import by_length, left_out, unseen_phrasings
from reproduction.results import Results
from reproduction.tables import full_attention, rise, trainings


def generalisation(results: Results) -> Figure:
    """MSR and NLL of each set when training held it, when it was left out, and when its instructions were new."""
    figure = new_figure(10, 4.6)
    left, right = figure.subplots(1, 2, sharey=True)
    series = {
        "trained with it, each seed": (BLUE, "o", None),
        "left out of training": (RED, "X", left_out(results)),
        "phrasings never trained on": (GREEN, "D", unseen_phrasings(results)),
    }
    names = list(TASKS)
    for offset, (label, (color, marker, measured)) in zip(offsets(len(series)), series.items()):
        rows, points = _trained(results) if measured is None else _points(measured, names)
        for ax, values in zip((left, right), zip(*points)):
            ax.plot(values, np.add(rows, offset), color=color, marker=marker, ls="", markersize=6, label=label)
    set_rows(left, names)
    logarithmic_rise(right, "x")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    finish(left, MSR, title="How sparse")
    finish(right, RISE, title="How good")
    return figure


def _points(measured: Mapping, names: list[str]) -> tuple[list[int], list]:
    return [names.index(name) for name in measured], list(measured.values())


def _trained(results: Results) -> tuple[list[int], list]:
    full = full_attention(results)
    rows, points = [], []
    for run in trainings(results, "fa-ssa"):
        for entry in run["tasks"]:
            rows.append(list(TASKS).index(entry["set"]))
            points.append((entry["msr"], rise(run, full, entry["set"])))
    return rows, points


def lengths(results: Results) -> Figure:
    """MSR and NLL of prompts shorter and longer than those of training."""
    tables = by_length(results)
    figure = new_figure(10, 4.2)
    left, right = figure.subplots(1, 2)
    for name in TASKS:
        measured = {length: sets[name] for length, sets in tables.items() if name in sets}
        style = {"color": COLORS[name], "marker": MARKERS[name], "label": LABELS[name]}
        for ax, values in zip((left, right), zip(*measured.values())):
            ax.plot(list(measured), values, **style)
    right.axhline(0, color="grey", linewidth=0.8)
    for ax, what, title in ((left, MSR, "How sparse"), (right, RISE, "How good")):
        ax.set_xscale("log", base=2)
        ax.set_xticks(list(tables), [f"{length // 1024}K" for length in tables])
        ax.set_xticks([], minor=True)
        finish(ax, "tokens of prompt and answer; trained at 4K", what, title)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    return figure
