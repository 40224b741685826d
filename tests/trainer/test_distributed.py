"""Two processes over gloo train as one process with the same global batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer.tiny import routing_metrics
from trainer.two_processes import main


TESTS = Path(__file__).parents[1]


def load(output_dir, rank):
    return (
        load_file(output_dir / f"rank{rank}.safetensors"),
        [
            routing_metrics({name.removeprefix("eval_"): value for name, value in log.items()})
            for log in json.loads((output_dir / f"rank{rank}.json").read_text())
        ],
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What one process with batches of 4 ended with, and what two did that each accumulated 2 batches of 1."""
    alone = tmp_path_factory.mktemp("alone")
    main(alone, {})
    together = tmp_path_factory.mktemp("together")
    quartered = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 1,
        "calibration_batches": 4,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command += [str(TESTS / "trainer" / "two_processes.py"), str(together), json.dumps(quartered)]
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return load(alone, 0), load(together, 0), load(together, 1)


def select(tensors, kind):
    return {name: tensor for name, tensor in tensors.items() if name.startswith(kind)}


@pytest.mark.parametrize("kind", ["multipliers", "gradient", "weight", "buffer"])
def test_both_processes_hold_the_same(runs, kind):
    _, (first, _), (second, _) = runs
    assert select(first, kind)
    torch.testing.assert_close(select(second, kind), select(first, kind), atol=0, rtol=0)


@pytest.mark.parametrize("kind", ["multipliers", "gradient", "buffer"])
def test_two_processes_end_where_one_does(runs, kind):
    (alone, _), (together, _), _ = runs
    torch.testing.assert_close(select(together, kind), select(alone, kind), atol=1e-5, rtol=1e-4)


def test_metrics_are_those_of_the_whole_step(runs):
    (_, alone), *both = runs
    for _, logs in both:
        for log, expected in zip(logs, alone, strict=True):
            assert log == pytest.approx(expected, abs=1e-4)
