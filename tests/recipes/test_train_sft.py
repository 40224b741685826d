"""`train_sft.py` from a recipe to a saved and pushed adapter, in one process."""

import pytest
import torch
import train_sft
from datasets import Dataset
from hub.fake_hub import TOKEN, FakeHub
from huggingface_hub import HfApi, constants
from peft import PeftModel
from recipes.sft_runs import STEPS, multipliers, train, weights, write_recipe
from safetensors.torch import load_file
from trainer.tiny import T_VALUES, dataset, rows
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("recipe"), use_cpu=True)


@pytest.fixture(scope="module")
def alone(recipe, tmp_path_factory):
    return train(recipe, tmp_path_factory.mktemp("alone"))


def test_adapter_is_routers_for_the_base_model(alone, recipe):
    assert all(".router." in name for name in weights(alone))
    base = AutoModelForCausalLM.from_pretrained(recipe.parent / "model")
    config = PeftModel.from_pretrained(base, alone).peft_config["default"]
    assert (config.window_size, config.t_values, config.task_type) == (4, T_VALUES, "CAUSAL_LM")


def test_routers_learn(alone):
    first, last = (load_file(alone / f"checkpoint-{step}" / "adapter_model.safetensors") for step in (1, STEPS))
    name = next(name for name in first if name.endswith("elastic_router_out.weight"))
    assert (first[name] - last[name]).abs().max() > 1e-3


def test_card_is_the_adapter_s(alone):
    assert "tags:\n- transformers\n- elastic-attention" in (alone / "README.md").read_text()


def test_same_seed_gives_the_same_routers(alone, recipe, tmp_path):
    torch.testing.assert_close(weights(train(recipe, tmp_path)), weights(alone), atol=0, rtol=0)


def test_another_seed_gives_other_routers(alone, recipe, tmp_path):
    other = weights(train(recipe, tmp_path, "--seed", "7", "--max_steps", "1"))
    name = next(name for name in other if name.endswith("elastic_task_up.weight"))
    assert not torch.equal(other[name], weights(alone)[name])


def test_resumed_run_equals_the_straight_one(alone, recipe, tmp_path):
    resumed = train(recipe, tmp_path, "--resume_from_checkpoint", str(alone / "checkpoint-2"))
    torch.testing.assert_close(weights(resumed), weights(alone), atol=0, rtol=0)
    torch.testing.assert_close(multipliers(resumed), multipliers(alone), atol=0, rtol=0)


def test_packed_rows_hold_several_tasks(recipe, tmp_path):
    messages = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"]}],
            "task": row["task"],
            "source": "test",
            "tokens": 0,
        }
        for row in rows(8)
    ]
    Dataset.from_list(messages).to_parquet(tmp_path / "train.parquet")
    parsed = train_sft.parse_recipe(
        ["--config", str(recipe), "--output_dir", str(tmp_path), "--dataset_name", str(tmp_path), "--packing"]
    )
    packed = train_sft.build_trainer(parsed).train_dataset
    assert sorted(example for row in packed for example in row["example_id"]) == list(range(8))
    assert any(len(set(row["task_id"])) == 2 for row in packed)


def test_evaluation_takes_the_test_split(recipe, tmp_path):
    for split in ("train", "test"):
        dataset(4, seed=len(split)).to_parquet(tmp_path / f"{split}.parquet")
    parsed = train_sft.parse_recipe(
        ["--config", str(recipe), "--output_dir", str(tmp_path), "--dataset_name", str(tmp_path)]
        + ["--eval_strategy", "steps"]
    )
    assert len(train_sft.build_trainer(parsed).eval_dataset) == 4


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--dataset_train_split", "training", "`dataset_train_split` must be one of 'train', got 'training'"),
        ("--eval_strategy", "steps", "`dataset_test_split` must be one of 'train', got 'test'"),
    ],
    ids=["train", "test"],
)
def test_a_split_that_is_not_there_is_named(recipe, tmp_path, option, value, message):
    parsed = train_sft.parse_recipe(["--config", str(recipe), "--output_dir", str(tmp_path), option, value])
    with pytest.raises(ValueError, match=message):
        train_sft.build_trainer(parsed)


# The Hub


def test_push_is_one_commit_with_the_card(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with FakeHub() as hub:
        monkeypatch.setattr(train_sft, "HfApi", lambda token: HfApi(hub.url, token=TOKEN))
        train(recipe, tmp_path, "--push_to_hub", "--hub_model_id", "user/trained", "--max_steps", "1")
        repo = hub.repos["user/trained"]
        assert list(repo.messages.values())[1:] == ["Upload ELASTIC adapter"]
        assert set(repo.commits[repo.find("main")]) - {".gitattributes"} == {
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
        }
    assert 'PeftModel.from_pretrained(base, "user/trained")' in (tmp_path / "README.md").read_text()
