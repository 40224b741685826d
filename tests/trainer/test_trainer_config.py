import dataclasses
import json

import numpy as np
import pytest
from transformers import HfArgumentParser
from trl import SFTConfig

from elastic_peft.trainer_config import ElasticSFTConfig


REFUSED = [
    ({"learning_rate": 2e-5}, r"`learning_rate` must equal `router_learning_rate` \(0.001\).*got 2e-05"),
    ({"router_learning_rate": 0.0}, "`router_learning_rate` must be positive, got 0.0"),
    ({"multiplier_learning_rate": -1.0}, "`multiplier_learning_rate` must not be negative, got -1.0"),
    ({"sparsity_constraint": "l1"}, "`sparsity_constraint` must be one of 'absolute', 'signed', got 'l1'"),
    ({"temperature_schedule": "linear"}, "`temperature_schedule` must be one of 'exponential', 'cosine'"),
    ({"temperature_end": 0.0}, "`temperature_end` must be positive"),
    ({"temperature_start": 0.2}, r"at most `temperature_start` \(0.2\), got 0.3"),
    ({"counterfactual_fraction": 0.3}, "`counterfactual_fraction` must be 1 / n .*got 0.3"),
    ({"counterfactual_fraction": "0.5"}, "`counterfactual_fraction` must be a number, got '0.5'"),
    ({"counterfactual_fraction": True}, "`counterfactual_fraction` must be a number, got True"),
    ({"router_learning_rate": 10**400}, "`router_learning_rate` must be a finite number, got 10+[.]$"),
    ({"multiplier_learning_rate": float("nan")}, "`multiplier_learning_rate` must be a finite number, got nan"),
    ({"temperature_start": 10**400}, "`temperature_start` must be a finite number, got 10+[.]$"),
    ({"calibration_batches": 2.0}, "`calibration_batches` must be an integer of at least 1, got 2.0"),
    ({"calibration_batches": True}, "`calibration_batches` must be an integer of at least 1, got True"),
    ({"router_learning_rate": None}, "`router_learning_rate` must be a finite number, got None"),
    ({"multiplier_learning_rate": "1e-3"}, "`multiplier_learning_rate` must be a finite number, got '1e-3'"),
    ({"temperature_start": float("inf")}, "`temperature_start` must be a finite number, got inf"),
    ({"calibration_batches": 0}, "`calibration_batches` must be an integer of at least 1, got 0"),
    ({"calibration_batches": 1.5}, "`calibration_batches` must be an integer of at least 1, got 1.5"),
    ({"gradient_checkpointing_kwargs": "x"}, "checkpointing_kwargs` must map names to values, got 'x'"),
    ({"packing": True, "packing_strategy": "wrapped"}, "`packing_strategy` must be 'bfd'.*got 'wrapped'"),
    ({"packing": True, "packing_strategy": "bfd_split"}, "`packing_strategy` must be 'bfd'.*got 'bfd_split'"),
    ({"packing": True, "max_length": None}, "`max_length` must be set for packing"),
    ({"eval_packing": True}, "`eval_packing` must go with `packing`"),
    ({"label_smoothing_factor": 0.1}, "`label_smoothing_factor` must be 0"),
    ({"dataset_kwargs": {"skip_prepare_dataset": True}}, "must not set `skip_prepare_dataset`"),
    ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "must not set `use_reentrant` to True"),
]


def make(tmp_path, **kwargs):
    return ElasticSFTConfig(output_dir=str(tmp_path), bf16=False, report_to=[], **kwargs)


def test_defaults_are_the_documented_ones(tmp_path):
    args = make(tmp_path)
    assert (args.router_learning_rate, args.multiplier_learning_rate) == (1e-3, 1e-2)
    assert args.counterfactual_fraction == 1.0
    assert (args.sparsity_constraint, args.temperature_schedule) == ("absolute", "exponential")
    assert (args.adam_beta1, args.adam_beta2, args.weight_decay, args.max_grad_norm) == (0.9, 0.95, 0.1, 5.0)
    assert args.lr_scheduler_type == "cosine"
    assert args.get_warmup_steps(100) == 20


@pytest.mark.parametrize(("schedule", "end"), [("exponential", 0.3), ("cosine", 1.0)])
def test_final_temperature_follows_the_schedule(tmp_path, schedule, end):
    assert make(tmp_path, temperature_schedule=schedule).temperature_end == end


def test_learning_rate_is_the_routers(tmp_path):
    assert make(tmp_path, router_learning_rate=3e-4).learning_rate == 3e-4


@pytest.mark.parametrize(
    ("field", "value", "stored"),
    [
        ("router_learning_rate", np.float32(2**-10), 2**-10),
        ("multiplier_learning_rate", np.float16(2**-6), 2**-6),
        ("temperature_start", np.float32(1.5), 1.5),
        ("temperature_end", np.float64(0.5), 0.5),
        ("counterfactual_fraction", np.float32(1 / 3), 1 / 3),
        ("calibration_batches", np.int64(2), 2),
    ],
)
def test_numbers_of_numpy_become_plain(tmp_path, field, value, stored):
    args = make(tmp_path, **{field: value})
    assert (type(getattr(args, field)), getattr(args, field)) == (type(stored), stored)
    assert json.loads(args.to_json_string())[field] == stored


def test_a_learning_rate_of_numpy_becomes_plain(tmp_path):
    args = make(tmp_path, router_learning_rate=np.float32(1e-3), learning_rate=np.float32(1e-3))
    assert type(args.learning_rate) is float
    assert args.learning_rate == args.router_learning_rate


def test_learning_rate_may_be_given_when_it_agrees(tmp_path):
    assert make(tmp_path, router_learning_rate=3e-4, learning_rate=3e-4).learning_rate == 3e-4


def test_copies_keep_every_value(tmp_path):
    args = make(tmp_path, temperature_schedule="cosine", router_learning_rate=3e-4)
    assert dataclasses.replace(args).to_dict() == args.to_dict()


@pytest.mark.parametrize(("kwargs", "message"), REFUSED, ids=["-".join(kwargs) for kwargs, _ in REFUSED])
def test_refused_values_name_the_field(tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **kwargs)


def test_checkpointing_options_without_use_reentrant_are_made_non_reentrant(tmp_path):
    options = {"preserve_rng_state": False}
    args = make(tmp_path, gradient_checkpointing_kwargs=options)
    assert args.gradient_checkpointing_kwargs == {"preserve_rng_state": False, "use_reentrant": False}
    assert options == {"preserve_rng_state": False}


def test_every_new_field_has_a_help_text():
    inherited = {field.name for field in dataclasses.fields(SFTConfig)}
    new = [field for field in dataclasses.fields(ElasticSFTConfig) if field.name not in inherited]
    assert len(new) == 8
    assert all(field.metadata["help"] for field in new)


def test_command_line_reaches_the_fields(tmp_path):
    command = f"--output_dir {tmp_path} --router_learning_rate 5e-4 --temperature_schedule cosine --bf16 False"
    (args,) = HfArgumentParser(ElasticSFTConfig).parse_args_into_dataclasses(command.split())
    assert (args.learning_rate, args.temperature_schedule, args.temperature_end) == (5e-4, "cosine", 1.0)
