"""RULER's thirteen long-context tasks, written from the paper's description, on local text and any tokenizer.

The tasks, their parameters, their answer lengths and their scores are the paper's; wording, words, prose and questions
are not, so scores compare with each other and not with published ones.

Source: Hsieh et al., RULER: What's the Real Context Size of Your Long-Context Language Models?, arXiv 2404.06654.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .ruler_lists import common_words, frequent_words, variable_tracking
from .ruler_needles import NeedleTask
from .ruler_prompt import Draft, Sources, fit_prompts
from .ruler_questions import multi_hop, single_hop


@dataclass(frozen=True)
class Task:
    """How a task's prompts are drafted, how long an answer may be, and whether it must hold every reference."""

    draft: Callable[[random.Random, Sources, int], Draft]
    answer_tokens: int
    needs_all: bool = True


TASKS = {
    "niah_single_1": Task(NeedleTask("noise"), 128),
    "niah_single_2": Task(NeedleTask("prose"), 128),
    "niah_single_3": Task(NeedleTask("prose", value="code"), 128),
    "niah_multikey_1": Task(NeedleTask("prose", keys=4), 128),
    "niah_multikey_2": Task(NeedleTask("needles"), 128),
    "niah_multikey_3": Task(NeedleTask("needles", key="code", value="code"), 128),
    "niah_multivalue": Task(NeedleTask("prose", values=4), 128),
    "niah_multiquery": Task(NeedleTask("prose", keys=4, queries=4), 128),
    "vt": Task(variable_tracking, 30),
    "cwe": Task(common_words, 120),
    "fwe": Task(frequent_words, 50),
    "qa_1": Task(single_hop, 32, needs_all=False),
    "qa_2": Task(multi_hop, 32, needs_all=False),
}
# Kept free in every task, so that all prompts of one length have the same number of tokens and share batches.
ANSWER_ROOM = max(task.answer_tokens for task in TASKS.values())


@dataclass(frozen=True)
class Example:
    """One prompt of a task: its token ids, and what an answer of at most `answer_tokens` tokens must contain."""

    task: str
    length: int
    input_ids: list[int]
    references: tuple[str, ...]

    @property
    def answer_tokens(self) -> int:
        return TASKS[self.task].answer_tokens

    def score(self, answer: str) -> float:
        """The share of references in the answer, in any case of letters; for questions 1 with any of them."""
        found = [reference.lower() in answer.lower() for reference in self.references]
        return sum(found) / len(found) if TASKS[self.task].needs_all else float(any(found))


def build_examples(
    tokenizer: PreTrainedTokenizerBase,
    sources: Sources,
    length: int,
    *,
    tasks: Iterable[str] = tuple(TASKS),
    samples: int = 20,
    seed: int = 0,
) -> list[Example]:
    """Prompts of one length.

    Args:
        tokenizer: the model's.
        sources: the text to make them of.
        length: tokens of a prompt and its answer together: a prompt has `length - ANSWER_ROOM`, never more.
        tasks: names from `TASKS`.
        samples: prompts of each task.
        seed: a prompt depends on it and on its task, length and number alone.

    Returns:
        The prompts, task by task.

    Raises:
        ValueError: an unknown task, no samples, `length` is too short for a task, or `sources` hold too little.
    """
    if samples < 1:
        raise ValueError(f"`samples` must be at least 1, got {samples}.")
    examples = []
    for task in check_tasks(tasks):
        generators = (random.Random(f"{seed}-{task}-{length}-{index}") for index in range(samples))
        drafts = [TASKS[task].draft(generator, sources, length) for generator in generators]
        prompts = fit_prompts(tokenizer, drafts, length - ANSWER_ROOM)
        examples += [Example(task, length, ids, draft.references) for ids, draft in zip(prompts, drafts, strict=True)]
    return examples


def check_tasks(tasks: Iterable[str]) -> Sequence[str]:
    """`tasks`, each of which is in `TASKS`, once.

    Raises:
        ValueError: one is not.
    """
    tasks = list(dict.fromkeys(tasks))
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"`tasks` must be among {', '.join(TASKS)}, got {task!r}.")
    return tasks
