import copy
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trainer.tiny import (
    arguments,
    base_model,
    dataset,
    elastic_config,
    routed_model,
    rows,
    tokenizer,
    trainer,
)
from trl import SFTConfig

from elastic_peft import ElasticSFTTrainer
from elastic_peft.trainer import _check_setup


def make(tmp_path, *, model=None, args=None, **kwargs):
    return ElasticSFTTrainer(
        routed_model() if model is None else model,
        arguments(tmp_path) if args is None else args,
        train_dataset=dataset(),
        processing_class=tokenizer(),
        **kwargs,
    )


def test_base_model_becomes_routed_by_peft_config(tmp_path):
    run = make(tmp_path, model=base_model(), peft_config=elastic_config())
    run.train()
    assert "msr/qa" in run.state.log_history[0]


@pytest.mark.parametrize(
    ("model", "peft_config"),
    [
        (base_model, None),
        (lambda: get_peft_model(base_model(), LoraConfig(target_modules=["q_proj"])), None),
        (base_model, LoraConfig(target_modules=["q_proj"])),
    ],
    ids=["no-adapter", "lora-model", "lora-config"],
)
def test_model_without_elastic_adapter_is_refused(tmp_path, model, peft_config):
    with pytest.raises(ValueError, match="`model` must be a PeftModel whose active adapter is ELASTIC"):
        make(tmp_path, model=model(), peft_config=peft_config)


def test_frozen_routers_are_refused(tmp_path):
    model = routed_model()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"`model` must have trainable routers.*is_trainable=True"):
        make(tmp_path, model=model)


def test_plain_sft_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`args` must be an ElasticSFTConfig, got SFTConfig"):
        make(tmp_path, args=SFTConfig(output_dir=str(tmp_path), bf16=False, report_to=[]))


def test_loss_function_of_the_callers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`compute_loss_func` must be None"):
        make(tmp_path, compute_loss_func=lambda *args, **kwargs: None)


def test_custom_collator_in_padding_free_training_is_refused(tmp_path):
    args = arguments(tmp_path, padding_free=True, max_length=None)
    with pytest.raises(ValueError, match="custom data collator is not supported when using padding-free"):
        make(tmp_path, args=args, data_collator=lambda features: features)


def test_unknown_task_is_refused_before_training(tmp_path):
    examples = Dataset.from_list([{**row, "task": "poetry"} for row in rows()])
    with pytest.raises(ValueError, match="`task` must be one of 'qa', 'code', 'default', got 'poetry'"):
        trainer(tmp_path, train_dataset=examples)


def test_dataset_packed_by_others_is_refused(tmp_path):
    packed = Dataset.from_dict({"input_ids": [[7, 8, 9]], "labels": [[7, 8, 9]], "seq_lengths": [[2, 1]]})
    with pytest.raises(ValueError, match="`train_dataset` must not be packed already"):
        trainer(tmp_path, train_dataset=packed, packing=True)


@pytest.mark.parametrize("name", ["tp_size", "cp_size", "sp_size"])
def test_parallelism_inside_a_sequence_is_refused(name):
    parallelism = SimpleNamespace(**{"tp_size": 1, "cp_size": 1, "sp_size": 1, name: 2})
    run = SimpleNamespace(accelerator=SimpleNamespace(parallelism_config=parallelism))
    with pytest.raises(ValueError, match=f"`parallelism_config` must leave `{name}` at 1"):
        _check_setup(run)


def test_several_gpus_in_one_process_are_refused():
    parallelism = SimpleNamespace(tp_size=1, cp_size=1, sp_size=1)
    run = SimpleNamespace(accelerator=SimpleNamespace(parallelism_config=parallelism), args=SimpleNamespace(n_gpu=2))
    with pytest.raises(ValueError, match="`args` must use one GPU a process, got 2"):
        _check_setup(run)


def test_loading_on_one_process_for_all_is_refused():
    plugin = SimpleNamespace(fsdp_version=2, cpu_ram_efficient_loading=True)
    accelerator = SimpleNamespace(parallelism_config=None, state=SimpleNamespace(fsdp_plugin=plugin))
    run = SimpleNamespace(accelerator=accelerator, args=SimpleNamespace(n_gpu=1))
    with pytest.raises(ValueError, match=r"`fsdp_cpu_ram_efficient_loading` must be False: .*, got True"):
        _check_setup(run)


def test_reentrant_checkpointing_enabled_on_the_model_is_refused(tmp_path):
    model = routed_model()
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant"):
        make(tmp_path, model=model).train()


def test_weights_that_are_not_finite_stop_training_and_spare_the_multipliers(tmp_path):
    model = routed_model()
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "router_out" in name).fill_(float("nan"))
    run = make(tmp_path, model=model)
    before = run.multipliers.state_dict()
    with pytest.raises(ValueError, match="`msr` must be finite, got nan"):
        run.train()
    torch.testing.assert_close(run.multipliers.state_dict(), before, atol=0, rtol=0)


def test_callers_arguments_are_never_changed(tmp_path):
    args = arguments(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"preserve_rng_state": True})
    before = copy.deepcopy(args.to_dict())
    dispatch = args.accelerator_config.dispatch_batches
    run = ElasticSFTTrainer(
        routed_model(), args, train_dataset=dataset().to_iterable_dataset(), processing_class=tokenizer()
    )
    assert run.args.accelerator_config.dispatch_batches is not dispatch  # TRL has changed the trainer's own copy
    assert args.to_dict() == before
    assert args.accelerator_config.dispatch_batches is dispatch
