"""RULER's retrieval tasks: facts hidden in a long text, some of which are asked for."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice

from .ruler_prompt import Draft, Sources


NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "A road leads on, and another leads back again.",
)


@dataclass(frozen=True)
class NeedleTask:
    """Writes prompts in which some keywords go with values.

    Args:
        haystack: what hides them: `"noise"` (the same sentences again and again), `"prose"`, or `"needles"` (more
            keywords with values).
        key: what a keyword is, `"words"` or `"code"`.
        value: what a value is, `"number"` or `"code"`.
        keys: keywords in the text, a haystack of needles not counted.
        values: values of each keyword.
        queries: keywords that are asked for.
    """

    haystack: str
    key: str = "words"
    value: str = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def __call__(self, rng: random.Random, sources: Sources, length: int) -> Draft:
        """A prompt; see `ruler_prompt.Draft`. `rng` decides everything that is drawn."""
        facts = [(self._draw_key(rng, sources), [self._draw_value(rng) for _ in range(self.values)])]
        facts += [(self._draw_key(rng, sources), [self._draw_value(rng)]) for _ in range(self.keys - 1)]
        needles = [self._sentence(key, value) for key, values in facts for value in values]
        asked = facts[: self.queries]
        names = " and ".join(key for key, _ in asked)
        references = tuple(value for _, values in asked for value in values)
        kind = self.value if len(references) == 1 else f"{self.value}s"
        verb = "goes" if self.queries == 1 else "go"
        return Draft(
            instruction=f"In this text, keywords go with {self.value}s. Remember them.",
            context=hide(needles, self._haystack(rng, sources), rng),
            question=f"Which {kind} of the text {'goes' if len(references) == 1 else 'go'} with {names}?",
            answer_prefix=f"{names} {verb} with the {kind}",
            references=references,
        )

    def _haystack(self, rng: random.Random, sources: Sources) -> Callable[[int], list[str]]:
        if self.haystack == "noise":
            return noise
        if self.haystack == "prose":
            return prose(sources, rng)
        drawn: list[str] = []
        later = random.Random(rng.random())

        def needles(size: int) -> list[str]:
            while len(drawn) < size:
                drawn.append(self._sentence(self._draw_key(later, sources), self._draw_value(later)))
            return drawn[:size]

        return needles

    def _draw_key(self, rng: random.Random, sources: Sources) -> str:
        return "-".join(rng.sample(sources.words, 2)) if self.key == "words" else _draw_code(rng)

    def _draw_value(self, rng: random.Random) -> str:
        return str(rng.randint(1_000_000, 9_999_999)) if self.value == "number" else _draw_code(rng)

    def _sentence(self, key: str, value: str) -> str:
        return f"The keyword {key} goes with the {self.value} {value}."


def hide(
    needles: list[str], haystack: Callable[[int], list[str]], rng: random.Random, *, ordered: bool = False
) -> Callable[[int], str]:
    """The context of a draft: needles at random depths of a haystack.

    Args:
        needles: sentences.
        haystack: its sentences by their size.
        rng: draws the depths.
        ordered: whether the needles keep their order.
    """
    depths = [rng.random() for _ in needles]
    if ordered:
        depths.sort()

    def context(size: int) -> str:
        sentences = list(haystack(size))
        places = [int(depth * (len(sentences) + 1)) for depth in depths]
        # From the last to the first, so that what is inserted moves no place that is still to be filled.
        for index in sorted(range(len(needles)), key=depths.__getitem__, reverse=True):
            sentences.insert(places[index], needles[index])
        return " ".join(sentences)

    return context


def noise(size: int) -> list[str]:
    """So many sentences that say nothing."""
    return list(islice(cycle(NOISE), size))


def prose(sources: Sources, rng: random.Random) -> Callable[[int], list[str]]:
    """Sentences from a random place of the prose on, by their words."""
    start = rng.randrange(len(sources.sentences))

    def sentences(size: int) -> list[str]:
        taken = []
        for sentence in islice(cycle(sources.sentences), start, None):
            if size <= 0:
                break
            taken.append(" ".join(sentence[:size]))
            size -= len(sentence)
        return taken

    return sentences


def _draw_code(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
