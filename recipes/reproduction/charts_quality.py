"""Pictures of what sparsity costs: routing beside static masks, other pool sizes, other trades."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from reproduction.chart_style import (
    BLACK,
    BLUE,
    GREEN,
    LABELS,
    MSR,
    RED,
    RISE,
    SCALED_RISE,
    STYLES,
    finish,
    logarithmic_rise,
    new_figure,
    write_beside,
)
from reproduction.charts_speed import add_speed
from reproduction.examples import ROBUST, SENSITIVE, TASKS
from reproduction.findings import MAX_ROBUST, MAX_SENSITIVE, MIN_APART, MIN_MSR
from reproduction.jobs import REFERENCE, UNCHANGED, all_jobs
from reproduction.results import Results, mean_msr
from reproduction.tables import TRADES, WAYS, full_attention, rise, row_of, settings, static_tables, trade, trainings


#: Ablations of the pool size, after the training that changes nothing.
POOLS = (UNCHANGED, *(job.name for job in all_jobs() if job.name.startswith("ablation-pool")))
#: Ways whose ranking of heads has been measured at several shares, by its name there.
RANKINGS = {"static_learned": "static-gates", "static_loss": "masks-loss", "static_retrieval": "masks-retrieval"}


def dial(results: Results) -> Figure:
    """NLL of each set against MSR: routing dialled by `sparsity_bias`, and forced static choices of heads."""
    full, ends = full_attention(results), results["bounds"]["masks"]
    figure = new_figure(10, 5.6)
    axes = list(figure.subplots(2, 4, sharex=True, sharey=True).flat)
    for ax, name in zip(axes, TASKS):
        for way, tables in _curves(results).items():
            label, color, marker, line = STYLES[way]
            points = [(row_of(table, name)["msr"], rise(table, full, name)) for table in tables]
            ax.plot(*zip(*sorted(points)), color=color, marker=marker, ls=line, markersize=4, label=label)
        point = row_of(results[REFERENCE], name)["msr"], rise(results[REFERENCE], full, name)
        ax.plot(*point, marker="o", ls="", markersize=12, mfc="none", color=BLUE, label="routed, as trained")
        bounds = [(row_of(table, name)["msr"], rise(table, full, name)) for table in ends.values()]
        ax.plot(*zip(*bounds), marker="x", ls="", color=BLACK, label="every head full, every head sparse")
        logarithmic_rise(ax, "y")
        finish(ax, title=LABELS[name])
    axes[-1].axis("off")
    axes[-1].legend(*axes[0].get_legend_handles_labels(), loc="center left", fontsize="small")
    axes[3].tick_params(labelbottom=True)
    axes[0].set_xticks([0, 0.5, 1])
    figure.suptitle("NLL of each set as more heads run sparse; lower is better", fontsize="medium")
    figure.supxlabel(MSR, fontsize="medium")
    figure.supylabel(SCALED_RISE.replace("\n", " "), fontsize="medium")
    return figure


def pareto(results: Results) -> Figure:
    """Quality against speed: NLL of the QA sets against the mean MSR over all sets, routing beside static masks."""
    full = full_attention(results)
    figure = new_figure(9, 5.4)
    ax = figure.subplots()

    def draw(
        tables: Sequence[Mapping[str, Any]], way: str, size: int, line: str = "", label: str | None = None
    ) -> None:
        points = [(mean_msr(t, tuple(TASKS)), mean(rise(t, full, name) for name in SENSITIVE)) for t in tables]
        _, color, marker, _ = STYLES[way]
        ax.plot(*zip(*sorted(points)), color=color, marker=marker, ls=line, markersize=size, label=label)

    curves = _curves(results)
    for way, (label, _, _, line) in STYLES.items():
        at_the_mean = trainings(results, "fa-ssa") if way == "routed" else static_tables(results, *WAYS[way])
        if at_the_mean:
            draw(at_the_mean, way, 9, label=None if way in curves else label)
        if way in curves:
            draw(curves[way], way, 4, line, label)
    logarithmic_rise(ax, "y")
    ax.set_xlim(right=1)
    ax.legend(fontsize="small")
    at_equal = "large marks: each training seed, and static choices of as many heads"
    finish(ax, f"MSR, mean of all sets; {at_equal}", f"Mean of the QA sets: {SCALED_RISE}")
    add_speed(ax)
    return figure


def _curves(results: Results) -> dict[str, list[Mapping[str, Any]]]:
    """Tables at several shares of sparse heads, by way of choosing them."""
    masks = results["masks-curve"]["masks"]
    curves = {"routed": [results[REFERENCE], *results[f"{REFERENCE}-bias"]["bias"].values()]}
    for way, ranking in RANKINGS.items():
        curves[way] = [table for name, table in masks.items() if name.startswith(f"{ranking} ")]
    return curves


def pools(results: Results) -> Figure:
    """MSR and NLL of both kinds of sets against the pool size: one training each, shorter than the recipe's."""
    pool = {name: settings(results[name])["pool"] for name in POOLS}
    names = sorted(POOLS, key=lambda name: (pool[name] == "all", pool[name]))
    labels = [str(pool[name]) + "\nthe recipe's" * (name == UNCHANGED) for name in names]
    full = full_attention(results)
    figure = new_figure(10, 3.8)
    left, right = figure.subplots(1, 2)
    for label, sets, color, marker in (("sensitive sets", SENSITIVE, BLUE, "o"), ("robust sets", ROBUST, RED, "s")):
        shares = [mean_msr(results[name], sets) for name in names]
        rises = [mean(rise(results[name], full, each) for each in sets) for name in names]
        for ax, values in ((left, shares), (right, rises)):
            ax.plot(labels, values, color=color, marker=marker, label=label)
    for ax, what, title in ((left, MSR, "How sparse"), (right, RISE, "How good")):
        ax.legend(fontsize="small")
        finish(ax, "tokens pooled at each end of the prompt", what, title)
    return figure


def trades(results: Results) -> Figure:
    """The recipe's trainings and those with other settings, one mark a training; shaded: what is asked."""
    full = full_attention(results)
    kinds: dict[tuple[str, str], list[dict[str, float]]] = {}
    for name, result in results.items():
        if name.startswith(("fa-ssa-seed", *TRADES)) and "tasks" in result:
            color = RED if name.startswith("fa-ssa") else BLUE
            label = ", ".join(str(value) for value in settings(result).values() if value is not None)
            label += " (the recipe)" * (color == RED)
            kinds.setdefault((label, color), []).append(trade(result, full))
    figure = new_figure(10, 8)
    top, bottom = figure.subplots(2, 1)
    names = "window, pool, t robust,\nsteps, answer tokens,\nmultiplier lr, counterfactual, documents"
    panels = (
        (top, "MSR sensitive", "worst rise, sensitive", (MIN_MSR, MAX_SENSITIVE), "Sensitive sets", "mean MSR"),
        (
            bottom,
            "apart",
            "worst rise, robust",
            (MIN_APART, MAX_ROBUST),
            "Robust sets",
            "mean MSR less that of the sensitive sets",
        ),
    )
    for ax, x, y, corner, title, x_label in panels:
        for number, ((label, color), rows) in enumerate(kinds.items(), 1):
            style = {"marker": "o", "markersize": 4, "color": color, "label": f"{number}: {label}", "ls": ""}
            ax.plot([row[x] for row in rows], [row[y] for row in rows], **style)
        logarithmic_rise(ax, "y")
        _shade(ax, *corner)
        finish(ax, x_label, SCALED_RISE, f"{title}: NLL of the worst of them")
    figure.suptitle("The recipe, 1, and other settings; shaded: what is asked", x=0.08, ha="left", fontsize="medium")
    handles = top.get_legend_handles_labels()
    figure.legend(*handles, title=names, title_fontsize="small", loc="outside right upper", fontsize="small")
    for ax, x, y, *_ in panels:
        write_beside(
            figure,
            ax,
            [
                (str(number), color, (row[x], row[y]))
                for number, ((_, color), rows) in enumerate(kinds.items(), 1)
                for row in rows
            ],
        )
    return figure


def _shade(ax: Axes, least: float, most: float) -> None:
    """Shades where the MSR is at least `least` and the NLL at most `most`."""
    ax.margins(0.1)
    ax.autoscale_view()
    right, bottom = max(ax.get_xlim()[1], least + 0.02), min(ax.get_ylim()[0], most - 0.02)
    ax.fill_between([least, right], bottom, most, color=GREEN, alpha=0.15, linewidth=0)
    ax.set(xlim=(min(ax.get_xlim()[0], least - 0.005), right), ylim=(bottom, max(ax.get_ylim()[1], most + 0.02)))
