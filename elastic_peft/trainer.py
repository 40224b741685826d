"""`ElasticSFTTrainer`: TRL's `SFTTrainer` with the sparsity regulariser. The maths is in `sparsity` and `gating`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import is_peft_model
from peft import PeftConfig, PeftModel
from peft.utils import CONFIG_NAME
from transformers import TrainerCallback
from trl import SFTTrainer
from trl.data_utils import get_dataset_column_names

from .config import ElasticConfig
from .context import RoutingTape
from .data import (
    ROUTING_COLUMNS,
    RoutingCollator,
    add_routing_columns,
    calibration_inputs,
    pack_sequences,
    task_targets,
)
from .gating import example_seed, temperature
from .sparsity import Multipliers, regularizer, regularizer_of_sums, task_counts, task_sums, task_weights
from .standardization import calibrate_standardization, is_calibrated
from .trainer_config import ElasticSFTConfig


MULTIPLIERS_NAME = "multipliers.safetensors"


class ElasticSFTTrainer(SFTTrainer):
    """Trains the routers of an ELASTIC adapter: language modelling loss plus the regulariser of each task's sparsity.

    A string column `task` names each example's task, one of the adapter's `t_values`; without it every example has the
    default task, whose target is `target_sparsity`. Task means are taken over the whole optimizer step, all its
    micro-batches and processes. Noise depends on the seed, the step and the example's index alone, so not on how
    examples are split into batches. A checkpoint also holds the multipliers, in `multipliers.safetensors`.

    Logged at each training step by sampled routing, and with the evaluation's prefix by argmax routing: `lm_loss`,
    `sparsity_loss`, `temperature`, and `msr/<task>`, `lambda1/<task>`, `lambda2/<task>` of the tasks that occurred.
    `loss` is the sum of the first two in training; in evaluation it has no regulariser. `eval_lm_loss` is the mean
    over the supervised tokens of the whole set; `eval_loss`, as always, that of its batches' means.

    Args:
        model: as for `SFTTrainer`: a `PeftModel` whose active adapter is ELASTIC, or a base model or its name together
            with `peft_config`.
        args: an `ElasticSFTConfig`; copied, never changed.
        data_collator: as for `SFTTrainer`.
        train_dataset: as for `SFTTrainer`, with an optional column `task`.
        eval_dataset: as for `SFTTrainer`, with an optional column `task`.
        processing_class: as for `SFTTrainer`.
        peft_config: an `ElasticConfig`.
        **kwargs: further arguments of `SFTTrainer`.

    Raises:
        ValueError: no ELASTIC adapter, or none that is trainable; a task outside `t_values`; images; a
            `compute_loss_func`; tensor, context or sequence parallelism; several GPUs in one process; FSDP2 that
            loads the model in one process for all.

    Source: Elastic Attention, arXiv 2601.17367.
    """

    _tag_names = ["trl", "sft", "elastic-attention"]
    _name = "Elastic SFT"

    # Narrower than transformers declares them.
    args: ElasticSFTConfig
    model: PeftModel
    optimizer: torch.optim.Optimizer
    _signature_columns: Any

    def __init__(
        self,
        model,
        args: ElasticSFTConfig | None = None,
        data_collator=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        *,
        peft_config: ElasticConfig | None = None,
        **kwargs: Any,
    ):
        # TRL writes into the arguments it is given.
        args = ElasticSFTConfig() if args is None else copy.deepcopy(args)
        _check_arguments(args, kwargs)
        config = _elastic_config(model, peft_config)
        targets = task_targets(config)
        self.tasks = tuple(targets)
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            peft_config=peft_config,
            **kwargs,
        )
        _check_setup(self)
        self.data_collator: Any = RoutingCollator(self.data_collator, self.padding_free)
        device = self.args.device
        self._targets = torch.tensor(list(targets.values()), device=device)
        self._standardizes = config.standardize_input
        self.multipliers = Multipliers(
            self.tasks, learning_rate=args.multiplier_learning_rate, seed=args.seed, device=device
        )
        self._reset_evaluation()
        self.add_callback(_RoutingCallback(self))

    # Data

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        columns = get_dataset_column_names(dataset)
        if "seq_lengths" in columns:
            if not set(ROUTING_COLUMNS) <= set(columns):
                raise ValueError(
                    f"`{dataset_name}_dataset` must not be packed already: the packed rows have lost their tasks; set "
                    f"`packing` instead; got columns {columns}."
                )
            return dataset
        with PartialState().main_process_first():
            dataset = add_routing_columns(dataset, self.tasks)
        dataset = super()._prepare_dataset(dataset, processing_class, args, False, formatting_func, dataset_name)
        if packing:
            with PartialState().main_process_first():
                dataset = pack_sequences(dataset, args.max_length)
            if args.shuffle_dataset:
                dataset = dataset.shuffle(seed=args.seed)
        return dataset

    def _set_signature_columns_if_needed(self):
        known = self._signature_columns
        super()._set_signature_columns_if_needed()
        if known is None:
            self._signature_columns = [*self._signature_columns, *ROUTING_COLUMNS]

    # Training

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batch_samples, num_items_in_batch = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = torch.zeros(len(self.tasks), dtype=torch.int64, device=device)
        for batch in batch_samples:
            counts += task_counts(batch["task_id"].to(device), len(self.tasks))
        self._step_counts = self.accelerator.reduce(counts, "sum")
        self._step_sums = self._no_sums()
        self._step_lm_loss = torch.zeros((), device=device)
        return batch_samples, num_items_in_batch

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)
        task_id, example_id = (inputs.pop(name) for name in ROUTING_COLUMNS)
        training = self.model.training
        tape = self._training_tape(example_id) if training else RoutingTape()
        inputs["elastic_tape"] = tape
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        msr = tape.msr().to(task_id.device)
        sums = task_sums(msr, task_id, self._targets, self.args.sparsity_constraint)
        loss, outputs = result if return_outputs else (result, None)
        if not training:
            tokens = (inputs["labels"][:, 1:] != -100).sum()
            self._eval_sums += sums
            self._eval_tokens += torch.stack([loss * tokens, tokens])
            return result

        # Where the loss is not divided by the step's number of tokens, Trainer divides it by its micro-batches.
        divisor = 1 if self._loss_is_summed(num_items_in_batch) else self.current_gradient_accumulation_steps
        self._step_sums += sums
        self._step_lm_loss += loss.detach() / divisor
        sparsity_loss = regularizer(
            msr,
            task_id,
            self._targets,
            self.multipliers.lambda1,
            self.multipliers.lambda2,
            self.args.sparsity_constraint,
            task_weights(task_id, self._step_counts),
        )
        # The weights are shares of the whole step, while gradients are averaged over processes.
        loss = loss + sparsity_loss * divisor * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def ascend_multipliers(self) -> None:
        """Steps the multipliers on the optimizer step's sequences and records its metrics; called before the step.

        Raises:
            ValueError: a sequence's model sparsity ratio is not finite; the multipliers keep their values.
        """
        sums = self.accelerator.reduce(self._step_sums, "sum")
        lm_loss = self.accelerator.reduce(self._step_lm_loss, "mean")
        metrics = {"lm_loss": lm_loss.item(), **self._routing_metrics(sums)}
        group = self.optimizer.param_groups[0]
        self.multipliers.step(sums, group["lr"] / group.get("initial_lr", self.args.learning_rate))
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def calibrate(self) -> None:
        """Calibrates the standardisation of the routers' input on the first training batches, unless it has been."""
        if not self._standardizes or is_calibrated(self.model):
            return
        dataloader: Any = self.get_train_dataloader()
        batches = islice(dataloader, self.args.calibration_batches)
        try:
            calibrate_standardization(self.model, map(calibration_inputs, map(self._prepare_inputs, batches)))
        finally:
            dataloader.end()  # it may not have been read to its end

    def _training_tape(self, example_id: torch.Tensor) -> RoutingTape:
        step = self.state.global_step
        seeds = [example_seed(self.args.seed, step, example) for example in example_id.tolist()]
        return RoutingTape(self._temperature(), seeds, self.args.counterfactual_fraction)

    def _temperature(self) -> float:
        args = self.args
        progress = self.state.global_step / max(self.state.max_steps, 1)
        return temperature(args.temperature_schedule, progress, args.temperature_start, args.temperature_end)

    def _loss_is_summed(self, num_items_in_batch) -> bool:
        return self.model_accepts_loss_kwargs and num_items_in_batch is not None

    # Evaluation, metrics, checkpoints

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        self._reset_evaluation()
        output: Any = super().evaluation_loop(
            dataloader,
            description,
            prediction_loss_only=prediction_loss_only,
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        lm_loss, tokens = self.accelerator.reduce(self._eval_tokens, "sum").tolist()
        metrics = self._routing_metrics(self.accelerator.reduce(self._eval_sums, "sum"))
        metrics["lm_loss"] = lm_loss / max(tokens, 1)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def _reset_evaluation(self) -> None:
        self._eval_sums = self._no_sums()
        self._eval_tokens = torch.zeros(2, device=self.args.device)

    def _no_sums(self) -> torch.Tensor:
        return torch.zeros(len(self.tasks), 4, device=self.args.device)

    def _routing_metrics(self, sums: torch.Tensor) -> dict[str, float]:
        lambda1, lambda2 = self.multipliers.lambda1, self.multipliers.lambda2
        metrics = {
            "sparsity_loss": regularizer_of_sums(sums, lambda1, lambda2).item(),
            "temperature": self._temperature(),
        }
        columns = (sums[:, 0], sums[:, 1], lambda1, lambda2)
        for task, *values in zip(self.tasks, *(column.tolist() for column in columns), strict=True):
            count, msr, first, second = values
            if count:
                metrics |= {f"msr/{task}": msr / count, f"lambda1/{task}": first, f"lambda2/{task}": second}
        return metrics

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            self.multipliers.save(Path(output_dir, MULTIPLIERS_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            _check_checkpoint(self.model, checkpoint)
            self.multipliers.load(Path(checkpoint, MULTIPLIERS_NAME))
        super()._load_optimizer_and_scheduler(checkpoint)


class _RoutingCallback(TrainerCallback):
    def __init__(self, trainer: ElasticSFTTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.calibrate()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.trainer.ascend_multipliers()


def _elastic_config(model, peft_config: ElasticConfig | None) -> ElasticConfig:
    config: Any = peft_config
    if config is None and is_peft_model(model):
        config = model.peft_config.get(model.active_adapter)
    if not isinstance(config, ElasticConfig):
        raise ValueError(
            "`model` must be a PeftModel whose active adapter is ELASTIC, or come with an ElasticConfig as "
            f"`peft_config`, got {type(model).__name__} and {type(config).__name__}."
        )
    return config


def _check_arguments(args: ElasticSFTConfig, kwargs: Mapping[str, Any]) -> None:
    if not isinstance(args, ElasticSFTConfig):
        raise ValueError(f"`args` must be an ElasticSFTConfig, got {type(args).__name__}.")
    if kwargs.get("compute_loss_func") is not None:
        raise ValueError("`compute_loss_func` must be None: TRL runs the model twice for it; got one.")


def _check_checkpoint(model: PeftModel, checkpoint: str) -> None:
    name: Any = model.active_adapter
    folder = Path(checkpoint) if name == "default" else Path(checkpoint, name)  # as PEFT saves it
    if not (folder / CONFIG_NAME).exists():  # beside shards there is none
        return
    saved, own = PeftConfig.from_pretrained(folder), model.peft_config[name]
    if not isinstance(saved, ElasticConfig):
        raise ValueError(
            f"`resume_from_checkpoint` must hold an adapter with an ElasticConfig, got {type(saved).__name__} in "
            f"{folder}."
        )
    names = {option.name for option in fields(ElasticConfig)} - {option.name for option in fields(PeftConfig)}
    for option in sorted(names - {"format_version"}):
        was, is_now = getattr(saved, option), getattr(own, option)
        if was != is_now:
            raise ValueError(
                f"`resume_from_checkpoint` must hold an adapter of the model's configuration, got one with `{option}` "
                f"{was!r} instead of {is_now!r} in {folder}."
            )


def _check_setup(trainer: ElasticSFTTrainer) -> None:
    parallelism = trainer.accelerator.parallelism_config
    for name in ("tp_size", "cp_size", "sp_size"):
        if parallelism is not None and getattr(parallelism, name, 1) > 1:
            raise ValueError(
                f"`parallelism_config` must leave `{name}` at 1: a router reads its sequence's both ends, got "
                f"{getattr(parallelism, name)}."
            )
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"`args` must use one GPU a process, got {trainer.args.n_gpu}: start one process a GPU with "
            "`accelerate launch`, or show one GPU in CUDA_VISIBLE_DEVICES."
        )
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 2 and plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "`fsdp_cpu_ram_efficient_loading` must be False: accelerate spreads parameters only, and a router's "
            "standardisation is saved in buffers, got True."
        )
    if trainer._is_vision_dataset:
        raise ValueError("`train_dataset` must hold text only, got one with images.")
    if not any(parameter.requires_grad for parameter in trainer.model.parameters()):
        raise ValueError(
            "`model` must have trainable routers, got one where nothing is: load the adapter with `is_trainable=True`."
        )
