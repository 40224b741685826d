"""Training of the demo's routers, with a progress bar and one line of metrics every few steps."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from demo_data import TASKS
from peft import get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.trainer_callback import ProgressCallback

from elastic_peft import ElasticConfig, ElasticSFTConfig, ElasticSFTTrainer


@dataclass(frozen=True)
class Profile:
    """What a run costs and how it learns; lengths and sizes in tokens.

    `examples` counts training rows, taken in order and again from the first when the steps outlast them;
    `evaluation_examples` counts rows of each task.
    """

    steps: int
    length: int
    batch_size: int
    sink_size: int
    window_size: int
    examples: int
    evaluation_examples: int
    calibration_examples: int
    logging_steps: int
    router_learning_rate: float
    multiplier_learning_rate: float


# Minutes on two cores: enough to see the loop at work, far from enough to train it.
CPU = Profile(
    steps=6,
    length=384,
    batch_size=3,
    sink_size=16,
    window_size=64,
    examples=45,
    evaluation_examples=1,
    calibration_examples=5,
    logging_steps=2,
    router_learning_rate=1e-2,
    multiplier_learning_rate=1e-1,
)
GPU = Profile(
    steps=300,
    length=4096,
    batch_size=10,
    sink_size=64,
    window_size=256,
    examples=800,
    evaluation_examples=24,
    calibration_examples=40,
    logging_steps=10,
    router_learning_rate=1e-3,
    multiplier_learning_rate=1e-2,
)


def load_base(directory: Path | str, device: str) -> torch.nn.Module:
    """The frozen backbone: float32 on a CPU, bfloat16 on a GPU.

    Args:
        directory: for `from_pretrained`.
        device: "cpu" or a CUDA device.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device)


def train(
    base: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict],
    profile: Profile,
    adapter: Path,
) -> list[dict]:
    """Trains one router a layer and saves the adapter.

    Args:
        base: the backbone.
        tokenizer: its tokenizer.
        rows: `prompt`, `completion` and `task`; taken in order.
        profile: lengths, sizes and learning rates.
        adapter: directory to make; it appears whole or not at all.

    Returns:
        The trainer's log, one dictionary per line of metrics.
    """
    device = base.device.type
    config = ElasticConfig(mode_pair="FA-SSA", sink_size=profile.sink_size, window_size=profile.window_size)
    model = get_peft_model(base, config)
    partial = adapter.with_suffix(".partial")
    # A CPU gains nothing from a batch and loses its padding; sparsity targets are means over the whole step anyway.
    micro_batch_size = 1 if device == "cpu" else math.gcd(profile.batch_size, len(TASKS))
    args = ElasticSFTConfig(
        output_dir=str(partial),
        max_steps=profile.steps,
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=profile.batch_size // micro_batch_size,
        calibration_batches=profile.calibration_examples // micro_batch_size,
        router_learning_rate=profile.router_learning_rate,
        multiplier_learning_rate=profile.multiplier_learning_rate,
        max_length=profile.length,
        train_sampling_strategy="sequential",
        logging_steps=profile.logging_steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=False,
        gradient_checkpointing=False,
        use_cpu=device == "cpu",
        bf16=device != "cpu",
    )
    trainer = ElasticSFTTrainer(
        model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(MetricLines())
    trainer.train()
    model.save_pretrained(partial)
    partial.rename(adapter)
    return [line for line in trainer.state.log_history if "lm_loss" in line]


class MetricLines(ProgressCallback):
    """Transformers' progress bar, with the routing metrics on one short line."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is None or "lm_loss" not in (logs or {}):
            return
        msr = "  ".join(f"{task} {logs[f'msr/{task}']:.2f}" for task in TASKS if f"msr/{task}" in logs)
        self.training_bar.write(
            f"step {state.global_step:>4}  lm_loss {logs['lm_loss']:.3f}  sparsity_loss {logs['sparsity_loss']:+.3f}  "
            f"temperature {logs['temperature']:.2f}  MSR: {msr}"
        )
