"""Measures operators on this machine's GPU and writes the rows that the README's tables are made of.

    python kernels/benchmarks/sweep.py prefill selection
    python kernels/benchmarks/sweep.py prefill --lengths 8192 131072 --output /tmp/results

An operator's tests run first, their GPU tier; red tests end the sweep. Rows go to `<output>/<gpu>/<operator>.json`, or
`<output>/<gpu>-x2/...` for those of two GPUs, as soon as they are measured. Those already there stay if hardware,
versions and commit are the same.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark import checkout_commit, environment
from registry import OPERATORS


ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"


class ResultFile:
    """The rows of one operator on one GPU, in a JSON file.

    Args:
        path: the file; its rows are kept if they were measured in the same environment.
        shared: hardware, versions and commit of the rows to come.
        conditions: what else they have in common.
    """

    def __init__(self, path: Path, shared: dict[str, Any], conditions: str):
        self.path, self.header = path, shared | {"conditions": conditions}
        self.rows: dict[str, dict[str, Any]] = {}
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            clean = not shared["commit"].endswith("-dirty")  # two changed trees of one commit need not be alike
            if clean and all(found.get(name) == value for name, value in shared.items()):
                self.rows = {row["name"]: row for row in found["rows"]}

    def add(self, row: dict[str, Any]) -> None:
        """Add a row, or replace the one of its name, and write the file."""
        self.rows[row["name"]] = {name: _rounded(value) for name, value in row.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.header | {"rows": list(self.rows.values())}, indent=1)
        partial = self.path.with_suffix(".partial")
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, self.path)


def run_tests(files: Sequence[str]) -> None:
    """Run the GPU tier of test files.

    Raises:
        SystemExit: a test fails, or none was found.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-n",
        "auto",
        "--maxprocesses",
        "12",
        "--rootdir",
        str(ROOT),
        "-c",
        "pyproject.toml",
        *files,
    ]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code:
        raise SystemExit(f"not measured: pytest ends with {code} on {', '.join(files)}")


def measure(name: str, lengths: Sequence[int], output: Path, commit: str) -> None:
    """Measure one operator."""
    shared, module = environment(commit), importlib.import_module(name)
    gpus = OPERATORS[name].gpus
    folder = output / (shared["hardware"].lower().replace(" ", "-") + (f"-x{gpus}" if gpus > 1 else ""))
    file = ResultFile(folder / f"{name}.json", shared, module.CONDITIONS)
    for row in module.rows(lengths):
        file.add(row)
        print(describe(row), flush=True)


def describe(row: dict[str, Any]) -> str:
    """A row in one line: its numbers but for the quantiles."""
    numbers = {key: value for key, value in row.items() if isinstance(value, int | float) and key[-3:] not in _SPREAD}
    return f"{row['name']:36s} " + "  ".join(f"{key} {value:.5g}" for key, value in numbers.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted({length for operator in OPERATORS.values() for length in operator.lengths})
    parser.add_argument("operators", nargs="+", choices=OPERATORS, metavar="OPERATOR", help=", ".join(OPERATORS))
    parser.add_argument("--lengths", type=int, nargs="+", choices=known, metavar="TOKENS", help="only these lengths")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--commit", help="the commit measured, in a copy that has no git history")
    options = parser.parse_args(arguments)
    commit = options.commit or checkout_commit()
    if commit is None:
        parser.error("`--commit` must be given where git does not know the commit")
    green: set[str] = set()
    for name in options.operators:
        operator = OPERATORS[name]
        lengths = [n for n in operator.lengths if options.lengths is None or n in options.lengths]
        if missing := [file for file in operator.tests if file not in green]:
            run_tests(missing)
            green.update(missing)
        measure(name, lengths, options.output, commit)


_SPREAD = ("_20", "_80")


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
