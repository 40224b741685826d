"""Pictures of routing: how often heads run sparse, how alike tasks look to the routers, how a training went."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from .printable import printable


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Dots an inch of the pictures that are written here.
DPI = 150
#: Okabe and Ito's colours, which people tell apart whatever their colour vision; markers repeat the distinction.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP*"
#: Stage of the router's representations to its title.
STAGES = {"keys": "pooled keys", "input": "router input", "task_mlp": "after the Task MLP"}


def routing_png(
    decisions_by_task: Mapping[str, torch.Tensor],
    path: str | Path | BinaryIO,
    *,
    layers: Sequence[int] | None = None,
    title: str | None = None,
) -> None:
    """A heat map of how often each layer and key-value head runs in the sparse mode, one panel a task.

    Args:
        decisions_by_task: task name to bool `[N, L, H]`, True = sparse: N sequences, L routed layers, H key-value
            heads; N may differ between tasks.
        path: the PNG file to write, or an open binary file.
        layers: the L layer indices; `None` counts from 0.
        title: heading of the picture.

    Raises:
        ValueError: no task; decisions of another dtype or shape; `layers` of another number than L.
        ImportError: matplotlib is not installed.
    """
    layers = _check_decisions(decisions_by_task, layers)
    num_heads = next(iter(decisions_by_task.values())).shape[2]
    panel_height = max(0.24 * num_heads, 0.7) + 0.35
    size = (min(max(0.27 * len(layers) + 2.0, 6.0), 18.0), panel_height * len(decisions_by_task) + 1.2)
    figure = _new_figure(*size)
    axes = figure.subplots(len(decisions_by_task), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (task, decisions) in zip(axes, decisions_by_task.items()):
        _draw_panel(ax, task, decisions)
    # At most about 20 labels, on round steps.
    step = next(s for s in (1, 2, 4, 5, 10, 20, 50, 100) if len(layers) <= 20 * s or s == 100)
    axes[-1].set_xticks(range(0, len(layers), step), [str(index) for index in layers[::step]])
    axes[-1].set_xlabel("layer")
    figure.supylabel("key-value head", fontsize="medium")
    bar = figure.colorbar(axes[0].images[0], ax=list(axes), ticks=[0, 0.25, 0.5, 0.75, 1], pad=0.015, aspect=30)
    bar.set_label("how often sparse")
    if title is not None:
        figure.suptitle(printable(title), parse_math=False)
    figure.savefig(path, format="png", dpi=DPI)


def training_figure(log_history: Iterable[Mapping[str, Any]], *, targets: Mapping[str, float] | None = None) -> Figure:
    """MSR, multipliers and losses over a training, by task.

    Args:
        log_history: of the trainer's state, `trainer.state.log_history`; also in each checkpoint's
            `trainer_state.json`. Lines of evaluations give the MSR of the most likely decisions.
        targets: task name to the MSR that it was pulled to, `ElasticConfig.t_values`.

    Returns:
        The figure; `figure.savefig("training.png")` writes it.

    Raises:
        ValueError: no line holds the MSR of a task; a line that is drawn has no `step`.
        ImportError: matplotlib is not installed.
    """
    lines = list(log_history)
    tasks = list(
        dict.fromkeys(name.removeprefix("msr/") for line in lines for name in line if name.startswith("msr/"))
    )
    if not tasks:
        raise ValueError("`log_history` must hold lines with the MSR of tasks, `msr/...`, got none.")
    targets = {task: target for task, target in (targets or {}).items() if task in tasks}
    figure = _new_figure(10, 6)
    (msr, first), (loss, second) = figure.subplots(2, 2, sharex=True)
    panels = {"msr/": msr, "lambda1/": first, "lambda2/": second}
    for index, task in enumerate(tasks):
        cycle, color = divmod(index, len(COLORS))
        # Where colours come again, they come with other markers.
        style = {"color": COLORS[color], "marker": MARKERS[(color + cycle) % len(MARKERS)], "markersize": 5}
        for name, ax in panels.items():
            steps, values = _series(lines, f"{name}{task}")
            ax.plot(steps, values, markevery=max(len(steps) // 8, 1), label=printable(task).replace("_", " "), **style)
        msr.plot(*_series(lines, f"eval_msr/{task}"), mfc="none", ls="", **{**style, "markersize": 10})
    for target in sorted(set(targets.values())):
        msr.axhline(target, color="grey", linestyle=":")
    for index, (name, label) in enumerate({"lm_loss": "language modelling", "sparsity_loss": "sparsity"}.items()):
        loss.plot(*_series(lines, name), color=COLORS[index], ls="--" if index else "-", label=label)
    notes = ["large: evaluated"] * any(f"eval_msr/{task}" in line for task in tasks for line in lines)
    notes += ["dotted: targets"] * bool(targets)
    titles = {
        msr: "; ".join(["MSR, sampled", *notes]),
        first: "multiplier λ1",
        second: "multiplier λ2",
        loss: "losses",
    }
    for ax, title in titles.items():
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.3)
        ax.set_title(title, loc="left", fontsize="medium")
    for ax in (loss, second):
        ax.set_xlabel("optimizer step")
    loss.legend(fontsize="small")
    legend = figure.legend(
        *msr.get_legend_handles_labels(), loc="outside lower center", ncols=min(len(tasks), 5), fontsize="small"
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def similarity_figure(similarity: Mapping[str, Any], tasks: Sequence[str]) -> Figure:
    """Cosine similarity between tasks before and after the Task MLP.

    Args:
        similarity: as `elastic_peft.similarity.task_similarity` returns it; lists do as well.
        tasks: the tasks' names, in order.

    Returns:
        The figure; `figure.savefig("similarity.png")` writes it.

    Raises:
        ValueError: no tasks; a stage is missing, or its matrix is of another size than the number of tasks.
        ImportError: matplotlib is not installed.
    """
    if not tasks:
        raise ValueError("`tasks` must name at least one task, got none.")
    tasks = list(map(printable, tasks))
    matrices = {title: _matrix(similarity, stage, len(tasks)) for stage, title in STAGES.items()}
    side, label = max(0.36 * len(tasks), 1.5), 0.09 * max(map(len, tasks))  # inches
    figure = _new_figure(len(STAGES) * (side + 0.35) + label + 1.0, side + 0.75 * label + 0.5)
    axes = figure.subplots(1, len(STAGES), sharey=True)
    for ax, (title, matrix) in zip(axes, matrices.items()):
        image = ax.imshow(matrix.numpy(), vmin=-1, vmax=1, cmap="PuOr")
        for row, column in torch.cartesian_prod(*2 * [torch.arange(len(tasks))]).tolist():
            value = matrix[row, column].item()
            text = f"{value:z.2f}".replace("0.", ".", 1)
            color = _text_color(*image.to_rgba(value))
            ax.text(column, row, text, ha="center", va="center", color=color, fontsize="small")
        ax.set_xticks(range(len(tasks)), tasks, rotation=45, ha="right", rotation_mode="anchor", parse_math=False)
        ax.set_yticks(range(len(tasks)), tasks, parse_math=False)
        ax.set_title(title, fontsize="medium")
    figure.colorbar(image, ax=axes, label="cosine similarity", pad=0.01, shrink=0.75)
    return figure


def _matrix(similarity: Mapping[str, Any], stage: str, size: int) -> torch.Tensor:
    if stage not in similarity:
        raise ValueError(f"`similarity` must hold {', '.join(map(repr, STAGES))}, got none of {stage!r}.")
    given, name = similarity[stage], f"`similarity[{stage!r}]`"
    try:
        matrix = torch.as_tensor(given, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:  # what it raises depends on what is wrong
        raise ValueError(f"{name} must be a matrix of numbers, got {reprlib.repr(given)}.") from error
    if matrix.shape != (size, size):
        raise ValueError(f"{name} must be [{size}, {size}] as `tasks`, got {list(matrix.shape)}.")
    return matrix


def _text_color(red: float, green: float, blue: float, alpha: float) -> str:
    """Black or white, whichever contrasts more with a colour over white, by WCAG 2's relative luminance."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # Black and white contrast equally with a luminance of 0.179.
    return "black" if 1 - alpha * (1 - luminance) > 0.179 else "white"


def _series(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """The steps of the lines that hold `name`, and its values there."""
    found = [line for line in lines if name in line]
    for line in found:
        if "step" not in line:
            raise ValueError(f"`log_history` must give the `step` of each line with {name!r}, got {dict(line)}.")
    return [line["step"] for line in found], [line[name] for line in found]


def _new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Pictures need matplotlib: pip install 'elastic_peft[report]'.") from error
    return Figure(figsize=(width, height), layout="constrained")


def _check_decisions(decisions_by_task, layers) -> Sequence[int]:
    if not decisions_by_task:
        raise ValueError("`decisions_by_task` must hold at least one task, got none.")
    for task, decisions in decisions_by_task.items():
        if not isinstance(decisions, torch.Tensor):
            raise ValueError(f"`decisions_by_task[{task!r}]` must be bool [N, L, H], got {reprlib.repr(decisions)}.")
    shape = next(iter(decisions_by_task.values())).shape[1:]
    for task, decisions in decisions_by_task.items():
        name = f"`decisions_by_task[{task!r}]`"
        if decisions.dtype != torch.bool or decisions.ndim != 3 or not decisions.numel():
            raise ValueError(f"{name} must be bool [N, L, H], got {decisions.dtype} {tuple(decisions.shape)}.")
        if decisions.shape[1:] != shape:
            raise ValueError(
                f"{name} must have the {shape[0]} layers and {shape[1]} heads of the other tasks, "
                f"got {tuple(decisions.shape)}."
            )
    layers = range(shape[0]) if layers is None else layers
    if len(layers) != shape[0]:
        raise ValueError(f"`layers` must name the {shape[0]} routed layers, got {len(layers)}.")
    return layers


def _draw_panel(ax: Axes, task: str, decisions: torch.Tensor) -> None:
    frequency = decisions.float().mean(dim=0).T.cpu().numpy()  # [H, L]
    # cividis keeps its order for every kind of colour vision and in grey.
    ax.imshow(frequency, vmin=0, vmax=1, cmap="cividis", aspect="auto", interpolation="nearest")
    inputs = "input" if len(decisions) == 1 else "inputs"
    title = f"{printable(task)}: {len(decisions)} {inputs}, MSR {frequency.mean():.2f}"
    ax.set_title(title, loc="left", fontsize="medium", parse_math=False)
    ax.set_yticks(range(frequency.shape[0]))
    for boundary in range(1, frequency.shape[1]):
        ax.axvline(boundary - 0.5, color="white", linewidth=0.4)
    for boundary in range(1, frequency.shape[0]):
        ax.axhline(boundary - 0.5, color="white", linewidth=0.4)
