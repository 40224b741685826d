"""Examples of other lengths, made from given ones: the evidence stays, the text around it shrinks or grows."""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from reproduction.examples import Example
from transformers import PreTrainedTokenizerBase


USER, ASSISTANT = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
#: What ends the instruction that opens a prompt, what separates its records, what begins its closing instruction.
SEPARATORS = {
    "sqa_foldoc": ("\n\n", "\n\n", "\n\n"),
    "sqa_pkg": ("\n\n", "\n\n", "\n\n"),
    "niah_single": ("\n", ". ", "\n"),
    "mhop_wordnet": ("\n\n", "\n", "\n\n"),
    "summ_rfc": ("\n\n", "\n", "\n\n"),
    "icl_wordnet": ("\n\n", "\n\n", "\n\n"),
}


class Document(NamedTuple):
    """A prompt as text: what opens it, its records, what closes it, and what separates records."""

    head: str
    records: list[str]
    tail: str
    separator: str


class _Record(NamedTuple):
    """A record and its place among an example's own, whole numbers."""

    place: float
    text: str


def resize(
    tokenizer: PreTrainedTokenizerBase, example: Example, length: int, others: Sequence[Example]
) -> Example | None:
    """An example with the same question and answer and about `length` tokens.

    Args:
        tokenizer: of the examples.
        example: the given one.
        length: tokens of prompt and answer.
        others: examples of the same set, whose records fill what is missing.

    Returns:
        The example; `None` where it cannot grow: a summary of more text would be another one.
    """
    if example.set == "summ_rfc" and length > len(example.ids):
        return None
    document = split(tokenizer, example)
    answer = example.ids[example.prompt_end :]
    is_needed = _evidence(example.set, document.tail, tokenizer.decode(answer))
    records = [_Record(place, text) for place, text in enumerate(document.records)]
    kept = [record for record in records if is_needed(record.text)]

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def prompt() -> list[int]:
        return encode(document.head + document.separator.join(text for _, text in sorted(kept)) + document.tail)

    room = length - len(answer) - len(prompt())
    for fillers in _fillers(tokenizer, example, records, others, is_needed):
        texts = [document.separator + record.text for record in fillers]
        costs = list(accumulate(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))) if texts else []
        fitting = bisect_right(costs, room)
        kept += fillers[:fitting]
        if fitting < len(fillers):
            break
        room -= costs[-1] if costs else 0
    ids = prompt()
    return Example(example.set, (*ids, *answer), len(ids))


def split(tokenizer: PreTrainedTokenizerBase, example: Example) -> Document:
    """The text of an example's prompt."""
    prompt = tokenizer.decode(example.ids[: example.prompt_end])
    closing = prompt.index(ASSISTANT)
    if example.set == "code_stdlib":  # the assistant's turn begins with the code to continue
        first = closing + len(ASSISTANT)
        return Document(prompt[:first], prompt[first:].split("\n"), "", "\n")
    opens, separator, closes = SEPARATORS[example.set]
    first = prompt.index(opens, prompt.index(USER) + len(USER)) + len(opens)
    last = prompt.rindex(closes, first, closing)
    return Document(prompt[:first], prompt[first:last].split(separator), prompt[last:], separator)


def _evidence(name: str, question: str, answer: str) -> Callable[[str], bool]:
    """Which records an answer rests on, and which others could not stand beside them."""
    if name in ("sqa_foldoc", "sqa_pkg"):
        term = question.split('"')[1]
        return lambda record: record.startswith((f"{term}:", f"Package: {term}\n"))
    if name == "niah_single":
        return lambda record: "special magic number" in record
    if name == "mhop_wordnet":
        word, _, kind = answer.split(", which means")[0].partition(" is a kind of ")
        return lambda record: record.startswith((f"* {word} is a kind of ", f"* {kind} means"))
    return lambda record: False


def _fillers(
    tokenizer: PreTrainedTokenizerBase,
    example: Example,
    records: list[_Record],
    others: Sequence[Example],
    is_needed: Callable[[str], bool],
) -> Iterator[list[_Record]]:
    """Records that may go beside the evidence, in the order in which to take them: the example's own, then others'."""
    own = [record for record in records if not is_needed(record.text)]
    draw = random.Random(example.prompt_end)
    if example.set == "code_stdlib":
        own.reverse()  # the nearest lines matter most
    elif example.set != "summ_rfc":
        draw.shuffle(own)
    yield own
    for count, other in enumerate(member for member in others if member != example):
        texts = [text for text in split(tokenizer, other).records if not is_needed(text)]
        if example.set == "code_stdlib":  # another file above this one
            first = -(count + 1) * len(texts)
            yield [_Record(first + line, texts[line]) for line in reversed(range(len(texts)))]
        else:
            yield [_Record(draw.uniform(0, len(records)), text) for text in texts]
