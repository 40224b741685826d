"""Training on a sample of the other mode's output: each step draws its own, whatever the layout of its batch."""

import pytest
import torch
from trainer.tiny import dataset, first_gradients, trainer

from elastic_kernels.routed_attention import counterfactual


SAMPLED = {"counterfactual_fraction": 0.5}


@pytest.fixture(scope="module", autouse=True)
def small_tiles():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(counterfactual, "TILE", 4)  # sequences are 12 to 23 tokens long
        yield


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    return first_gradients(tmp_path_factory.mktemp("sampled"), train_dataset=dataset(4), **SAMPLED)[0]


def test_the_estimate_differs_from_the_whole_gradient_by_sampling_only(tmp_path, sampled):
    whole, _ = first_gradients(tmp_path, train_dataset=dataset(4))
    names = [name for name in whole if (sampled[name] - whole[name]).abs().max() > 1e-3]
    assert names, "no gradient was estimated"


@pytest.mark.parametrize(
    "layout",
    [
        {"padding_free": True, "max_length": None},
        {"pad_to_multiple_of": 64},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "calibration_batches": 4},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ],
    ids=["padding-free", "padded-to-64", "accumulation", "checkpointing"],
)
def test_layout_of_a_batch_changes_nothing(tmp_path, layout, sampled):
    gradients, _ = first_gradients(tmp_path, train_dataset=dataset(4), **SAMPLED, **layout)
    torch.testing.assert_close(gradients, sampled, atol=1e-5, rtol=1e-4)


def test_evaluation_and_calibration_need_no_sample(tmp_path):
    run = trainer(tmp_path, eval_dataset=dataset(4, seed=5), max_steps=1, **SAMPLED)
    run.train()
    assert run.evaluate()["eval_lm_loss"] > 0
