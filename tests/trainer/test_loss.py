"""One optimizer step's gradients and metrics do not depend on how its examples are laid out."""

import pytest
import torch
import trl.trainer.utils
from datasets import Dataset
from trainer.tiny import dataset, first_gradients, routed_model, routing_metrics, rows, trainer

from elastic_peft import last_routing
from elastic_peft.standardization import is_calibrated


# Tasks are spread unevenly, so that means over micro-batches differ from means over the step.
UNEVEN = {"tasks": ("qa", "qa", "code", "qa")}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return first_gradients(tmp_path_factory.mktemp("reference"), train_dataset=dataset(4, **UNEVEN))


def assert_same_step(actual, expected):
    gradients, log = actual
    expected_gradients, expected_log = expected
    assert any(gradient.abs().max() > 1e-3 for gradient in expected_gradients.values())
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-5, rtol=1e-4)
    assert routing_metrics(log) == pytest.approx(routing_metrics(expected_log), abs=1e-5)


def test_loss_is_lm_loss_plus_the_regulariser_of_the_logged_msr(tmp_path):
    examples = Dataset.from_list(rows(2))  # one a task, so that each task's mean is its one sequence's value
    _, log = first_gradients(tmp_path, train_dataset=examples, sparsity_constraint="signed")
    terms = []
    for task, target in (("qa", 0.3), ("code", 1.0)):
        difference = log[f"msr/{task}"] - target
        terms.append(log[f"lambda1/{task}"] * difference + log[f"lambda2/{task}"] * difference**2)
    assert log["sparsity_loss"] == pytest.approx(sum(terms) / 2, abs=1e-6)
    assert log["loss"] == pytest.approx(log["lm_loss"] + log["sparsity_loss"], abs=1e-5)


def test_loss_adds_up_where_trainer_averages_micro_batches(tmp_path):
    run = trainer(
        tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, train_dataset=dataset(4), max_steps=1
    )
    run.model_accepts_loss_kwargs = False  # as for a model whose forward takes no `num_items_in_batch`
    run.train()
    log = run.state.log_history[0]
    assert log["loss"] == pytest.approx(log["lm_loss"] + log["sparsity_loss"], abs=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        {"padding_free": True, "max_length": None},
        {"padding_free": True, "max_length": None, "pad_to_multiple_of": 64},
        {"packing": True, "max_length": 40},
        {"pad_to_multiple_of": 32},
    ],
    ids=["padding-free", "padding-free-padded-to-64", "bfd-packed", "padded-to-32"],
)
def test_layout_of_a_batch_changes_nothing(tmp_path, layout, reference):
    examples = dataset(4, **UNEVEN)
    assert_same_step(first_gradients(tmp_path, train_dataset=examples, **layout), reference)


@pytest.mark.parametrize(("batch_size", "accumulation"), [(2, 2), (1, 4)], ids=["2x2", "1x4"])
def test_accumulation_changes_nothing(tmp_path, batch_size, accumulation, reference):
    step = first_gradients(
        tmp_path,
        train_dataset=dataset(4, **UNEVEN),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        calibration_batches=2 * accumulation,
    )
    assert_same_step(step, reference)


def test_non_reentrant_checkpointing_changes_nothing(tmp_path, reference):
    step = first_gradients(
        tmp_path,
        train_dataset=dataset(4, **UNEVEN),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    assert_same_step(step, reference)


@pytest.mark.skipif(not hasattr(trl.trainer.utils, "_use_triton"), reason="TRL chooses the scored positions otherwise")
def test_scoring_labelled_positions_alone_as_on_gpus_changes_nothing(tmp_path, monkeypatch, reference):
    monkeypatch.setattr(trl.trainer.utils, "_use_triton", lambda device: True)
    assert_same_step(first_gradients(tmp_path, train_dataset=dataset(4, **UNEVEN)), reference)


def test_streaming_changes_nothing(tmp_path, reference):
    stream = dataset(4, **UNEVEN).to_iterable_dataset()
    assert_same_step(first_gradients(tmp_path, train_dataset=stream), reference)


def test_both_modes_are_sampled(reference):
    _, log = reference
    assert 0 < log["msr/qa"] < 1


def test_every_router_tensor_gets_a_gradient(reference):
    gradients, _ = reference
    assert set(gradients) == {name for name, p in routed_model().named_parameters() if p.requires_grad}
    assert all(gradient.abs().sum() > 0 for gradient in gradients.values())


def sampled_msr(output_dir, seed):
    """MSR of four steps over the same two examples by routers that hardly learn."""
    run = trainer(output_dir, train_dataset=dataset(2), seed=seed, max_steps=4, router_learning_rate=1e-12)
    run.train()
    return [(log["msr/qa"], log["msr/code"]) for log in run.state.log_history[:4]]


def test_noise_differs_between_steps(tmp_path):
    assert len(set(sampled_msr(tmp_path, seed=1))) > 1


def test_noise_differs_between_seeds(tmp_path):
    assert sampled_msr(tmp_path, seed=1) != sampled_msr(tmp_path, seed=2)


def test_eval_routes_by_argmax(tmp_path):
    held_out = dataset(4, seed=5)
    run = trainer(tmp_path, eval_dataset=held_out)
    run.train()
    metrics = run.evaluate()
    batch = next(iter(run.get_eval_dataloader()))
    task_id = batch.pop("task_id")
    del batch["example_id"]
    with torch.no_grad():
        run.model.eval()(**batch)
    msr = last_routing(run.model).msr
    for index, task in enumerate(("qa", "code")):
        assert metrics[f"eval_msr/{task}"] == pytest.approx(msr[task_id == index].mean().item())


@pytest.mark.parametrize("padding", [None, 64], ids=["exact", "padded-to-64"])
def test_calibration_sees_each_sequence_once(tmp_path, padding):
    """Statistics of a flattened batch equal those of a padded one; segments of padding are not sequences."""
    buffers = []
    for layout in ({}, {"padding_free": True, "max_length": None, "pad_to_multiple_of": padding}):
        run = trainer(tmp_path, max_steps=1, **layout)
        run.train()
        assert is_calibrated(run.model)
        buffers.append({name: buffer for name, buffer in run.model.named_buffers() if "standardizer" in name})
    assert buffers[0]
    torch.testing.assert_close(buffers[1], buffers[0], atol=1e-5, rtol=1e-4)


def test_calibrated_adapter_is_not_calibrated_again(tmp_path):
    run = trainer(tmp_path, max_steps=1)
    run.train()
    before = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    trainer(tmp_path, model=run.model, train_dataset=dataset(seed=9), max_steps=1).train()
    torch.testing.assert_close(dict(run.model.named_buffers()), before, atol=0, rtol=0)


def test_raw_input_needs_no_calibration(tmp_path):
    run = trainer(tmp_path, model=routed_model(standardize_input=False), max_steps=1)
    run.train()
    assert "msr/qa" in run.state.log_history[0]
