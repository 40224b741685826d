"""From a dataset's `task` column to each batch's task, example index and prompt end per sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    from .config import ElasticConfig

#: Task of an example that names none.
DEFAULT_TASK = "default"
#: Dataset columns that survive to the collator: one integer per example, or one per sequence of a packed row.
ROUTING_COLUMNS = ("task_id", "example_id")
#: `task_id` and `example_id` of the one-token segments that `pad_to_multiple_of` makes of padding.
NO_SEQUENCE = -1


def task_targets(config: ElasticConfig) -> dict[str, float]:
    """Target model sparsity ratio by task.

    Args:
        config: an adapter's configuration.

    Returns:
        Task name to target, in the order of `task_id`: `t_values` as declared, then the default task.

    Raises:
        ValueError: `t_values` names the default task.
    """
    if DEFAULT_TASK in config.t_values:
        raise ValueError(
            f"`t_values` must not name {DEFAULT_TASK!r}, the task of examples without one: set `target_sparsity` "
            f"instead, got {config.t_values}."
        )
    return {**config.t_values, DEFAULT_TASK: config.target_sparsity}


def add_routing_columns(dataset: Dataset | IterableDataset, tasks: Sequence[str]) -> Dataset | IterableDataset:
    """Adds `task_id`, the index of the example's `task` in `tasks`, and `example_id`, its index in the dataset.

    Args:
        dataset: with a string column `task`, or without: every example then has the default task, as has one whose
            `task` is None.
        tasks: task names, the default task among them.

    Returns:
        The dataset with both columns. A stream that several workers share is numbered by each worker on its own.

    Raises:
        ValueError: a `task` outside `tasks`, once its row is read.
    """
    task_ids: dict[str | None, int] = {task: index for index, task in enumerate(tasks)}
    task_ids[None] = task_ids[DEFAULT_TASK]

    def add(batch: Mapping[str, list], indices: list[int]) -> dict[str, list[int]]:
        names = batch["task"] if "task" in batch else [None] * len(indices)
        for name in names:
            if name not in task_ids:
                raise ValueError(f"`task` must be one of {', '.join(map(repr, tasks))}, got {name!r}.")
        return {"task_id": [task_ids[name] for name in names], "example_id": indices}

    return dataset.map(add, with_indices=True, batched=True)


def pack_sequences(dataset: Dataset | IterableDataset, max_length: int) -> Dataset | IterableDataset:
    """Packs examples into rows by TRL's "bfd" strategy, keeping the task and the index of each.

    Args:
        dataset: with `input_ids`, `labels` and the routing columns.
        max_length: tokens in a row.

    Returns:
        A dataset of rows with `input_ids`, `labels`, `seq_lengths`, and `task_id` and `example_id` as lists of one
        integer per sequence.
    """
    from trl import pack_dataset

    # Packing concatenates lists of tokens and forgets which example each came from, so every token carries it.
    def expand(example: Mapping[str, Any]) -> dict[str, list[int]]:
        return {f"token_{name}": [example[name]] * len(example["input_ids"]) for name in ROUTING_COLUMNS}

    def collapse(row: Mapping[str, Any]) -> dict[str, list[int]]:
        starts = list(accumulate(row["seq_lengths"][:-1], initial=0))
        return {name: [row[f"token_{name}"][start] for start in starts] for name in ROUTING_COLUMNS}

    token_columns = [f"token_{name}" for name in ROUTING_COLUMNS]
    dataset = dataset.map(expand).select_columns(["input_ids", "labels", *token_columns])
    return pack_dataset(dataset, max_length, "bfd").map(collapse, remove_columns=token_columns)


@dataclass
class RoutingCollator:
    """Adds `task_id`, `example_id` and `prompt_end`, int64 `[N]`, to what another collator returns.

    N counts sequences in order: rows, or the segments of a flattened batch, the one-token segments of its padding
    included. The prompt of a sequence ends before its first supervised label; where no label is masked before it, or
    none is supervised, the whole sequence counts as prompt.

    Args:
        collator: called with the features less the routing columns.
        padding_free: whether `collator` flattens the batch into one row.
    """

    collator: Callable[[list[dict[str, Any]]], dict[str, Any]]
    padding_free: bool

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collator(
            [{key: value for key, value in feature.items() if key not in ROUTING_COLUMNS} for feature in features]
        )
        routing = _segment_routing(features, batch) if self.padding_free else _row_routing(features, batch)
        batch.update(routing)
        return batch


def _segment_routing(features: list[dict[str, Any]], batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    # Read from the features: the flattened batch masks every segment's first label, prompt or not.
    rows = []
    for feature in features:
        labels = feature.get("labels", feature["input_ids"])
        lengths = feature.get("seq_lengths", [len(feature["input_ids"])])
        starts = accumulate(lengths[:-1], initial=0)
        for start, length, task, example in zip(
            starts, lengths, *(_as_list(feature[name]) for name in ROUTING_COLUMNS), strict=True
        ):
            if length:
                rows.append((task, example, _prompt_end(labels[start : start + length])))
    padding = batch["input_ids"].numel() - sum(len(feature["input_ids"]) for feature in features)
    rows += [(NO_SEQUENCE, NO_SEQUENCE, 1)] * padding
    return dict(zip((*ROUTING_COLUMNS, "prompt_end"), torch.tensor(rows).T.contiguous()))


def _as_list(value: int | list[int]) -> list[int]:
    return value if isinstance(value, list) else [value]


def _prompt_end(labels: list[int]) -> int:
    first = next((index for index, label in enumerate(labels) if label != -100), 0)
    return first or len(labels)


def _row_routing(features: list[dict[str, Any]], batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    labels = batch["labels"]
    column = torch.arange(labels.shape[1])
    valid = batch.get("attention_mask", torch.ones_like(labels)).bool()
    start = torch.where(valid, column, labels.shape[1]).amin(dim=1)
    end = torch.where(valid, column + 1, 0).amax(dim=1)
    first = torch.where(labels != -100, column, labels.shape[1]).amin(dim=1)
    routing = {name: torch.tensor([feature[name] for feature in features]) for name in ROUTING_COLUMNS}
    return {**routing, "prompt_end": torch.where((first > start) & (first < end), first, end)}


def calibration_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A `RoutingCollator`'s batch as input of a forward pass that runs for the pooled keys alone.

    Args:
        batch: what a `RoutingCollator` returned.

    Returns:
        Keyword arguments of the model. Segments of padding are cut off, so that they do not count as sequences; no
        logits but the last are computed.
    """
    inputs = {key: value for key, value in batch.items() if key not in (*ROUTING_COLUMNS, "labels")}
    sequences = int((batch["task_id"] != NO_SEQUENCE).sum())
    if sequences < batch["task_id"].shape[0]:
        inputs["cu_seq_lens_q"] = inputs["cu_seq_lens_k"] = inputs["cu_seq_lens_q"][: sequences + 1]
        inputs["prompt_end"] = inputs["prompt_end"][:sequences]
        tokens = int(inputs["cu_seq_lens_q"][-1])
        for name in ("input_ids", "position_ids", "seq_idx"):
            inputs[name] = inputs[name][:, :tokens]
    return {**inputs, "logits_to_keep": 1, "use_cache": False}
