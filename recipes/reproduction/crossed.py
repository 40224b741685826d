"""Other tasks over the sets' documents, so that the text of a prompt does not give its task away.

In the seven sets every document comes with one task: who sees a list of packages knows that a question follows. Here
documents are also asked about other things, or continued.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from reproduction.examples import CONTINUED, QUESTION, Example
from reproduction.lengths import ASSISTANT, USER, Document, split
from transformers import PreTrainedTokenizerBase


OPENINGS = (
    "Here is a text.",
    "Read the following.",
    "Below is some material.",
    "Use what follows.",
    "I paste a document.",
    "The following is given.",
)
#: Last lines of prompts that ask.
ASKING = (
    "{}",
    "Question: {}",
    "Now answer: {}",
    "Answer from the text above. {}",
    "{} Answer briefly.",
    "Tell me: {}",
)
#: Lines that ask to continue, before or after the text.
CONTINUING = (
    "Continue the text.",
    "Write what comes next.",
    "Go on from here.",
    "Add the next lines.",
    "Please carry on where this stops.",
    "What would follow? Write it.",
)
FIELDS = {
    "Version": ("What is the version of {}?", "Which version of {} is there?"),
    "Section": ("In which section is {}?", "Which section does {} belong to?"),
    "Homepage": ("What is the homepage of {}?", "Where on the web is {}?"),
}
QUOTED_WORDS, ANSWERED_WORDS = 6, 8
#: Characters at a document's end that are left for its continuation, more than 32 tokens.
CONTINUED_CHARACTERS = 300


class _Draft(NamedTuple):
    """A prompt and its answer as text, and the example that they replace."""

    example: Example
    prompt: str
    answer: str


def crossed(
    tokenizer: PreTrainedTokenizerBase, examples: dict[str, list[Example]], seed: int
) -> dict[str, list[Example]]:
    """Each example as it is, and with another task: every second document asked about, the others continued.

    Args:
        tokenizer: of the examples.
        examples: by set.
        seed: of the questions and words.

    Returns:
        Examples by the set of the document; those of another task have a set of `reproduction.examples.CROSSED`.
    """
    draw = random.Random(seed)
    return {
        name: [
            *members,
            *questions(tokenizer, members[::2], draw),
            *continuations(tokenizer, members[1::2], draw),
        ]
        for name, members in examples.items()
    }


def questions(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], draw: random.Random) -> list[Example]:
    """Examples of the task `single_qa`, each about something that a given example's document states.

    Args:
        tokenizer: of the examples.
        examples: of the seven sets; those whose document states nothing to ask about are left out.
        draw: chooses question and words.
    """
    drafts = []
    for example in examples:
        document = split(tokenizer, example)
        pairs = list(_QUESTIONS[example.set](document))
        if pairs:
            question, answer = draw.choice(pairs)
            text = document.separator.join(document.records)
            closing = draw.choice(ASKING).format(question)
            prompt = _system(document) + f"{draw.choice(OPENINGS)}\n\n{text}\n\n{closing}{ASSISTANT}"
            drafts.append(_Draft(replace(example, set=QUESTION[example.set]), prompt, f"{answer}<|im_end|>"))
    return _encode(tokenizer, drafts)


def continuations(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], draw: random.Random
) -> list[Example]:
    """Examples of the task `continuation`, each a given example's document and how it goes on; code does so anyway.

    Args:
        tokenizer: of the examples.
        examples: of the seven sets.
        draw: chooses the words.
    """
    drafts = []
    for example in examples:
        if example.set in CONTINUED:
            document = split(tokenizer, example)
            text = document.separator.join(document.records)
            text, answer = text[:-CONTINUED_CHARACTERS], text[-CONTINUED_CHARACTERS:]
            words = draw.choice(CONTINUING)
            forms = (
                f"{draw.choice(OPENINGS)}\n\n{text}\n\n{words}{ASSISTANT}",
                f"{words}\n\n{text}{ASSISTANT}",
                f"{words}{ASSISTANT}{text}",  # as code is
            )
            prompt = _system(document) + draw.choice(forms)
            drafts.append(_Draft(replace(example, set=CONTINUED[example.set]), prompt, answer))
    return _encode(tokenizer, drafts)


def _system(document: Document) -> str:
    """What stands before the user's words."""
    return document.head[: document.head.index(USER) + len(USER)]


def _encode(tokenizer: PreTrainedTokenizerBase, drafts: Sequence[_Draft]) -> list[Example]:
    """The drafts as tokens; all at once, so that the tokenizer may use every core."""
    if not drafts:
        return []
    prompts = tokenizer([draft.prompt for draft in drafts], add_special_tokens=False).input_ids
    answers = tokenizer([draft.answer for draft in drafts], add_special_tokens=False).input_ids
    return [
        replace(draft.example, ids=(*prompt, *answer), prompt_end=len(prompt))
        for draft, prompt, answer in zip(drafts, prompts, answers)
    ]


def _terms(document: Document) -> Iterator[tuple[str, str]]:
    for record in document.records:
        term, colon, explanation = record.partition(": ")
        if colon:
            words = " ".join(explanation.split()[:ANSWERED_WORDS])
            yield f'Which term is explained with the words "{words}"?', term


def _fields(document: Document) -> Iterator[tuple[str, str]]:
    for record in document.records:
        fields = dict(line.split(": ", 1) for line in record.split("\n") if ": " in line)
        for field, forms in FIELDS.items():
            if field in fields and "Package" in fields:
                yield from ((form.format(fields["Package"]), fields[field]) for form in forms)


def _next_words(document: Document) -> Iterator[tuple[str, str]]:
    words = document.separator.join(document.records).split()
    for first in range(0, len(words) - QUOTED_WORDS - ANSWERED_WORDS, QUOTED_WORDS):
        quoted, after = words[first : first + QUOTED_WORDS], words[first + QUOTED_WORDS :][:ANSWERED_WORDS]
        yield f'Which words follow "{" ".join(quoted)}"?', " ".join(after)


def _facts(document: Document) -> Iterator[tuple[str, str]]:
    for record in document.records:
        if fact := re.match(r"\* (.+?) (means:|is a kind of) (.+)$", record):
            word, verb, answer = fact.groups()
            yield f"What does {word} mean?" if verb == "means:" else f"What is {word} a kind of?", answer


def _parameters(document: Document) -> Iterator[tuple[str, str]]:
    for line in document.records:
        if function := re.match(r"\s*def (\w+)\((.+)\):", line):
            yield f"What are the parameters of {function[1]}?", function[2]


def _labels(document: Document) -> Iterator[tuple[str, str]]:
    for record in document.records:
        if label := re.match(r"Word: (.+?)(?: \(.*)?\nClass: (.+)$", record, re.DOTALL):
            yield f'Which class was given to "{label[1]}"?', label[2]


_QUESTIONS: dict[str, Callable[[Document], Iterator[tuple[str, str]]]] = {
    "sqa_foldoc": _terms,
    "sqa_pkg": _fields,
    "niah_single": _next_words,
    "mhop_wordnet": _facts,
    "summ_rfc": _next_words,
    "code_stdlib": _parameters,
    "icl_wordnet": _labels,
}
