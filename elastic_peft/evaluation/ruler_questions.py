"""RULER's question answering: the texts that answer a question among those of other questions."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .ruler_prompt import Draft, Question, Sources


def single_hop(rng: random.Random, sources: Sources, length: int) -> Draft:
    """A question that one of the documents answers."""
    return _ask(rng, sources.single_hop, "single_hop")


def multi_hop(rng: random.Random, sources: Sources, length: int) -> Draft:
    """A question that takes several of the documents to answer."""
    return _ask(rng, sources.multi_hop, "multi_hop")


def _ask(rng: random.Random, questions: Sequence[Question], name: str) -> Draft:
    if not questions:
        raise ValueError(f"`{name}` must hold questions for this task, got none.")
    asked, *others = rng.sample(questions, len(questions))
    needed = set(asked.evidence)
    distractors = list(dict.fromkeys(text for other in others for text in other.evidence if text not in needed))
    depths = [rng.random() for _ in asked.evidence]

    def context(size: int) -> str:
        if size > len(distractors):
            raise ValueError(f"`{name}` must hold more questions for this length, got {len(questions)}.")
        documents = distractors[:size]
        for text, depth in zip(asked.evidence, depths):
            documents.insert(int(depth * (len(documents) + 1)), text)
        return "\n\n".join(f"Document {index}:\n{text}" for index, text in enumerate(documents, start=1))

    return Draft(
        instruction="Answer the question from these documents, with nothing but the answer.",
        context=context,
        question=f"Question: {asked.text}",
        answer_prefix="Answer:",
        references=asked.answers,
        largest=len(distractors),
    )
