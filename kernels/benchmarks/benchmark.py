"""How candidates are timed: on the device and in turns, so that heat and power limits meet all of them alike.

`triton.testing.do_bench` times one candidate after the other and runs each at least eight times, where one run of
dense attention over 256K tokens takes seconds.
"""

import importlib.metadata
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


ROUNDS = 3
# bf16 kernels differ from each other by a few thousandths; another mask, by far more.
MAX_ERROR = 0.01


@dataclass(frozen=True)
class Times:
    """Times of one candidate.

    Args:
        milliseconds: one a run.
        timed_by: `"graph"` (replays of a CUDA graph, without the host's part), `"events"` or `"wall"` (host's clock).
    """

    milliseconds: list[float]
    timed_by: str

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    @property
    def spread(self) -> tuple[float, float]:
        """20% and 80% quantiles."""
        if len(self.milliseconds) == 1:
            return self.median, self.median
        low, *_, high = statistics.quantiles(self.milliseconds, n=5, method="inclusive")
        return low, high


def time_runs(
    runs: dict[Hashable, Callable[[], object]], *, repeats: int, rounds: int = ROUNDS, launches: int = 1
) -> dict[Hashable, Times]:
    """Times candidates that have run before, in alternating rounds.

    Args:
        runs: candidates by name.
        repeats: runs of each candidate a round.
        rounds: rounds.
        launches: calls a run. More than one are captured in a CUDA graph if the candidate allows it; a time is
            that of one call.

    Returns:
        `rounds * repeats` times a candidate.
    """
    graphs = {name: capture(run, launches) if launches > 1 else None for name, run in runs.items()}
    times: dict[Hashable, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            replay = graphs[name] or (lambda run=run: [run() for _ in range(launches)])
            times[name] += [time / launches for time in milliseconds(replay, repeats)]
    return {name: Times(times[name], "graph" if graphs[name] else "events") for name in runs}


def capture(run: Callable[[], object], launches: int) -> Callable[[], None] | None:
    """`launches` calls as one replay, `None` for a candidate that cannot be captured."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(launches):
                run()
    except RuntimeError:
        return None
    return graph.replay


def milliseconds(run: Callable[[], object], repeats: int) -> list[float]:
    """Device times of `repeats` runs; the first of several runs finds the chip idle and does not count."""
    if repeats > 1:
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def wall_milliseconds(run: Callable[[], object]) -> float:
    """Time of one run by the host's clock, from an idle device to an idle device."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun)


def compare(name: str, ours: Times, baseline: str, theirs: Times, **fields: Any) -> dict[str, Any]:
    """One result row: medians and 20% / 80% quantiles of both, `speedup` = baseline / ours, and further fields."""
    row: dict[str, Any] = {"name": name}
    row |= dict(zip(("ours_ms", "ours_20", "ours_80"), (ours.median, *ours.spread)))
    row |= {"baseline": baseline}
    row |= dict(zip(("baseline_ms", "baseline_20", "baseline_80"), (theirs.median, *theirs.spread)))
    row |= {"speedup": theirs.median / ours.median, "timed_by": ours.timed_by}
    if theirs.timed_by != ours.timed_by:
        row["baseline_timed_by"] = theirs.timed_by
    return row | fields


def require_agreement(name: str, actual: Tensor, expected: Tensor) -> None:
    """Raise RuntimeError if a candidate computes something else: only equal work is worth timing."""
    difference, norm = (torch.linalg.vector_norm(x, dtype=torch.float32) for x in (actual - expected, expected))
    error = (difference / norm).item()
    if not error < MAX_ERROR:
        raise RuntimeError(f"not timed: {name} is off by {error:.2e} of the norm")


def peak_memory(run: Callable[[], object]) -> int:
    """Bytes allocated at most during a run, those of its inputs included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def copy_bandwidth(size: int = 2**31) -> float:
    """Bytes a second, read and written together, of a device-to-device copy of `size` bytes."""
    source = torch.randint(-128, 128, (size,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * size / (statistics.median(milliseconds(lambda: target.copy_(source), 20)) / 1e3)


def environment(commit: str) -> dict[str, Any]:
    """What the rows of one file have in common: hardware, versions and commit."""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    versions |= {name: importlib.metadata.version(name) for name in ("triton", "transformers")}
    return {"hardware": torch.cuda.get_device_name(), "versions": versions, "commit": commit}


def checkout_commit(folder: Path = Path(__file__).parent) -> str | None:
    """The commit of a checkout, with `-dirty` when a file outside `folder`'s results differs; `None` without one."""
    if shutil.which("git") is None:
        return None

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)

    head = git("rev-parse", "--short", "HEAD")
    if head.returncode:
        return None
    changed = git("diff", "--quiet", "HEAD", "--", ":/", ":(exclude)results").returncode
    return head.stdout.strip() + ("-dirty" if changed else "")
