"""`train_sft.py` in two processes ends where it does in one, by each engine that recipes/accelerate has a file for."""

from importlib.util import find_spec

import pytest
import torch
from recipes.sft_runs import assert_close, launch, launch_alone, multipliers, train, weights, write_recipe


# What the processes see of the machine's GPUs.
DEVICES = {"cpu": "", "gpu": "0,1"}
TWO_GPUS = (pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))
DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
pytestmark = pytest.mark.parametrize(
    ("device", "engine"),
    [
        ("cpu", "ddp"),
        pytest.param("cpu", "fsdp2", marks=pytest.mark.slow),
        pytest.param("gpu", "ddp", marks=TWO_GPUS),
        pytest.param("gpu", "fsdp2", marks=TWO_GPUS),
        pytest.param("gpu", "zero2", marks=(*TWO_GPUS, DEEPSPEED)),
    ],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module")
def device(request):
    return request.param


@pytest.fixture(scope="module")
def engine(request):
    return request.param


@pytest.fixture(scope="module")
def recipe(device, tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("recipe"), use_cpu=device == "cpu")


@pytest.fixture(scope="module")
def alone(device, recipe, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("alone")
    if device == "cpu":
        return train(recipe, output_dir)
    result = launch_alone(recipe, output_dir, device="0")  # this process would take both GPUs
    assert result.returncode == 0, result.stderr[-4000:]
    return output_dir


@pytest.fixture(scope="module")
def died(device, engine, recipe, tmp_path_factory):
    """The folder of a run of which one process died in the third step, how that ended, and whether it saved."""
    output_dir = tmp_path_factory.mktemp(engine)
    result = launch(engine, recipe, output_dir, devices=DEVICES[device], dies_at_step=2)
    return output_dir, result, (output_dir / "adapter_model.safetensors").exists()


@pytest.fixture(scope="module")
def together(device, engine, died, recipe):
    """What the same engine made of that run's last checkpoint."""
    output_dir, *_ = died
    resume = ["--resume_from_checkpoint", str(output_dir / "checkpoint-2")]
    result = launch(engine, recipe, output_dir, *resume, devices=DEVICES[device])
    assert result.returncode == 0, result.stderr[-4000:]
    return output_dir


def test_a_process_that_dies_ends_the_run_with_an_error(died):
    _, result, has_adapter = died
    assert result.returncode != 0
    assert "exitcode  : 3" in result.stderr, result.stderr[-4000:]
    assert not has_adapter


def test_fsdp2_shards_the_model(engine, died):
    output_dir, *_ = died
    assert (output_dir / "checkpoint-2" / "pytorch_model_fsdp.bin").exists() == (engine == "fsdp2")


def test_two_processes_end_where_one_does(alone, together):
    assert_close(weights(together), weights(alone))


def test_two_processes_ascend_the_same_multipliers(alone, together):
    assert_close(multipliers(together), multipliers(alone))


def test_adapter_is_saved_once_and_whole(alone, together):
    assert {path.name for path in together.iterdir()} == {path.name for path in alone.iterdir()}
    assert {name: tensor.shape for name, tensor in weights(together).items()} == {
        name: tensor.shape for name, tensor in weights(alone).items()
    }
