"""Prompts of an exact number of tokens: what RULER's tasks are made of, and how much of it fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from transformers import PreTrainedTokenizerBase


# One token in most vocabularies, however often it is repeated.
FILLER = " ."
# Tokens that are filled up rather than searched for a context that needs fewer.
SLACK = 16
# Words of a sentence.
LONGEST = 100
# What a prompt that is being fitted is: asks for the token ids of messages, and ends with those of its own.
Fitting = Generator[str, list[int], list[int]]


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
        """The words of each sentence of the prose; longer ones than usual are cut, for needles stand between them.

        Raises:
            ValueError: there are no words.
        """
        sentences = [sentence.split() for sentence in re.split(r"(?<=[.!?])\s+", self.prose)]
        cut = [words[i : i + LONGEST] for words in sentences for i in range(0, len(words), LONGEST)]
        if not cut:
            raise ValueError("`prose` must hold words, got none.")
        return cut


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
        largest: the largest size that its source has text for, `None` if there is no end; larger ones are an error.
    """

    instruction: str
    context: Callable[[int], str]
    question: str
    answer_prefix: str
    references: tuple[str, ...]
    smallest: int = 0
    largest: int | None = None

    def message(self, size: int, filler: int = 0) -> str:
        """The user's message with a context of this size and so many tokens of filler after it."""
        return f"{self.instruction}\n\n{self.context(size)}{FILLER * filler}\n\n{self.question}"


def fit_prompts(tokenizer: PreTrainedTokenizerBase, drafts: Sequence[Draft], length: int) -> list[list[int]]:
    """The longest prompt of each draft, filled up with dots.

    Args:
        tokenizer: its chat template is applied if it has one.
        drafts: the prompts to be. They are fitted together, for a tokenizer reads many texts at once on all cores.
        length: tokens.

    Returns:
        Token ids: `length` of them, or a few less with a tokenizer that has no dot of one token; never more.

    Raises:
        ValueError: a draft's smallest context is longer than `length`, or its source has too little text for it.
    """
    fittings = [_fit(draft, length) for draft in drafts]
    prompts: list[list[int]] = [[]] * len(drafts)
    asked = {index: next(fitting) for index, fitting in enumerate(fittings)}
    while asked:
        answers = _encode(tokenizer, asked.values(), [drafts[index].answer_prefix for index in asked])
        for index, ids in zip(list(asked), answers, strict=True):
            try:
                asked[index] = fittings[index].send(ids)
            except StopIteration as end:
                del asked[index]
                prompts[index] = end.value
    return prompts


def _encode(
    tokenizer: PreTrainedTokenizerBase, messages: Iterable[str], answer_prefixes: Iterable[str]
) -> list[list[int]]:
    if not tokenizer.chat_template:
        return tokenizer([f"{message}\n{prefix}" for message, prefix in zip(messages, answer_prefixes)]).input_ids
    chats = tokenizer.apply_chat_template(
        [[{"role": "user", "content": message}] for message in messages],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,  # templates that know no thinking ignore it
    )
    texts = [chat + prefix for chat, prefix in zip(chats, answer_prefixes)]
    return tokenizer(texts, add_special_tokens=False).input_ids


def _fit(draft: Draft, length: int) -> Fitting:
    """Fits the context, then the filler."""
    ids = yield draft.message(draft.smallest)
    if len(ids) > length:
        raise ValueError(f"`length` must leave room for a prompt of {len(ids)} tokens in this task, got {length}.")
    size, ids = yield from _grow(draft.message, length, draft.smallest, ids, 32, SLACK, draft.largest)
    _, ids = yield from _grow(partial(draft.message, size), length, 0, ids, length - len(ids))
    return ids


def _grow(
    message: Callable[[int], str],
    length: int,
    size: int,
    ids: list[int],
    step: int,
    slack: int = 1,
    largest: int | None = None,
) -> Generator[str, list[int], tuple[int, list[int]]]:
    """The largest size with at most `length` tokens, or one that lacks less than `slack`, and its token ids.

    Args:
        message: text by size, whose tokens grow about evenly.
        length: tokens.
        size: a size with at most `length` tokens.
        ids: token ids of `size`.
        step: how much larger the first other size is.
        slack: tokens.
        largest: size beyond which there is text for no more; that is asked for only if it is lacking.
    """
    too_large, stalls = None, 0
    while len(ids) + slack <= length and too_large != size + 1:
        tried = size + step
        if too_large is not None:
            tried = min(tried, too_large - 1)
        if largest is not None:
            tried = max(min(tried, largest), size + 1)
        tried_ids = yield message(tried)
        unit = (len(tried_ids) - len(ids)) / (tried - size)
        if len(tried_ids) > length:
            too_large = tried
        else:
            size, ids = tried, tried_ids
            # Once: the first dot may make one token with what follows. Twice: a tokenizer that has none for dots.
            stalls += unit <= 0
            if stalls == 2:
                break
        if unit > length - len(ids):
            break
        step = max(int((length - len(ids)) / max(unit, 0.5)), 1)
    return size, ids
