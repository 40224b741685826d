"""Draws the README's picture of the result rows."""

from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from report import LENGTHS, SHARES, TIMES, Rows


LAYERS = 32


def draw(rows: Rows, path: Path) -> None:
    """Speed-up over cuDNN against length, and how a whole model's prefill splits into attention and the rest."""
    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "performance", "font.size": 9}  # the same rows draw the same file
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    draw_speedups(left, rows)
    draw_shares(right, rows)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    pyplot.close(figure)


def draw_speedups(axes: Axes, rows: Rows) -> None:
    """One line a share of sparse heads; dashed, what else could run."""

    def line(share: str, theirs: str | None) -> tuple[list[int], list[float]]:
        points = []
        for place, length in enumerate(LENGTHS):
            cudnn = rows.get(f"prefill/{length}/msr{share}/cudnn")
            other = rows.get(f"prefill/{length}/msr{share}/{theirs}") if theirs else cudnn
            if cudnn and other:
                milliseconds = other["baseline_ms"] if theirs else other["ours_ms"]
                points.append((place, cudnn["baseline_ms"] / milliseconds))
        return [place for place, _ in points], [value for _, value in points]

    for share, color in zip(SHARES, matplotlib.colormaps["cividis"]([0.0, 0.25, 0.5, 0.7, 0.88])):
        axes.plot(*line(share, None), color=color, marker="o", markersize=3, label=f"routed, MSR {share}")
    others = {
        ("0", "fa2"): ("FA2, dense", ":", "0.55"),
        ("0", "fa4"): ("flash-attn-4, dense", ":", "0.2"),
        ("0.75", "serial"): ("serial with FA2, MSR 0.75", "--", "0.55"),
        ("0.75", "serial-fa4"): ("serial with flash-attn-4, MSR 0.75", "--", "0.2"),
    }
    for (share, name), (text, style, color) in others.items():
        if (points := line(share, name))[0]:
            axes.plot(*points, linestyle=style, color=color, label=text)
    axes.axhline(1, color="0.8", linewidth=0.8, zorder=0)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}" + TIMES)
    axes.set_xticks(range(len(LENGTHS)), LENGTHS)
    axes.set(xlabel="prompt, tokens", title="attention of one layer: speed-up over cuDNN")
    axes.set_ylim(top=200)  # room for the legend
    axes.legend(frameon=False, fontsize=7.5, loc="upper left", ncols=2)


def draw_shares(axes: Axes, rows: Rows) -> None:
    """Bars of whole-model prefill over the dense model's, each split at the part that is not attention.

    That part is the dense model's time less `LAYERS` times one layer's dense attention, and the same in every bar.
    """
    bars = []
    for length in LENGTHS:
        layer = rows.get(f"prefill/{length}/msr0/cudnn")
        models = {pair: rows.get(f"model_prefill/{length}/{pair.lower()}") for pair in ("FA-SSA", "FA-XA", "XA-SSA")}
        models = {pair: row for pair, row in models.items() if row}
        if not (layer and models):
            continue
        dense = next(iter(models.values()))["baseline_ms"]
        rest = 1 - LAYERS * layer["baseline_ms"] / dense
        bars.append((f"{length} dense", rest, 1.0))
        bars += [(f"{length} {pair}", rest, row["ours_ms"] / dense) for pair, row in models.items()]
    for place, (_, rest, total) in enumerate(bars):
        axes.bar(place, rest, color="#d5d8de", label="everything else" if place == 0 else None)
        axes.bar(
            place, total - rest, bottom=rest, color="#00224e", label="attention and routing" if place == 0 else None
        )
        axes.text(place, total + 0.01, f"{total:.2f}", ha="center", va="bottom", fontsize=7.5)
    names = [name for name, _, _ in bars]
    axes.set_xticks(range(len(bars)), names, fontsize=7.5, rotation=45, ha="right", rotation_mode="anchor")
    axes.set(title="prefill of a whole model, MSR 0.70: time over dense", ylim=(0, 1.2))
    axes.legend(frameon=False, fontsize=7.5, loc="upper right", ncols=2)
