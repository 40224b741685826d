"""Writes the README's section on the reproduction, and its picture, from the results that lie with the adapters.

    cd recipes
    python -m reproduction.readme

The text goes between two comments in README.md, the picture, where full attention was measured on the same examples,
to hub_cards/reproduction.svg.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from reproduction.chart_style import (
    BLUE,
    LABELS,
    MSR,
    SCALED_RISE,
    STYLES,
    finish,
    logarithmic_rise,
    new_figure,
    offsets,
    set_rows,
)
from reproduction.collect import PAIRS
from reproduction.jobs import ONE_MASK
from reproduction.ruler_tables import mean_rows
from reproduction.words import CHOSEN, NO_LONGBENCH, NO_RULER


ROOT = Path(__file__).resolve().parents[2]
CARDS = ROOT / "hub_cards"
PICTURE = CARDS / "reproduction.svg"
BEGIN, END = "<!-- made by recipes/reproduction/readme.py -->", "<!-- end of what readme.py makes -->"
PICTURE_TEXT = "MSR of each set, and answer NLL above full attention when routed"
#: Way of running to its column.
COLUMNS = {"full": "NLL, full attention", "all_sparse": "NLL, all sparse", "routed": "NLL, routed"}
#: Accuracies nearer to each other than this are not told apart.
SAME_ACCURACY = 0.005


def main(arguments: list[str] | None = None) -> None:
    """Writes section and picture; see the module's description and `--help`."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SystemExit(f"README.md must hold the lines {BEGIN} and {END} once each, in this order.")
    records = read_records(CARDS)
    if "fa-ssa" not in records:
        raise SystemExit(
            f"{CARDS / 'smollm2-135m-fa-ssa'} must hold results.json, as `reproduction.collect` writes it."
        )
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    readme.write_text(f"{before}{BEGIN}\n\n{section(records)}\n\n{END}{after}", encoding="utf-8")
    if "full" in records["fa-ssa"]["ways"]:
        write_picture(records["fa-ssa"], PICTURE)
    else:
        PICTURE.unlink(missing_ok=True)


def read_records(cards: Path) -> dict[str, dict[str, Any]]:
    """The `results.json` of each mode pair whose adapter is there."""
    files = {pair: cards / f"smollm2-135m-{pair}" / "results.json" for pair in PAIRS}
    return {pair: json.loads(file.read_text(encoding="utf-8")) for pair, file in files.items() if file.exists()}


def section(records: Mapping[str, Mapping[str, Any]]) -> str:
    """The README's text between its two markers."""
    record = records["fa-ssa"]
    seeds = len(record["seeds"])
    means = (
        f"means over {seeds} training seeds, \N{PLUS-MINUS SIGN} one standard deviation" if seeds > 1 else "one seed"
    )
    statics = sum(way in record["ways"] for way in ONE_MASK)
    best = (
        f" Best static: for each set the best of {statics} {'ways' if statics > 1 else 'way'} to choose the same "
        "heads for every prompt, as many as the routers make sparse on average."
    )
    chosen = f"{best if statics else ''} {CHOSEN}"
    parts = [
        *_reached(record["bars"]),
        f"SmolLM2-135M-Instruct, FA-SSA, {record['examples']} evaluation prompts of each "
        f"[set](hub_cards/smollm2-135m-fa-ssa#results); NLL in nats per answer token, {means}.{chosen}",
        _table([_main_row(row) for row in record["tasks"]]),
    ]
    if "full" in record["ways"]:
        parts.append(
            f"![{PICTURE_TEXT}{' and with static choices of heads' if statics else ''}](hub_cards/{PICTURE.name})"
        )
        parts.append(f"{_accuracy(record['tasks'])}{_better_statics(record['tasks'])}")
    if others := {pair: other for pair, other in records.items() if pair != "fa-ssa"}:
        parts += [
            "The other mode pairs, each by " + " or ".join(sorted({_seeds(other) for other in others.values()})) + ":",
            _table(_other_rows(others)),
        ]
    if record["generalisation"]:
        rows = [{**row, "set": LABELS[row["set"]]} for row in record["generalisation"]]
        parts += [f"Prompts that training did not hold. {record['notes']['generalisation']}", _table(rows)]
    if record["ruler"]:
        parts += [
            f"RULER, mean scores of its tasks from 0 to 100. {record['notes']['ruler']}",
            _table(mean_rows(records)),
        ]
    measured = [f"{name} {version}" for name, version in record["versions"].items()]
    measured += [f"commit {record['commit']}"] if record["commit"] else []
    parts.append(
        f"{NO_LONGBENCH}{'' if record['ruler'] else f' {NO_RULER}'} Measured on one {record['hardware']} with "
        f"{', '.join(measured)}; "
        "[how](recipes/reproduction), and [all tables](recipes/reproduction/results/tables.md)."
    )
    return "\n\n".join(parts)


def _reached(bars: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many of the bars are reached, and which are not; nothing without bars."""
    if not bars:
        return []
    asked = f"the {len(bars)} figures [asked of FA-SSA](recipes/reproduction)"
    if not (missed := [bar for bar in bars if bar["reached"] != "yes"]):
        return [f"All of {asked} are reached{_means_only(bars)}."]
    lines = (f"{_bar(bar['bar'])}: {bar['measured']:z.3f}, asked {bar['asked']}" for bar in missed)
    reached = f"{len(bars) - len(missed)} are reached{_means_only(bars)}"
    return [f"Of {asked}, {reached}. Not reached: {'; '.join(lines)}."]


def _means_only(bars: Sequence[Mapping[str, Any]]) -> str:
    """Which bars the mean reaches and not each training seed alone."""
    reached = [bar for bar in bars if bar["reached"] == "yes"]
    partly = [f"{_bar(bar['bar'])}, {bar['alone']}" for bar in reached if len(set(bar["alone"].split(" of "))) > 1]
    return f" by the mean of the seeds; by fewer seeds alone: {'; '.join(partly)}" if partly else ""


def _bar(name: str) -> str:
    """A bar by its set's or way's name for people."""
    what, colon, rest = name.partition(": ")
    return f"{rest} ({LABELS.get(what) or STYLES[what][0]})" if colon else what


def _accuracy(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where routing's accuracy is below full attention's, and where NLL does not tell it."""
    below = {row["set"]: _mean(row["accuracy"]["full"]) - _mean(row["accuracy"]["routed"]) for row in rows}
    below = {name: by for name, by in sorted(below.items(), key=lambda item: -item[1]) if by > SAME_ACCURACY}
    what = "Accuracy, the share of answer tokens that are the most likely ones given the right ones before them,"
    if not below:
        return f"{what} is nowhere below full attention's by more than {SAME_ACCURACY:g}."
    hidden = [
        row["set"] for row in rows if row["set"] in below and _mean(row["nll"]["routed"]) <= _mean(row["nll"]["full"])
    ]
    falls = "; ".join(f"{LABELS[name]}, {by:.3f}" for name, by in below.items())
    but = f" In {len(hidden)} of these NLL is not higher than full attention's and hides the loss." if hidden else ""
    where = f"{len(below)} of {len(rows)} sets by more than {SAME_ACCURACY:g}"
    return f"{what} is below full attention's in {where}: {falls}.{but}"


def _better_statics(rows: Sequence[Mapping[str, Any]]) -> str:
    """In which sets static choices of heads have a lower NLL than routing, after a space; empty without any."""
    kinds = {
        "The best static choice has": ONE_MASK,
        "Two choices, one for question answering and one for the rest, which takes to know the kind of every prompt, "
        "have": ("static_category",),
    }
    text = ""
    for begin, ways in kinds.items():
        better = [
            LABELS[row["set"]]
            for row in rows
            if any(_mean(row["nll"][way]) < _mean(row["nll"]["routed"]) for way in ways if way in row["nll"])
        ]
        text += f" {begin} a lower NLL than routing in: {'; '.join(better)}." if better else ""
    return text


def _main_row(row: Mapping[str, Any]) -> dict[str, str]:
    nll = row["nll"]
    cells = {"set": LABELS[row["set"]], "MSR": _text(row["msr"])}
    cells |= {title: _text(nll[way]) for way, title in COLUMNS.items() if way in nll}
    if statics := [way for way in ONE_MASK if way in nll]:
        best = min(statics, key=lambda way: _mean(nll[way]))
        cells["NLL, best static"] = f"{_mean(nll[best]):.2f}, {best.removeprefix('static_')}"
    accuracy = row["accuracy"]
    return cells | {f"accuracy, {way}": f"{_mean(accuracy[way]):.3f}" for way in ("full", "routed") if way in accuracy}


def _other_rows(records: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = [{"set": LABELS[row["set"]]} for row in next(iter(records.values()))["tasks"]]
    for pair, record in records.items():
        for line, row in zip(rows, record["tasks"], strict=True):
            line[f"{pair.upper()}: MSR"] = _text(row["msr"])
            for way in ("all_sparse", "routed"):
                if way in row["nll"]:
                    line[f"{pair.upper()}: {COLUMNS[way]}"] = _text(row["nll"][way])
    return rows


def _table(rows: Sequence[Mapping[str, str | None]]) -> str:
    cells = (map(str, rows[0]), *([row.get(name) or "-" for name in rows[0]] for row in rows))
    lines = [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _seeds(record: Mapping[str, Any]) -> str:
    count = len(record["seeds"])
    return f"{count} training seeds" if count > 1 else "one training seed"


def _mean(figure: Any) -> float:
    return figure["mean"] if isinstance(figure, Mapping) else figure


def _std(figure: Any) -> float:
    return figure["std"] if isinstance(figure, Mapping) else 0.0


def _text(figure: Any) -> str:
    spread = f" \N{PLUS-MINUS SIGN} {_std(figure):.2f}" if isinstance(figure, Mapping) else ""
    return f"{_mean(figure):.2f}{spread}"


def overview(record: Mapping[str, Any]) -> Figure:
    """MSR of each set, and NLL above full attention of each way of running, from a mode pair's `results.json`."""
    rows = record["tasks"]
    names = [row["set"] for row in rows]
    figure = new_figure(10, 4.4)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 3))
    places = np.arange(len(rows))
    shares = [row["msr"] for row in rows]
    left.errorbar(list(map(_mean, shares)), places, xerr=list(map(_std, shares)), color=BLUE, fmt="o", capsize=3)
    left.plot([row["t"] for row in rows], places, color="grey", marker="|", markersize=14, ls="")
    ways = [way for way in STYLES if way in rows[0]["nll"]]
    for offset, way in zip(offsets(len(ways)), ways):
        label, color, marker, _ = STYLES[way]
        rises = [_mean(row["nll"][way]) - _mean(row["nll"]["full"]) for row in rows]
        spread = [_std(row["nll"][way]) for row in rows]
        right.errorbar(rises, places + offset, xerr=spread, color=color, fmt=marker, markersize=5, label=label)
    set_rows(left, names)
    logarithmic_rise(right, "x")
    finish(left, MSR, title="How sparse each set runs; grey: its target")
    has_statics = any(way != "routed" for way in ways)
    finish(
        right, SCALED_RISE, title=f"What routing costs{', and what as many static heads cost' if has_statics else ''}"
    )
    style = {"title": "bars: one standard deviation", "title_fontsize": "small", "fontsize": "small"}
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3, **style)
    return figure


def write_picture(record: Mapping[str, Any], path: Path) -> None:
    """Writes `overview` as SVG; the same record gives the same file."""
    with matplotlib.rc_context({"svg.hashsalt": "reproduction"}):
        overview(record).savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
