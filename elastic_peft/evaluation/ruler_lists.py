"""RULER's tasks that trace a chain or count: variable tracking, common words and frequent words."""

from __future__ import annotations

import random
import string
from collections.abc import Iterable
from itertools import count

from .ruler_needles import hide, noise
from .ruler_prompt import Draft, Sources


HOPS = 4
COMMON_WORDS = 10
# How often each common and each other word is listed; more is listed than fits below 4K tokens.
REPEATS = {4096: (30, 3), 0: (10, 1)}
FREQUENT_WORDS = 3
ZETA_OF_2 = 1.6449340668482264
# More than a text of a million tokens repeats.
CODED_WORDS = 1000
# With fewer draws the most frequent words would tie with others.
SMALLEST_TEXT = 100


def variable_tracking(rng: random.Random, sources: Sources, length: int) -> Draft:
    """One value is given to a variable and handed on four times; all variables that hold it are asked for."""
    names = draw_words(rng, HOPS + 1, 5, string.ascii_uppercase)
    value = rng.randint(10_000, 99_999)
    return Draft(
        instruction="Variables are assigned in this text. For example, after A = 7. and B = A. both A and B hold 7.",
        context=hide(_chain(names, value), noise, rng, ordered=True),
        question=f"Which {len(names)} variables hold {value}, be it through other variables?",
        answer_prefix=f"The {len(names)} variables that hold {value} are",
        references=tuple(names),
    )


def common_words(rng: random.Random, sources: Sources, length: int) -> Draft:
    """Ten words are listed ten times as often as all others and asked for."""
    often, seldom = next(repeats for least, repeats in REPEATS.items() if length >= least)
    drawn = rng.sample(sources.words, len(sources.words))
    common, others = drawn[:COMMON_WORDS], drawn[COMMON_WORDS:]
    order = rng.random()

    def context(size: int) -> str:
        if size > len(others):
            raise ValueError(f"`words` must hold more words for this length, got {len(sources.words)}.")
        listed = common * often + others[:size] * seldom
        random.Random(order).shuffle(listed)
        return _numbered(listed)

    example = _numbered(["tea", "milk", "tea", "salt", "milk", "tea", "milk"])
    return Draft(
        instruction="Some words of a list appear more often than the others. For example, the 2 most common words of "
        f"the list `{example}` are 1. tea 2. milk. Here is a list.",
        context=context,
        question=f"What are the {COMMON_WORDS} most common words of the list?",
        answer_prefix=f"The {COMMON_WORDS} most common words of the list are",
        references=tuple(common),
        smallest=COMMON_WORDS,
        largest=len(others),
    )


def frequent_words(rng: random.Random, sources: Sources, length: int) -> Draft:
    """Words without a meaning, their frequencies those of a zeta distribution; the most frequent ones are asked for.

    The k-th most frequent of n words appears n / (zeta(2) k^2) times; the first one is noise, dots.
    """
    words = draw_words(rng, CODED_WORDS, 6, string.ascii_lowercase)
    order = rng.random()

    def context(size: int) -> str:
        counts = (round(size / ZETA_OF_2 / rank**2) for rank in count(1))
        text = [word for word, times in zip(["...", *words], counts) for _ in range(times)]
        random.Random(order).shuffle(text)
        return " ".join(text)

    return Draft(
        instruction="This text is in code. Ignore the dots and count its words.",
        context=context,
        question=f"What are the {FREQUENT_WORDS} most frequent words of the text in code?",
        answer_prefix=f"The {FREQUENT_WORDS} most frequent words are",
        references=tuple(words[:FREQUENT_WORDS]),
        smallest=SMALLEST_TEXT,
    )


def draw_words(rng: random.Random, number: int, length: int, letters: str) -> list[str]:
    """So many different words of random letters."""
    words: dict[str, None] = {}
    while len(words) < number:
        words["".join(rng.choices(letters, k=length))] = None
    return list(words)


def _chain(names: list[str], value: int) -> list[str]:
    return [f"{name} = {source}." for name, source in zip(names, [value, *names])]


def _numbered(words: Iterable[str]) -> str:
    return " ".join(f"{index}. {word}" for index, word in enumerate(words, start=1))
