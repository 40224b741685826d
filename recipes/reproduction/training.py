"""Training of one adapter of the reproduction, by `ElasticSFTTrainer`, on one example of each set a step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import torch
from peft import get_peft_model
from reproduction.examples import Example, interleave
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.trainer_callback import PrinterCallback

from elastic_peft import ElasticConfig, ElasticSFTConfig, ElasticSFTTrainer
from elastic_peft.evaluation.static_masks import blind_routers


def load_base(directory: Path | str, device: str) -> torch.nn.Module:
    """The frozen backbone: float32 on a CPU; bfloat16 on a GPU, norms and MLPs compiled.

    A model this small spends more time on elementwise kernels than on attention or products.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device)
    if device != "cpu":
        for module in model.modules():
            if isinstance(module, LlamaMLP | LlamaRMSNorm):
                module.compile(dynamic=True)
    return model


def train(
    base: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    examples: dict[str, list[Example]],
    output: Path,
    *,
    config: Mapping[str, Any],
    arguments: Mapping[str, Any],
    seed: int,
    is_blind: bool = False,
) -> tuple[torch.nn.Module, list[dict]]:
    """Trains one router a layer.

    Args:
        base: the backbone.
        tokenizer: its tokenizer.
        examples: by set; a step takes one of each.
        output: folder of the trainer's files.
        config: fields of `ElasticConfig`.
        arguments: fields of `ElasticSFTConfig`, less those that the machine and the examples decide.
        seed: of the routers, the order of the examples and the noise.
        is_blind: hide the input from the routers, so that they learn static gates.

    Returns:
        The model in evaluation mode, and the trainer's metrics, one dictionary each time they were logged.
    """
    torch.manual_seed(seed)
    model = get_peft_model(base, ElasticConfig(task_type="CAUSAL_LM", **config))
    if is_blind:
        blind_routers(model, seed)
    is_cpu = base.device.type == "cpu"
    decided = {
        "output_dir": str(output),
        "per_device_train_batch_size": len(examples),
        "train_sampling_strategy": "sequential",
        "max_length": None,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": is_cpu,
        "bf16": not is_cpu,
        "seed": seed,
    }
    args = ElasticSFTConfig(**{**arguments, **decided})
    chosen = interleave(examples, args.max_steps * len(examples), seed)
    rows = [{"input_ids": example.ids, "labels": _labels(example), "task": example.task} for example in chosen]
    datasets.disable_progress_bars()
    trainer = ElasticSFTTrainer(
        model=model, args=args, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return model.eval(), [line for line in trainer.state.log_history if "lm_loss" in line]


def _labels(example: Example) -> list[int]:
    return [-100] * example.prompt_end + list(example.ids[example.prompt_end :])
