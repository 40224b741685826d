"""Writes the README's performance section, and its picture, from the result files of one GPU.

    python kernels/benchmarks/report.py

The text goes between two comments in README.md, the picture to hub_cards/performance.svg.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "nvidia-h200"
PICTURE = ROOT / "hub_cards" / "performance.svg"
BEGIN, END = "<!-- made by kernels/benchmarks/report.py -->", "<!-- end of what report.py makes -->"

TIMES = "\N{MULTIPLICATION SIGN}"
LENGTHS = ("2K", "4K", "8K", "16K", "32K", "64K", "128K", "256K")
SHARES = ("0", "0.5", "0.75", "0.875", "1")
SERIAL = "heads gathered by mode, {} and a streaming launch, scattered back"
COUNTERFACTUAL = ", `counterfactual_fraction` {}"
STEP = "training step of the whole model, {}, MSR 0.70"
TRAINING = "layer forward + backward, {}, MSR 0.75"
MODEL = ("32K", "128K", "256K")
# Row names, what replaces their braces, what was measured, and against what.
FURTHER = (
    ("prefill/{}/msr0/fa4", ("32K", "128K"), "layer attention, {}, MSR 0", "flash-attn-4"),
    ("prefill/{}/msr0.75/serial-fa4", ("32K", "128K"), "layer attention, {}, MSR 0.75", SERIAL.format("flash-attn-4")),
    ("prefill/{}/msr0.875/serial", ("16K", "64K", "256K"), "layer attention, {}, MSR 0.875", SERIAL.format("FA2")),
    ("prefill/{}/msr0.75/flex", ("128K",), "layer attention, {}, MSR 0.75", "FlexAttention, mask building counted"),
    ("selection/{}", ("128K",), "choosing XA's blocks, {}, all heads", "dense attention of the layer"),
    ("router/{}", ("512", "128K", "1M"), "router of a layer, prompt of {}", "plain torch in a CUDA graph"),
    ("decode/128K/msr0.75/batch{}", ("1", "8"), "decode attention, 128K cache, MSR 0.75, batch {}", "dense decode"),
    ("model_prefill/{}/fa-ssa", MODEL, "whole-model prefill, {}, FA-SSA, MSR 0.70", "cuDNN SDPA"),
    ("model_prefill/{}/fa-xa", MODEL, "whole-model prefill, {}, FA-XA, MSR 0.70", "cuDNN SDPA"),
    ("model_prefill/{}/xa-ssa", MODEL, "whole-model prefill, {}, XA-SSA, MSR 0.70", "cuDNN SDPA"),
    ("train/{}/msr0.75/dual-fa2", ("64K",), TRAINING, "both modes of every head, FA2"),
    ("train/{}/msr0.75/dual-cudnn", ("64K",), TRAINING, "the same, cuDNN"),
    ("train/{}/msr0.75/dual-fa4", ("64K",), TRAINING, "the same, flash-attn-4"),
    ("train/{}/msr0.75/dense-cudnn", ("64K",), TRAINING, "dense cuDNN, no routing"),
    ("train/{}/msr0.75/dense-fa4", ("64K",), TRAINING, "dense flash-attn-4, no routing"),
    ("train/{}/msr0.75/counterfactual0.25", ("64K",), TRAINING + COUNTERFACTUAL.format("1/4"), "the same, 1"),
    ("train/{}/msr0.75/counterfactual0.125", ("64K",), TRAINING + COUNTERFACTUAL.format("1/8"), "the same, 1"),
    ("train_step/{}", ("64K",), STEP, "both modes of every head, FA2"),
    ("train_step/{}/dual-cudnn", ("64K",), STEP, "the same, cuDNN"),
)
GIGABYTES, WHOLE = ("bytes", 1e-9, "{:.1f} GB"), ("sequences", 1, "{:.0f}")
TOKENS = ("tokens_per_s", 1, "{:.0f}")
# Row names, what was measured, and its field, scale and format.
GENERATION = (
    ("kv_bytes/{}", "keys and values of one sequence, {}", *GIGABYTES),
    ("peak_memory/generate/{}", "most memory in use until the first token, {}", *GIGABYTES),
    ("max_batch/{}", "sequences that fit, {} each", *WHOLE),
    ("decode_tokens_per_s/{}/batch1", "tokens a second, {}, batch {}", *TOKENS),
    ("decode_tokens_per_s/{}/batchmax", "tokens a second, {}, batch {}, the most that dense holds", *TOKENS),
)
# Field of a row: how a note on it reads.
NOTES = {
    "baseline_mask_ms": "mask {:.3g} ms",
    "share_of_dense": "{:.1%} of dense attention",
    "density": "{:.0%} of the pairs kept",
    "gather_and_projection_ms": "gather and projection {:.3g} ms besides",
    "bandwidth_share": "{:.0%} of the copy bandwidth",
    "peak_memory_ratio": f"peak memory {{:.2f}}{TIMES}",
}

Rows = Mapping[str, Mapping[str, Any]]


def load(results: Path) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Rows by name, and what each file's rows have in common by operator."""
    files = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))}
    rows = {row["name"]: row for file in files.values() for row in file.pop("rows")}
    return rows, files


def performance_section(results: Path) -> str:
    """The README's text between its two markers."""
    rows, files = load(results)
    link = results.relative_to(ROOT).as_posix()
    parts = [
        f"Measured on one {files['prefill']['hardware']}; [all rows, with their conditions]({link}). Speed-up of one "
        "layer's prefill attention over causal cuDNN SDPA in the same run:",
        prefill_table(rows),
    ]
    if further := further_table(rows):
        parts += ["And against other things that could run instead:", further]
    if generation := generation_table(rows):
        parts += ["Generation of a whole model, FA-SSA at MSR 0.70, against the same model dense:", generation]
    if step := rows.get("train_step/64K"):
        parts.append(
            f"At the {number(step['ours_tokens_per_s'])} tokens a second of that training step, 300 steps of 48 "
            f"sequences of 64K tokens take {step['h200_hours']:.0f} H200 hours; the paper trained 96 A800 hours."
        )
    two, its_files = load(results.with_name(f"{results.name}-x2"))
    if step := two.get("train_step/64K/fsdp2"):
        rates = [number(step[f"{side}_tokens_per_s"]) for side in ("ours", "baseline")]
        parts.append(
            f"Two of these GPUs, the model cut over them by FSDP2, train {rates[0]} tokens a second where one trains "
            f"{rates[1]}: {times(step['speedup'])}."
        )
    files |= its_files
    environments = {describe_environment(file): [] for file in files.values()}
    for name, file in files.items():
        environments[describe_environment(file)].append(f"`{name}`")
    parts.append("; ".join(f"{', '.join(names)}: {environment}" for environment, names in environments.items()) + ".")
    return "\n\n".join(parts)


def describe_environment(file: Mapping[str, Any]) -> str:
    versions = {name: file["versions"][name] for name in ("torch", "triton", "cuda")}
    return ", ".join(f"{name} {version}" for name, version in versions.items()) + f", commit {file['commit']}"


def prefill_table(rows: Rows) -> str:
    """Speed-ups over cuDNN by length and share of sparse heads."""
    lines = ["| attention of one layer | " + " | ".join(f"MSR {share}" for share in SHARES) + " |"]
    lines.append("|---" * (len(SHARES) + 1) + "|")
    for length in LENGTHS:
        cells = [rows.get(f"prefill/{length}/msr{share}/cudnn") for share in SHARES]
        if any(cells):
            lines.append(
                f"| {length} | " + " | ".join(times(cell["speedup"]) if cell else "" for cell in cells) + " |"
            )
    return "\n".join(lines)


def further_table(rows: Rows) -> str:
    """The rows of `FURTHER` that were measured, empty without any."""
    lines = ["| what | against | ms | theirs, ms | speed-up | |", "|---|---|---|---|---|---|"]
    for name, values, what, against in FURTHER:
        for value in values:
            if row := rows.get(name.format(value)):
                notes = ", ".join(text.format(row[field]) for field, text in NOTES.items() if field in row)
                figures = [number(row["ours_ms"]), number(row["baseline_ms"]), times(row["speedup"])]
                lines.append(f"| {' | '.join([what.format(value), against, *figures, notes])} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def generation_table(rows: Rows) -> str:
    """The rows of `GENERATION` that were measured, empty without any."""
    lines = ["| what | routed | dense | routed / dense | in an eager loop |", "|---|---|---|---|---|"]
    for name, what, field, scale, text in GENERATION:
        for length in ("32K", "128K"):
            if row := rows.get(name.format(length)):
                ours, theirs = (text.format(row[f"{side}_{field}"] * scale) for side in ("ours", "baseline"))
                eager = times(row["eager_speedup"]) if "eager_speedup" in row else ""
                ratio = times(row["ratio"] if "ratio" in row else row["speedup"])
                lines.append(f"| {what.format(length, row.get('batch'))} | {ours} | {theirs} | {ratio} | {eager} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def times(value: float) -> str:
    """A ratio in three digits, with a multiplication sign."""
    return (f"{value:.2f}" if value < 10 else f"{value:.1f}") + TIMES


def number(value: float) -> str:
    """Milliseconds in three digits, whole from 100 on."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="result files of one GPU")
    results = parser.parse_args().results.resolve()
    readme = ROOT / "README.md"
    before, _, after = readme.read_text(encoding="utf-8").partition(BEGIN)
    after = after.partition(END)[2]
    readme.write_text(f"{before}{BEGIN}\n\n{performance_section(results)}\n\n{END}{after}", encoding="utf-8")
    from picture import draw  # needs matplotlib

    draw(load(results)[0], PICTURE)


if __name__ == "__main__":
    main()
