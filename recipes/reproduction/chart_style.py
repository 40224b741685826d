"""What the pictures of the reproduction have in common: how sets look, how axes are labelled and finished."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from reproduction.examples import SENSITIVE, TASKS

from elastic_peft.report_figures import COLORS as PALETTE
from elastic_peft.report_figures import MARKERS as MARKER_SHAPES


BLUE, RED, GREEN, PURPLE, ORANGE, SKY, BLACK = PALETTE
COLORS = dict(zip(TASKS, (BLUE, SKY, GREEN, PURPLE, RED, ORANGE, BLACK)))
MARKERS = dict(zip(TASKS, MARKER_SHAPES))
LABELS = {
    "sqa_foldoc": "QA, glossary",
    "sqa_pkg": "QA, packages",
    "niah_single": "QA, needle",
    "mhop_wordnet": "QA, two hops",
    "summ_rfc": "summary",
    "code_stdlib": "code",
    "icl_wordnet": "many-shot labels",
}
#: Ways of running: label, colour, marker, line.
STYLES = {
    "routed": ("routed", BLUE, "o", "-"),
    "static_learned": ("static, learned", PURPLE, "^", ":"),
    "static_loss": ("static, loss of each head", GREEN, "D", "-."),
    "static_retrieval": ("static, retrieval scores", RED, "s", "--"),
    "static_random": ("static, random", BLACK, "x", ""),
    "static_category": ("static, learned for each kind of sets", ORANGE, "*", ""),
}
MSR = "MSR, share of sparse heads"
RISE = "NLL above full attention, nats a token"
#: NLL above full attention up to which the scale of `logarithmic_rise` is linear.
LINEAR = 0.1
SCALED_RISE = f"{RISE}\n(linear up to {LINEAR:g}, logarithmic beyond)"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, inches wide and high, that makes room for its labels."""
    return Figure(figsize=(width, height), layout="constrained")


def finish(ax: Axes, x: str | None = None, y: str | None = None, title: str | None = None) -> None:
    """Labels the axes and takes away what shows nothing."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.3)
    ax.set_axisbelow(True)
    if x:
        ax.set_xlabel(x)
    if y:
        ax.set_ylabel(y)
    if title:
        ax.set_title(title, loc="left", fontsize="medium")


def logarithmic_rise(ax: Axes, axis: str) -> None:
    """A scale for NLL above full attention that shows hundredths and whole nats, and values below 0."""
    getattr(ax, f"set_{axis}scale")("symlog", linthresh=LINEAR, linscale=0.7)
    scale = getattr(ax, f"{axis}axis")
    scale.set_major_locator(FixedLocator([-1, -0.3, -0.1, -0.05, 0, 0.05, 0.1, 0.3, 1, 3]))
    scale.set_major_formatter("{x:g}")
    scale.set_minor_locator(NullLocator())
    ax.margins(x=0.08 if axis == "x" else None, y=0.08 if axis == "y" else None)
    {"x": ax.axvline, "y": ax.axhline}[axis](0, color="grey", linewidth=0.8)


def set_rows(ax: Axes, names: Sequence[str]) -> None:
    """One row a set, from the top; a line between the sensitive sets and the others."""
    ax.set_yticks(range(len(names)), [LABELS[name] for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    border = sum(name in SENSITIVE for name in names)
    if 0 < border < len(names):
        ax.axhline(border - 0.5, color="grey", linewidth=0.8, linestyle=":")


def offsets(count: int) -> np.ndarray:
    """Where in its row each of `count` marks goes, so that none hides another."""
    return np.linspace(-0.27, 0.27, count) if count > 1 else np.zeros(1)
