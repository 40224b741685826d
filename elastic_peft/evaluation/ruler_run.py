"""Runs RULER's prompts through a model with an ELASTIC adapter, routed and in given ways, and scores the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import mean
from typing import Any

import torch
from accelerate.utils import find_executable_batch_size
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from ..context import evaluation_mode, forced_by_layer, forced_routing, last_routing, routed_decoder
from ..hooks import active_routers
from .ruler import Example


# New tokens between two looks at the answers.
CHECK_EVERY = 8


class Decided(StoppingCriteria):
    """Stops each row as soon as nothing that it could still say would change its score.

    Args:
        tokenizer: the model's.
        examples: one for each row.
        device: the model's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, examples: list[Example], device: torch.device):
        self._tokenizer = tokenizer
        self._examples = examples
        self._start = len(examples[0].input_ids)
        self._limits = torch.tensor([example.answer_tokens for example in examples], device=device)
        self._is_right = torch.zeros(len(examples), dtype=torch.bool, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        count = input_ids.shape[1] - self._start
        if count % CHECK_EVERY == 0:
            answers = read_answers(self._tokenizer, self._examples, input_ids)
            right = [example.score(answer) == 1 for example, answer in zip(self._examples, answers)]
            self._is_right |= torch.tensor(right, device=self._is_right.device)
        return self._is_right | (count >= self._limits)


def read_answers(tokenizer: PreTrainedTokenizerBase, examples: list[Example], sequences: torch.Tensor) -> list[str]:
    """The answer in each row of prompts and what was generated after them, no longer than its example allows."""
    rows = sequences[:, len(examples[0].input_ids) :].tolist()
    answers = [row[: example.answer_tokens] for row, example in zip(rows, examples)]
    return tokenizer.batch_decode(answers, skip_special_tokens=True)


def evaluate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[Example],
    *,
    static: Mapping[str, torch.Tensor] | None = None,
    batch_tokens: int = 2**20,
) -> list[dict[str, Any]]:
    """Scores of greedy answers with the base model's own attention, with every head sparse, routed, and in given ways.

    Args:
        model: a `PeftModel` with an ELASTIC adapter.
        tokenizer: the model's.
        examples: from `ruler.build_examples`.
        static: more ways to run, by names of their own: bool `[L, H]`, True = sparse.
        batch_tokens: prompt tokens of a batch at most, and one prompt at least; fewer where the memory is too small.

    Returns:
        For each task and length in the order of the examples `{"task", "length", "mode_pair", "score", "msr", "esr",
        "n"}`: `score` by way (`"full"`, `"all_sparse"`, `"routed"` and the names in `static`), from 0 to 100; MSR and
        ESR of the routed prompts; n of them.

    Raises:
        ValueError: `model` has no ELASTIC adapter, or a mask in `static` has other layers or heads, or the name of
            another way.
    """
    ways = _ways(model, static or {})
    rows = {(example.task, example.length): _Row() for example in examples}
    with evaluation_mode(model), tqdm(total=len(examples) * len(ways), desc="RULER", unit="prompt") as bar:
        for way, enter in ways.items():
            bar.set_postfix_str(way)
            for group in _groups_of_one_length(examples):
                with enter():
                    # What did not fit once is not tried again.
                    answers, ratios, batch_tokens = _answer(
                        model, tokenizer, group, batch_tokens, bar, is_routed=way == "routed"
                    )
                for example, answer in zip(group, answers, strict=True):
                    row = rows[example.task, example.length]
                    row.scores.setdefault(way, []).append(100 * example.score(answer))
                for example, of_prompt in zip(group, ratios):
                    rows[example.task, example.length].ratios.append(of_prompt)
    mode_pair = model.active_peft_config.mode_pair
    return [
        {"task": task, "length": length, "mode_pair": mode_pair, **row.means()} for (task, length), row in rows.items()
    ]


def _ways(model: Any, static: Mapping[str, torch.Tensor]) -> dict[str, Callable[[], AbstractContextManager]]:
    """Ways to run a model, by name. All masks are checked before the first one runs."""
    routers = active_routers(routed_decoder(model))
    heads = {router.layer.index: router.layer.num_key_value_heads for router in routers}
    ways: dict[str, Callable[[], AbstractContextManager]] = {
        "full": model.disable_adapter,
        "all_sparse": partial(forced_routing, model, "sparse"),
        "routed": nullcontext,
    }
    for name, mask in static.items():
        if name in ways:
            raise ValueError(f"`static` must have names other than {', '.join(ways)}, got {name!r}.")
        forced_by_layer(mask, heads, num_sequences=1)
    return ways | {name: partial(forced_routing, model, mask) for name, mask in static.items()}


@dataclass
class _Row:
    """What was measured of one task at one length: scores by way, and MSR and ESR of the routed prompts."""

    scores: dict[str, list[float]] = field(default_factory=dict)
    ratios: list[tuple[float, float]] = field(default_factory=list)

    def means(self) -> dict[str, Any]:
        scores = {way: mean(values) for way, values in self.scores.items()}
        msr, esr = map(mean, zip(*self.ratios))
        return {"score": scores, "msr": msr, "esr": esr, "n": len(self.ratios)}


def _groups_of_one_length(examples: list[Example]) -> list[list[Example]]:
    """Examples with prompts of one number of tokens, which need no padding; short answers first, to end together."""
    groups: dict[int, list[Example]] = {}
    for example in sorted(examples, key=lambda example: example.answer_tokens):
        groups.setdefault(len(example.input_ids), []).append(example)
    return list(groups.values())


def _answer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[Example],
    batch_tokens: int,
    bar: tqdm,
    *,
    is_routed: bool,
) -> tuple[list[str], list[tuple[float, float]], int]:
    """Answers to prompts of one length, the MSR and ESR of each where routed, and the `batch_tokens` that fitted."""
    length, start = len(examples[0].input_ids), bar.n
    at_once = min(max(batch_tokens // length, 1), len(examples))
    halves = (at_once >> times for times in count(1))

    @find_executable_batch_size(starting_batch_size=at_once, reduce_batch_size_fn=lambda: next(halves))
    def answer(batch_size: int) -> tuple[list[str], list[tuple[float, float]], int]:
        answers: list[str] = []
        ratios: list[tuple[float, float]] = []
        for first in range(0, len(examples), batch_size):
            answers += _generate(model, tokenizer, examples[first : first + batch_size])
            if is_routed:
                record = last_routing(model)
                assert record is not None
                ratios += zip(record.msr.tolist(), record.esr.tolist())
            bar.update(start + len(answers) - bar.n)
        return answers, ratios, batch_tokens if batch_size == at_once else batch_size * length

    return answer()


@torch.inference_mode()
def _generate(model: Any, tokenizer: PreTrainedTokenizerBase, examples: list[Example]) -> list[str]:
    input_ids = torch.tensor([example.input_ids for example in examples], device=model.device)
    sequences = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max(example.answer_tokens for example in examples),
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        stopping_criteria=[Decided(tokenizer, examples, model.device)],
    )
    return read_answers(tokenizer, examples, sequences)
