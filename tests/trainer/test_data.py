from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from elastic_peft.data import RoutingCollator, add_routing_columns, pack_sequences, task_targets


TASKS = ["qa", "code", "default"]
ROWS = {
    "input_ids": [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11]],
    "labels": [[-100, 2, 3], [4, 5], [-100, -100, -100, 9, 10], [-100]],
    "task": ["code", None, "qa", "code"],
}
PROMPT_ENDS = {0: 1, 1: 2, 2: 3, 3: 1}  # by example: masked prompt, nothing masked, masked prompt, nothing supervised
TASK_IDS = {0: 1, 1: 2, 2: 0, 3: 1}


@pytest.fixture(params=["dataset", "stream"])
def as_kind(request):
    return (lambda dataset: dataset) if request.param == "dataset" else (lambda dataset: dataset.to_iterable_dataset())


def features(dataset):
    return [{key: value for key, value in row.items() if key != "task"} for row in dataset]


def collator(*, padding_free, pad_to_multiple_of=None):
    inner = DataCollatorForLanguageModeling(0, padding_free=padding_free, pad_to_multiple_of=pad_to_multiple_of)
    return RoutingCollator(inner, padding_free)


def test_default_task_is_last_and_has_the_target_sparsity():
    config = SimpleNamespace(t_values={"code": 1.0, "qa": 0.7}, target_sparsity=0.6)
    assert list(task_targets(config).items()) == [("code", 1.0), ("qa", 0.7), ("default", 0.6)]


def test_default_is_a_reserved_task_name():
    with pytest.raises(ValueError, match="`t_values` must not name 'default'"):
        task_targets(SimpleNamespace(t_values={"default": 0.5}, target_sparsity=0.7))


def test_task_becomes_its_index_and_examples_are_numbered(as_kind):
    rows = list(add_routing_columns(as_kind(Dataset.from_dict(ROWS)), TASKS))
    assert [row["task_id"] for row in rows] == [1, 2, 0, 1]
    assert [row["example_id"] for row in rows] == [0, 1, 2, 3]


def test_dataset_without_task_column_has_the_default_task(as_kind):
    dataset = as_kind(Dataset.from_dict(ROWS).remove_columns("task"))
    assert [row["task_id"] for row in add_routing_columns(dataset, TASKS)] == [2, 2, 2, 2]


def test_unknown_task_is_an_error_that_lists_the_names(as_kind):
    dataset = as_kind(Dataset.from_dict({"task": ["qa", "poetry"]}))
    with pytest.raises(ValueError, match="`task` must be one of 'qa', 'code', 'default', got 'poetry'"):
        list(add_routing_columns(dataset, TASKS))


def test_packed_rows_keep_task_and_example_of_each_sequence(as_kind):
    rows = list(pack_sequences(add_routing_columns(as_kind(Dataset.from_dict(ROWS)), TASKS), max_length=6))
    assert sorted(example for row in rows for example in row["example_id"]) == [0, 1, 2, 3]
    for row in rows:
        tokens, start = row["input_ids"], 0
        for length, task, example in zip(row["seq_lengths"], row["task_id"], row["example_id"], strict=True):
            assert tokens[start : start + length] == ROWS["input_ids"][example]
            assert task == TASK_IDS[example]
            start += length
        assert start == len(tokens)


def test_padded_batch_has_one_entry_a_row():
    batch = collator(padding_free=False)(features(add_routing_columns(Dataset.from_dict(ROWS), TASKS)))
    assert batch["task_id"].tolist() == [1, 2, 0, 1]
    assert batch["example_id"].tolist() == [0, 1, 2, 3]
    assert batch["prompt_end"].tolist() == [PROMPT_ENDS[example] for example in range(4)]


def test_left_padded_batch_counts_padding_in_the_prompt_end():
    def left_padded(examples):
        assert all("task_id" not in example for example in examples)
        return {
            "input_ids": torch.tensor([[0, 0, 1, 2, 3], [5, 6, 7, 8, 9], [0, 0, 0, 1, 2]]),
            "labels": torch.tensor([[-100, -100, -100, 2, 3], [5, 6, 7, 8, 9], [-100, -100, -100, 1, 2]]),
            "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]),
        }

    rows = [{"input_ids": [], "task_id": 0, "example_id": index} for index in range(3)]
    batch = RoutingCollator(left_padded, padding_free=False)(rows)
    assert batch["prompt_end"].tolist() == [3, 5, 5]


@pytest.mark.parametrize("packed", [False, True], ids=["padding-free", "packed"])
def test_flattened_batch_has_one_entry_a_sequence(packed):
    dataset = add_routing_columns(Dataset.from_dict(ROWS), TASKS)
    rows = list(pack_sequences(dataset, max_length=6)) if packed else features(dataset)
    batch = collator(padding_free=True)(rows)
    order = batch["example_id"].tolist()
    assert sorted(order) == [0, 1, 2, 3]
    assert batch["task_id"].tolist() == [TASK_IDS[example] for example in order]
    assert batch["prompt_end"].tolist() == [PROMPT_ENDS[example] for example in order]
    assert batch["cu_seq_lens_q"].diff().tolist() == [len(ROWS["input_ids"][example]) for example in order]


def test_flattened_padding_is_marked_as_no_sequence():
    rows = features(add_routing_columns(Dataset.from_dict(ROWS), TASKS))[:2]
    batch = collator(padding_free=True, pad_to_multiple_of=8)(rows)
    assert batch["input_ids"].shape == (1, 8)
    assert batch["task_id"].tolist() == [1, 2, -1, -1, -1]
    assert batch["example_id"].tolist() == [0, 1, -1, -1, -1]
    assert batch["prompt_end"].tolist() == [1, 2, 1, 1, 1]
    assert batch["cu_seq_lens_q"].numel() == 6


def test_collator_leaves_its_features_alone():
    rows = features(add_routing_columns(Dataset.from_dict(ROWS), TASKS))
    before = [dict(row) for row in rows]
    collator(padding_free=False)(rows)
    assert rows == before
