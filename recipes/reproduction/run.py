"""Runs the reproduction: several workers take jobs in the order of importance.

    cd recipes
    python -m reproduction.run --model SmolLM2-135M-Instruct --data tasks_4k.npz --output ../out/reproduction

Each job writes `jobs/{name}.json`, and each training `adapters/{name}/`; a job whose JSON is there is not run again.
A job that fails leaves `failed/{name}.txt`, is tried again the next time, and makes the exit status 1. Results that
another recipe made are not mixed with new ones: nothing starts beside them.
"""

import argparse
import gc
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from reproduction.jobs import Job, all_jobs
from reproduction.kinds import run_job
from reproduction.results import read_result, result_file, write_result
from reproduction.workplace import Workplace


WAIT = 1.0  # seconds between looks at what other workers finished
#: Guesses before a job of a kind has been timed, in seconds: whole jobs, and each step of a training.
GUESS = {"train": 25.0, "masks": 30.0, "adapter": 60.0, "ruler": 120.0}
STEP_GUESS = 0.3


def main(arguments: list[str] | None = None) -> None:
    """Starts the workers and waits for them; see the module's description and `--help`."""
    args = _parse(arguments)
    jobs = _chosen(args.only)
    place = _workplace(args)
    if args.deadline is not None:  # this is a worker
        sys.exit(work(place, jobs, args.deadline) > 0)
    refuse_other_recipes(place, jobs)
    shutil.rmtree(args.output / "claims", ignore_errors=True)
    for folder in ("jobs", "failed", "adapters", "claims"):
        (args.output / folder).mkdir(parents=True, exist_ok=True)
    deadline = time.time() + args.budget_seconds
    command = [sys.executable, "-m", "reproduction.run", *(arguments or sys.argv[1:]), "--deadline", str(deadline)]
    workers = [subprocess.Popen(command, env=environment) for environment in _environments(args)]
    statuses = [worker.wait() for worker in workers]
    sys.exit(any(statuses))


def refuse_other_recipes(place: Workplace, jobs: Sequence[Job]) -> None:
    """Exits with one sentence if a result of the jobs, or one that they read, was made by another job or recipe."""
    names = {name for job in jobs for name in (job.name, *job.needs)}
    files = [
        str(result_file(place.output, job.name))
        for job in all_jobs()
        if job.name in names
        and result_file(place.output, job.name).exists()
        and not _made(place, job, read_result(place.output, job.name))
    ]
    if files:
        raise SystemExit(f"Another recipe made {', '.join(files)}; remove them or take another folder.")


def _made(place: Workplace, job: Job, result: dict[str, Any]) -> bool:
    """Whether the job as it is now made a result; fields that came later had their defaults."""
    known = {field.name for field in fields(Job)}
    then = Job(**{name: value for name, value in result["job"].items() if name in known})
    as_json = [json.loads(json.dumps(asdict(made_by))) for made_by in (then, job)]
    return as_json[0] == as_json[1] and result.get("recipe") == place.recipe(job)._asdict()


def _environments(args: argparse.Namespace) -> list[dict[str, str]]:
    """The environment of each worker; workers of `"cuda"` take the visible GPUs in turn, one each."""
    if args.device != "cuda":
        return [dict(os.environ)] * args.workers
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return [os.environ | {"CUDA_VISIBLE_DEVICES": visible[worker % count]} for worker in range(args.workers)]


def work(place: Workplace, jobs: Sequence[Job], deadline: float) -> int:
    """Takes jobs until none is left that can start before the deadline.

    Args:
        place: where they run.
        jobs: in the order of importance.
        deadline: as `time.time()` counts.

    Returns:
        How many jobs failed.
    """
    failed = 0
    while (job := _next(place, jobs, deadline)) is not None:
        if isinstance(job, float):
            time.sleep(job)
            continue
        print(f"{job.name}: started", flush=True)
        started = time.time()
        gc.collect()  # the last job's trainer and its callbacks refer to each other
        if place.device != "cpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(place.device)
        head = {"job": asdict(job), "recipe": place.recipe(job)._asdict()}
        try:
            result = run_job(job, place)
        except Exception:
            (place.output / "failed" / f"{job.name}.txt").write_text(traceback.format_exc(), encoding="utf-8")
            print(f"{job.name}: failed\n{traceback.format_exc()}", flush=True)
            failed += 1
            continue
        seconds = time.time() - started
        write_result(place.output, job.name, {**head, "seconds": seconds, **_machine(place), **result})
        print(f"{job.name}: {seconds:.0f} s", flush=True)
    return failed


def _next(place: Workplace, jobs: Sequence[Job], deadline: float) -> Job | float | None:
    """The next job, now this worker's; or how many seconds to wait for others' results; or None at the end."""
    output = place.output
    seconds = _Seconds(place, jobs)
    waits = False
    for job in jobs:
        if result_file(output, job.name).exists() or (output / "claims" / job.name).exists():
            continue
        if time.time() + seconds(job) > deadline:
            continue
        missing = [name for name in job.needs if not result_file(output, name).exists()]
        if missing:
            waits = waits or all(_is_running(output, name) for name in missing)
            continue
        try:
            (output / "claims" / job.name).touch(exist_ok=False)
        except FileExistsError:
            continue
        (output / "failed" / f"{job.name}.txt").unlink(missing_ok=True)
        return job
    return WAIT if waits else None


def _is_running(output: Path, name: str) -> bool:
    return (output / "claims" / name).exists() and not (output / "failed" / f"{name}.txt").exists()


class _Seconds:
    """Predicts how long a job takes: as long as the slowest of its kind so far, trainings by their steps."""

    def __init__(self, place: Workplace, jobs: Sequence[Job]):
        self.place = place
        self.whole = dict(GUESS)
        self.step = STEP_GUESS
        finished = (job.name for job in jobs if result_file(place.output, job.name).exists())
        done = [read_result(place.output, name) for name in finished]
        for kind in GUESS:
            times = [result["seconds"] for result in done if result["job"]["kind"] == kind]
            if times and kind == "train":
                steps = (r["seconds"] / r["log"][-1]["step"] for r in done if r["job"]["kind"] == kind)
                self.whole[kind], self.step = 0.0, max(steps)
            elif times:
                self.whole[kind] = max(times)

    def __call__(self, job: Job) -> float:
        steps = self.place.recipe(job).arguments["max_steps"] if job.kind == "train" else 0
        return self.whole[job.kind] + self.step * steps


def _machine(place: Workplace) -> dict[str, Any]:
    packages = ("elastic_peft", "torch", "triton", "transformers", "peft", "trl")
    is_cpu = place.device == "cpu"
    return {
        "hardware": platform.processor() or platform.machine() if is_cpu else torch.cuda.get_device_name(place.device),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "peak_gib": None if is_cpu else torch.cuda.max_memory_allocated(place.device) / 2**30,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except ImportError:
        return None


def _chosen(only: Sequence[str] | None) -> list[Job]:
    jobs = {job.name: job for job in all_jobs()}
    if only is None:
        return list(jobs.values())
    unknown = sorted(set(only) - set(jobs))
    if unknown:
        raise SystemExit(f"--only must name some of {', '.join(jobs)}; got {', '.join(unknown)}.")
    return [jobs[name] for name in dict.fromkeys(only)]


def _workplace(args: argparse.Namespace) -> Workplace:
    warnings.simplefilter("ignore", FutureWarning)  # arguments that newer versions of transformers rename
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return Workplace(args.model, args.data, args.output, args.device, rows=args.rows, batch_size=args.batch_size)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, required=True, help="tasks_4k.npz")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=4, help="processes, spread over the visible GPUs (default 4)")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="start no job that outlasts it")
    parser.add_argument("--only", nargs="+", help="names of jobs, the most important first; default all")
    parser.add_argument("--rows", type=int, default=100, help="evaluation examples of each set (default 100)")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of a measured batch (default 8)")
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.workers < 1:
        raise SystemExit(f"`--workers` must be at least 1, got {args.workers}.")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit(f"`--device` must be cpu where there is no GPU, got {args.device}.")
    if not args.model.is_dir():
        raise SystemExit(f"`--model` must be a folder, got {args.model}.")
    if not args.data.is_file():
        raise SystemExit(f"`--data` must be a file, got {args.data}.")
    return args


if __name__ == "__main__":
    main()
