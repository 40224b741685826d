"""Prompts of an exact number of tokens: what RULER's tasks are made of, and how much of it fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from transformers import PreTrainedTokenizerBase


# One token in the vocabularies of byte-pair and unigram tokenizers, however often it is repeated.
FILLER = " ."
# Tokens that are not worth another look at how much fits.
SLACK = 16


@dataclass(frozen=True)
class Question:
    """A question, the texts that only together answer it, and the answers that count."""

    text: str
    answers: tuple[str, ...]
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Sources:
    """The text that prompts are made of.

    Args:
        prose: what needles are hidden in; starts again from its beginning where a prompt needs more.
        words: different words in lower case, for keys and word lists.
        single_hop: questions that one text answers.
        multi_hop: questions that take several texts to answer.
    """

    prose: str
    words: Sequence[str]
    single_hop: Sequence[Question] = ()
    multi_hop: Sequence[Question] = ()

    @cached_property
    def sentences(self) -> list[list[str]]:
        """The words of each sentence of the prose."""
        return [sentence.split() for sentence in re.split(r"(?<=[.!?])\s+", self.prose.strip()) if sentence]


@dataclass(frozen=True)
class Draft:
    """A prompt whose length is still open.

    Args:
        instruction: what comes first.
        context: the part that grows, by its size in units of its own; the same size gives the same text.
        question: what comes last.
        answer_prefix: how the answer begins; the model continues it.
        references: what the answer must contain.
        smallest: the smallest size of the context.
    """

    instruction: str
    context: Callable[[int], str]
    question: str
    answer_prefix: str
    references: tuple[str, ...]
    smallest: int = 0

    def message(self, size: int, filler: int = 0) -> str:
        """The user's message with a context of this size and so many tokens of filler after it."""
        return f"{self.instruction}\n\n{self.context(size)}{FILLER * filler}\n\n{self.question}"


def fit_prompt(tokenizer: PreTrainedTokenizerBase, draft: Draft, length: int) -> list[int]:
    """The longest prompt of a draft, filled up with dots.

    Args:
        tokenizer: its chat template is applied if it has one.
        draft: the prompt to be.
        length: tokens.

    Returns:
        Token ids: `length` of them, or fewer with a tokenizer that joins the dots; never more.

    Raises:
        ValueError: the draft's smallest context is longer than `length`.
    """

    @cache
    def encode(size: int) -> list[int]:
        return _encode(tokenizer, draft.message(size), draft.answer_prefix)

    size = _largest_size(lambda size: len(encode(size)), length, draft.smallest)
    ids = encode(size)
    filled = _encode(tokenizer, draft.message(size, filler=length - len(ids)), draft.answer_prefix)
    return filled if len(filled) == length else ids


def _encode(tokenizer: PreTrainedTokenizerBase, message: str, answer_prefix: str) -> list[int]:
    if not tokenizer.chat_template:
        return tokenizer(f"{message}\n{answer_prefix}").input_ids
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,  # templates that know no thinking ignore it
    )
    return tokenizer(chat + answer_prefix, add_special_tokens=False).input_ids


def _largest_size(count: Callable[[int], int], limit: int, smallest: int) -> int:
    """About the largest size with at most `limit` tokens, where tokens grow about evenly with the size."""
    low, low_tokens = smallest, count(smallest)
    if low_tokens > limit:
        raise ValueError(f"`length` must leave room for a prompt of {low_tokens} tokens in this task, got {limit}.")
    high, guess = None, smallest + 32
    while True:
        tokens = count(guess)
        unit = max((tokens - low_tokens) / (guess - low), 0.5)
        if tokens > limit:
            high = guess
        else:
            low, low_tokens = guess, tokens
        if limit - low_tokens < max(unit, SLACK) or high == low + 1:
            return low
        guess = low + max(int((limit - low_tokens) / unit), 1)
        if high is not None:
            guess = min(guess, high - 1)
