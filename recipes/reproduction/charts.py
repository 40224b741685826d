"""What the pictures of the reproduction show; `reproduction.pictures` writes them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from reproduction.examples import ROBUST, SENSITIVE, TASKS
from reproduction.jobs import REFERENCE
from reproduction.results import Results, mean_msr
from reproduction.tables import rise


#: Okabe and Ito's colours, which people tell apart whatever their colour vision; markers repeat the distinction.
COLORS = dict(zip(TASKS, ("#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#E69F00", "#000000")))
MARKERS = dict(zip(TASKS, "osDv^P*"))
LABELS = {
    "sqa_foldoc": "QA, glossary",
    "sqa_pkg": "QA, packages",
    "niah_single": "QA, needle",
    "mhop_wordnet": "QA, two hops",
    "summ_rfc": "summary",
    "code_stdlib": "code",
    "icl_wordnet": "many-shot labels",
}
POOLS = ("50", "100", "200", "400", "all")


def routing_frequency(results: Results) -> Figure:
    """How often each head of each layer ran sparse, by set."""
    rows = results[REFERENCE]["tasks"]
    shares = np.array([np.ravel(row["frequency"]) for row in rows])
    layers, heads = np.shape(rows[0]["frequency"])
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    ax = figure.subplots()
    image = ax.imshow(shares, vmin=0, vmax=1, cmap="cividis", aspect="auto", interpolation="nearest")
    ax.set_yticks(range(len(rows)), [f"{LABELS[row['set']]}, {row['msr']:.2f}" for row in rows])
    ax.set_xticks(
        [heads * layer + (heads - 1) / 2 for layer in range(layers)], [str(layer) for layer in range(layers)]
    )
    for layer in range(1, layers):
        ax.axvline(heads * layer - 0.5, color="white", linewidth=0.6)
    for row in range(1, len(rows)):
        ax.axhline(row - 0.5, color="white", linewidth=0.6)
    ax.set_xlabel(f"layer, its {heads} key-value heads side by side")
    ax.set_title("How often each head ran sparse; beside each set its MSR", loc="left")
    figure.colorbar(image, label="share of prompts", pad=0.01)
    return figure


def similarity(results: Results) -> Figure:
    """How alike the sets look to the routers, before and after the Task MLP."""
    measured = results[f"{REFERENCE}-similarity"]["similarity"]
    stages = {"keys": "pooled keys", "input": "standardised", "task_mlp": "after the Task MLP"}
    figure = Figure(figsize=(14, 5.0), layout="constrained")
    axes = figure.subplots(1, len(stages), sharey=True)
    names = [LABELS[name] for name in measured["sets"]]
    for ax, (stage, title) in zip(axes, stages.items()):
        matrix = np.array(measured[stage])
        image = ax.imshow(matrix, vmin=-1, vmax=1, cmap="PuOr")
        for row, column in np.ndindex(matrix.shape):
            color = "white" if abs(matrix[row, column]) > 0.75 else "black"
            ax.text(column, row, f"{matrix[row, column]:.2f}", ha="center", va="center", color=color, fontsize=7)
        ax.set_xticks(range(len(names)), names, rotation=45, ha="right")
        ax.set_yticks(range(len(names)), names)
        ax.set_title(title)
    figure.colorbar(image, ax=axes, label="cosine similarity", pad=0.01)
    return figure


def training(results: Results) -> Figure:
    """Sparsity, multipliers and loss of each task over training."""
    log = results[REFERENCE]["log"]
    targets = results[REFERENCE]["targets"]
    figure = Figure(figsize=(12, 7), layout="constrained")
    (msr, first), (loss, second) = figure.subplots(2, 2, sharex=True)
    for task, name in {task: name for name, task in reversed(TASKS.items())}.items():
        style = {"color": COLORS[name], "marker": MARKERS[name], "markevery": 5, "label": task.replace("_", " ")}
        lines = [line for line in log if f"msr/{task}" in line]
        steps = [line["step"] for line in lines]
        for ax, quantity in ((msr, "msr"), (first, "lambda1"), (second, "lambda2")):
            ax.plot(steps, [line[f"{quantity}/{task}"] for line in lines], **style)
    for target in sorted(set(targets.values())):
        msr.axhline(target, color="grey", linestyle=":", linewidth=1)
    steps = [line["step"] for line in log]
    loss.plot(steps, [line["lm_loss"] for line in log], color="#0072B2", label="language modelling")
    loss.plot(steps, [line["sparsity_loss"] for line in log], color="#D55E00", linestyle="--", label="sparsity")
    titles = {msr: "MSR, sampled; dotted: targets", first: "λ1", second: "λ2", loss: "loss"}
    for ax, title in titles.items():
        _finish(ax, title)
    for ax in (loss, second):
        ax.set_xlabel("step")
    msr.legend(fontsize="small")
    loss.legend(fontsize="small")
    return figure


def bias(results: Results) -> Figure:
    """NLL of each set against its MSR as `sparsity_bias` moves it."""
    tables = {0.0: results[REFERENCE]} | {float(b): t for b, t in results[f"{REFERENCE}-bias"]["bias"].items()}
    bounds = results["bounds"]["masks"]
    ends = [bounds["full"], *(tables[value] for value in sorted(tables)), bounds["all_sparse"]]
    figure = Figure(figsize=(8, 5), layout="constrained")
    ax = figure.subplots()
    for name in TASKS:
        rows = [_row(table, name) for table in ends]
        ax.plot(
            [row["msr"] for row in rows],
            [rise(row, bounds["full"]) for row in rows],
            color=COLORS[name],
            marker=MARKERS[name],
            label=LABELS[name],
        )
        trained = _row(results[REFERENCE], name)
        ax.plot(
            trained["msr"], rise(trained, bounds["full"]), marker="o", markersize=13, mfc="none", color=COLORS[name]
        )
    ax.axhline(0, color="grey", linewidth=0.8)
    ax.set_xlabel("MSR")
    ax.set_ylabel("NLL above full attention, nats a token")
    ax.legend(fontsize="small")
    _finish(ax, "Routing dialled by `sparsity_bias`; circled: as trained")
    return figure


def pareto(results: Results) -> Figure:
    """Mean NLL rise of the QA sets against mean MSR: routing beside static masks."""
    full = results["bounds"]["masks"]["full"]
    figure = Figure(figsize=(8, 5), layout="constrained")
    ax = figure.subplots()

    def point(table: Mapping[str, Any]) -> tuple[float, float]:
        return mean_msr(table, tuple(TASKS)), float(np.mean([rise(_row(table, n), full) for n in SENSITIVE]))

    curves = {
        "routed": [results[REFERENCE], *results[f"{REFERENCE}-bias"]["bias"].values()],
        "static, retrieval scores": _curve(results, "masks-retrieval"),
        "static, loss of each head": _curve(results, "masks-loss"),
        "static, learned": _curve(results, "static-gates"),
    }
    styles = zip(("#0072B2", "#D55E00", "#009E73", "#CC79A7"), "osD^", ("-", "--", "-.", ":"))
    for (label, tables), (color, marker, line) in zip(curves.items(), styles):
        points = sorted(map(point, tables))
        ax.plot(*zip(*points), color=color, marker=marker, linestyle=line, label=label)
    if "masks-random" in results:
        points = [point(table) for table in results["masks-random"]["masks"].values()]
        ax.plot(*zip(*points), color="black", marker="x", linestyle="", label="static, random")
    ax.axhline(0, color="grey", linewidth=0.8)
    ax.set_xlabel("MSR, mean over all sets")
    ax.set_ylabel("NLL above full attention on QA, nats a token")
    ax.legend(fontsize="small")
    _finish(ax, "Routing beside static masks")
    return figure


def sampled(results: Results) -> Figure:
    """MSR of sampled decisions beside the most likely ones."""
    figure = Figure(figsize=(6, 5), layout="constrained")
    ax = figure.subplots()
    ax.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    for name in TASKS:
        pair = [_row(t, name)["msr"] for t in (results[f"{REFERENCE}-sampled"]["sampled"], results[REFERENCE])]
        ax.plot(*pair, color=COLORS[name], marker=MARKERS[name], markersize=9, linestyle="", label=LABELS[name])
    ax.set(xlabel="MSR, sampled as in training", ylabel="MSR, most likely decisions")
    ax.legend(fontsize="small")
    _finish(ax, "Sampled and most likely routing")
    return figure


def pools(results: Results) -> Figure:
    """Sparsity and NLL of both categories against the pool size."""
    runs = [results[REFERENCE if pool == "100" else _pool_job(pool)] for pool in POOLS]
    full = results["bounds"]["masks"]["full"]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for label, sets, color, marker in (("sensitive", SENSITIVE, "#0072B2", "o"), ("robust", ROBUST, "#D55E00", "s")):
        style = {"color": color, "marker": marker, "label": label}
        left.plot(list(POOLS), [mean_msr(run, sets) for run in runs], **style)
        right.plot(list(POOLS), [np.mean([rise(_row(run, n), full) for n in sets]) for run in runs], **style)
    left.set_ylabel("MSR")
    right.set_ylabel("NLL above full attention, nats a token")
    for ax in (left, right):
        ax.set_xlabel("tokens pooled at each end of the prompt")
        ax.legend()
        _finish(ax)
    return figure


def _pool_job(pool: str) -> str:
    return "ablation-pool-all" if pool == "all" else f"ablation-pool{pool}"


def _curve(results: Results, ranking: str) -> list[Mapping[str, Any]]:
    masks = results["masks-curve"]["masks"]
    return [table for name, table in masks.items() if name.startswith(f"{ranking} ")]


def _row(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in table["tasks"] if row["set"] == name)


def _finish(ax: Axes, title: str | None = None) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.3)
    if title:
        ax.set_title(title, loc="left", fontsize="medium")


#: Chart name to the jobs that it needs and what draws it.
CHARTS: dict[str, tuple[Sequence[str], Callable[[Results], Figure]]] = {
    "routing": ((REFERENCE,), routing_frequency),
    "similarity": ((f"{REFERENCE}-similarity",), similarity),
    "training": ((REFERENCE,), training),
    "bias": ((REFERENCE, f"{REFERENCE}-bias", "bounds"), bias),
    "pareto": ((REFERENCE, f"{REFERENCE}-bias", "bounds", "masks-curve"), pareto),
    "sampled": ((REFERENCE, f"{REFERENCE}-sampled"), sampled),
    "pools": ((REFERENCE, "bounds", *(_pool_job(pool) for pool in POOLS if pool != "100")), pools),
}
