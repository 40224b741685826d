"""What the pictures of the reproduction have in common: how sets look, how axes are labelled and finished."""

from collections.abc import Sequence
from itertools import count
from typing import Any

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
    scale.set_major_locator(FixedLocator([-1, -0.3, -0.1, 0, 0.1, 0.3, 1, 3]))
    scale.set_major_formatter("{x:g}")
    scale.set_minor_locator(NullLocator())
    ax.margins(x=0.08 if axis == "x" else None, y=0.08 if axis == "y" else None)
    {"x": ax.axvline, "y": ax.axhline}[axis](0, color="grey", linewidth=0.8)


def set_rows(ax: Axes, names: Sequence[str]) -> None:
    """One row a set, from the top, every second one shaded; a line between the sensitive sets and the others."""
    for row in range(1, len(names), 2):
        ax.axhspan(row - 0.5, row + 0.5, color="grey", alpha=0.08, linewidth=0)
    ax.set_yticks(range(len(names)), [LABELS[name] for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    border = sum(name in SENSITIVE for name in names)
    if 0 < border < len(names):
        ax.axhline(border - 0.5, color="grey", linewidth=0.8, linestyle=":")


def write_beside(figure: Figure, ax: Axes, marks: Sequence[tuple[str, str, tuple[float, float]]]) -> None:
    """Writes a short text beside each mark of a finished picture, where it hides neither a mark nor another text.

    Args:
        figure: the axes' own.
        ax: with its final limits.
        marks: text, colour, and where the mark is.
    """
    figure.draw_without_rendering()  # lays the axes out
    places = ax.transData.transform([place for *_, place in marks]) * 72 / figure.dpi
    taken = [(place, np.array([3.0, 3.0])) for place in places]
    directions = [np.array([np.cos(angle), np.sin(angle)]) for angle in np.deg2rad(np.arange(0, 360, 30))]
    for (text, color, at), place in zip(marks, places):
        half = np.array([3.2 * len(text) + 0.5, 4.5])
        shifts = (radius * direction for radius in count(8, 6) for direction in directions)
        shift = next(
            s for s in shifts if not any((abs(place + s - other) < half + size).all() for other, size in taken)
        )
        taken.append((place + shift, half))
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0}
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": "small", "color": color}
        note = ax.annotate(text, at, tuple(shift), textcoords="offset points", arrowprops=line, **style)
        note.set_in_layout(False)


def offsets(count: int) -> np.ndarray:
    """Where in its row each of `count` marks goes, so that none hides another."""
    return np.linspace(-0.27, 0.27, count) if count > 1 else np.zeros(1)
