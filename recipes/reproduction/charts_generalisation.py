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
    SCALED_RISE,
    finish,
    logarithmic_rise,
    new_figure,
    offsets,
    set_rows,
)
from reproduction.examples import TASKS
from reproduction.generalisation import ONE_TASK, RECIPE, VARIED, Training, by_length, left_out, unseen_phrasings
from reproduction.results import Results
from reproduction.tables import full_attention, rise, trainings


def generalisation(results: Results) -> Figure:
    """MSR and NLL of each set when training held it, when it was left out, and when its instructions were new.

    Open marks: left out, and training had one task a document.
    """
    more = {"left out, one task a document": (RED, "X", "none", left_out(results, ONE_TASK.prefix))}
    return _by_set(results, RECIPE, more)


def one_task(results: Results) -> Figure:
    """The same of trainings on one task a document; open marks: training had more wordings of the instructions."""
    more = {
        "left out, more wordings in training": (RED, "X", "none", left_out(results, VARIED.prefix)),
        "phrasings never trained on, more wordings": (GREEN, "D", "none", unseen_phrasings(results, VARIED.prefix)),
    }
    return _by_set(results, ONE_TASK, more)


def _by_set(results: Results, training: Training, more: Mapping[str, tuple]) -> Figure:
    figure = new_figure(10, 5.2)
    left, right = figure.subplots(1, 2, sharey=True)
    series: dict[str, tuple] = {
        "trained with it, each seed": (BLUE, "o", BLUE, None),
        "left out of training": (RED, "X", RED, left_out(results, training.prefix)),
        "phrasings never trained on": (GREEN, "D", GREEN, unseen_phrasings(results, training.prefix)),
    }
    series = {label: look for label, look in {**series, **more}.items() if look[-1] != {}}
    names = list(TASKS)
    for offset, (label, (color, marker, fill, measured)) in zip(offsets(len(series)), series.items()):
        rows, points = _trained(results, training) if measured is None else _points(measured, names)
        for ax, values in zip((left, right), zip(*points)):
            style = {"color": color, "marker": marker, "mfc": fill, "markersize": 6, "label": label}
            ax.plot(values, np.add(rows, offset), ls="", **style)
    for ax in (left, right):
        set_rows(ax, names)
    logarithmic_rise(right, "x")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    finish(left, MSR, title="How sparse")
    finish(right, SCALED_RISE, title="What it costs: further right is worse")
    return figure


def _points(measured: Mapping, names: list[str]) -> tuple[list[int], list]:
    return [names.index(name) for name in measured], list(measured.values())


def _trained(results: Results, training: Training) -> tuple[list[int], list]:
    full = full_attention(results)
    rows, points = [], []
    for run in trainings(results, training.on_every_set):
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
    logarithmic_rise(right, "y")
    for ax, what, title in (
        (left, MSR, "How sparse; one adapter, trained at 4K"),
        (right, SCALED_RISE, "What it costs: higher is worse"),
    ):
        ax.set_xscale("log", base=2)
        ax.set_xticks(list(tables), [f"{length // 1024}K" for length in tables])
        ax.set_xticks([], minor=True)
        finish(ax, "tokens of prompt and answer", what, title)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    return figure
