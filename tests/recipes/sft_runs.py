"""Runs of `train_sft.py` on a tiny model, in this process and as launchers start it."""

import os
import subprocess
import sys
from pathlib import Path

import torch
import train_sft
import yaml
from safetensors.torch import load_file
from trainer.tiny import T_VALUES, base_model, dataset, tokenizer


ROOT = Path(__file__).parents[2]
LAUNCHED = Path(__file__).with_name("launched.py")
STEPS = 4


def write_recipe(folder, **options):
    """A recipe for a tiny model, as a file beside the model and the data."""
    base_model().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    dataset(16).to_parquet(folder / "data" / "train.parquet")
    fields = {
        "model_name_or_path": str(folder / "model"),
        "dataset_name": str(folder / "data"),
        "sink_size": 2,
        "window_size": 4,
        "pool_size": 4,
        "t_values": T_VALUES,
        "max_steps": STEPS,
        "max_length": 64,
        "per_device_train_batch_size": 4,
        "train_sampling_strategy": "sequential",
        "calibration_batches": 2,
        "router_learning_rate": 1e-2,
        "gradient_checkpointing": False,
        "bf16": False,
        "save_steps": 1,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        **options,
    }
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(fields))
    return file


def train(recipe, output_dir, *options):
    """Trains in this process."""
    train_sft.main(["--config", str(recipe), "--output_dir", str(output_dir), *options])
    return output_dir


def launch(engine, recipe, output_dir, *options, devices="", dies_at_step=None):
    """Trains in two processes, half of each batch in either; on CPUs without `devices`."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes=2", "--main_process_port=0"]
    command += ["--mixed_precision=no", f"--config_file={ROOT / 'recipes' / 'accelerate' / engine}.yaml"]
    options = ["--per_device_train_batch_size", "2", *options]
    return _run(command, recipe, output_dir, options, devices, dies_at_step)


def launch_alone(recipe, output_dir, device):
    """Trains in another process, which sees one GPU."""
    return _run([sys.executable], recipe, output_dir, [], device, None)


def _run(command, recipe, output_dir, options, devices, dies_at_step):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": devices, "CI": "1"}
    if dies_at_step is not None:
        environment["DIES_AT_STEP"] = str(dies_at_step)
    command = [*command, str(LAUNCHED), "--config", str(recipe), "--output_dir", str(output_dir), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def weights(output_dir):
    """The adapter's."""
    return load_file(output_dir / "adapter_model.safetensors")


def multipliers(output_dir):
    """Those of the last checkpoint."""
    return load_file(output_dir / f"checkpoint-{STEPS}" / "multipliers.safetensors")


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
