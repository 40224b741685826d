"""`train_sft.py` on two GPUs ends where it does on one, by each engine that recipes/accelerate has a file for."""

from importlib.util import find_spec

import pytest
import torch
from recipes.sft_runs import assert_close, launch, launch_alone, multipliers, weights, write_recipe


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
ENGINES = [
    "ddp",
    "fsdp2",
    pytest.param("zero2", marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")),
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def alone(recipe, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("alone")
    result = launch_alone(recipe, output_dir, device="0")
    assert result.returncode == 0, result.stderr[-4000:]
    return output_dir


@pytest.fixture(scope="module", params=ENGINES)
def died(request, recipe, tmp_path_factory):
    """An engine, the folder of a run of which one process died in the third step, and how that ended."""
    output_dir = tmp_path_factory.mktemp(request.param)
    result = launch(request.param, recipe, output_dir, devices="0,1", dies_at_step=2)
    return request.param, output_dir, result, (output_dir / "adapter_model.safetensors").exists()


@pytest.fixture(scope="module")
def together(died, recipe):
    """What the same engine made of that run's last checkpoint."""
    engine, output_dir, *_ = died
    resume = ["--resume_from_checkpoint", str(output_dir / "checkpoint-2")]
    result = launch(engine, recipe, output_dir, *resume, devices="0,1")
    assert result.returncode == 0, result.stderr[-4000:]
    return output_dir


def test_a_process_that_dies_ends_the_run_with_an_error(died):
    _, _, result, has_adapter = died
    assert result.returncode != 0
    assert "exitcode  : 3" in result.stderr, result.stderr[-4000:]
    assert not has_adapter


def test_two_gpus_end_where_one_does(alone, together):
    assert_close(weights(together), weights(alone))


def test_two_gpus_ascend_the_same_multipliers(alone, together):
    assert_close(multipliers(together), multipliers(alone))


def test_adapter_is_saved_once_and_whole(alone, together):
    shapes = [{name: tensor.shape for name, tensor in weights(folder).items()} for folder in (together, alone)]
    assert shapes[0] == shapes[1]
