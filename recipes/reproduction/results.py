"""The files that jobs leave behind."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from reproduction.jobs import ONE_MASK, all_jobs


#: Results by job.
Results = Mapping[str, dict[str, Any]]


def result_file(output: Path, name: str) -> Path:
    """Where a job's result is."""
    return output / "jobs" / f"{name}.json"


def read_result(output: Path, name: str) -> dict[str, Any]:
    """A finished job's result."""
    return json.loads(result_file(output, name).read_text(encoding="utf-8"))


def read_all(output: Path) -> dict[str, dict[str, Any]]:
    """Every result there is, by job, the most important first; exits with one sentence if no job ran there."""
    if not (output / "jobs").is_dir():
        raise SystemExit(f"`--output` must be a folder with jobs/, as `reproduction.run` makes it, got {output}.")
    names = [job.name for job in all_jobs()]
    return {name: read_result(output, name) for name in names if result_file(output, name).exists()}


def write_result(output: Path, name: str, result: dict[str, Any]) -> None:
    """Writes a result; the file appears whole or not at all."""
    file = result_file(output, name)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.replace(file)


def mean_msr(result: Mapping[str, Any], sets: Sequence[str]) -> float:
    """Mean model sparsity ratio over sets, each counted once, of a result with a table of tasks."""
    return mean(row["msr"] for row in result["tasks"] if row["set"] in sets)


def static_masks(results: Results) -> dict[str, list[list[int]]]:
    """A mask for every prompt, by way of choosing it, of several the first: 1 = sparse, a row a layer."""
    jobs = {way: name for way, (name, _) in ONE_MASK.items() if name in results}
    return {way: next(iter(results[name]["masks"].values()))["mask"] for way, name in jobs.items()}
