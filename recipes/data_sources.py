"""The five sources of training data: where each lies, which columns it has, and how its rows become examples.

A source's `build` turns a block of consecutive rows into examples, so that what rows are joined from never reaches
beyond the block. Repositories, columns and tasks are the sources' own; the wording of the instructions is ours.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


Row = dict[str, Any]
Example = tuple[str, str, str]  # task, prompt, completion
# Branch where the Hub keeps a Parquet copy of repositories that are otherwise read by a script.
_PARQUET = "refs/convert/parquet"
# The instruction of those rows of ChatQA2 that are no questions.
_SUMMARY_REQUEST = "write an appropriate summary"


@dataclass(frozen=True)
class Lengths:
    """Which lengths are wanted, in tokens, and how text is measured.

    Args:
        count: text to its tokens.
        minimum: tokens of an example at least.
        maximum: tokens of an example at most.
    """

    count: Callable[[str], int]
    minimum: int
    maximum: int

    def draw(self, rng: random.Random) -> int:
        """Tokens to build an example of, uniform on a logarithmic scale between the bounds."""
        return round(self.minimum * (self.maximum / self.minimum) ** rng.random())


@dataclass(frozen=True)
class Source:
    """One data set.

    Args:
        columns: what `build` reads.
        build: a block's rows, the lengths wanted and a generator of random numbers to examples.
        share: of all tokens.
        load: arguments of `datasets.load_dataset`; `None` for what the Hub does not have.
        download: address of what the Hub does not have.
        nullable: columns that may be null; a row with a null in another makes no example.
    """

    columns: tuple[str, ...]
    build: Callable[[Sequence[Row], Lengths, random.Random], Iterator[Example]]
    share: float
    load: dict[str, Any] | None = None
    download: str | None = None
    nullable: tuple[str, ...] = ()


def _chatqa2(rows: Sequence[Row], lengths: Lengths, rng: random.Random) -> Iterator[Example]:
    """Documents with a question; `question` holds both, between the names of the two speakers."""
    for row in rows:
        prompt = row["question"].removeprefix("User:").rstrip().removesuffix("Assistant:").strip()
        answer = row["answer"] if isinstance(row["answer"], str) else row["answer"][0]
        yield ("summarization" if _SUMMARY_REQUEST in prompt else "single_qa", prompt, answer.strip())


def _musique(rows: Sequence[Row], lengths: Lengths, rng: random.Random) -> Iterator[Example]:
    """A question's own 20 paragraphs, among paragraphs of other questions until the example is long enough."""
    others = {paragraph["paragraph_text"]: paragraph for row in rows for paragraph in row["paragraphs"]}
    tokens = {text: lengths.count(_paragraph(paragraph)) for text, paragraph in others.items()}
    for row in rows:
        if not row["answerable"]:
            continue
        own = {paragraph["paragraph_text"]: paragraph for paragraph in row["paragraphs"]}
        room = lengths.draw(rng) - sum(tokens[text] for text in own)
        chosen = list(own.values())
        for text in rng.sample(list(others), len(others)):
            if text in own:
                continue
            room -= tokens[text]
            if room < 0:
                break
            chosen.append(others[text])
        rng.shuffle(chosen)
        context = "\n\n".join(map(_paragraph, chosen))
        prompt = f"Answer the question from the passages, in as few words as possible.\n\n{context}"
        yield ("multihop_qa", f"{prompt}\n\nQuestion: {row['question']}", row["answer"])


def _paragraph(paragraph: Row) -> str:
    return f"{paragraph['title']}\n{paragraph['paragraph_text']}"


def _colt(rows: Sequence[Row], lengths: Lengths, rng: random.Random) -> Iterator[Example]:
    """Code before and after a gap, with declarations and similar code of the same project.

    Every other row becomes an example of in-context learning: similar code of the project as the demonstrations, and
    the beginning of the file to continue in their manner.
    """
    for index, row in enumerate(rows):
        similar = "\n\n".join(f"{_file(part)}\n{part['code_block']}" for part in row["similar_functions"] or [])
        if index % 2:
            prompt = (
                f"Each of these pieces of code is an example of how this project is written.\n\n{similar}\n\n"
                f"Go on in the same way.\n\n{_file(row)}\n{row['prefix']}"
            )
            yield ("in_context_learning", prompt, row["middle"])
            continue
        others = row["cross_file_dependency"] or []
        declarations = "\n\n".join(f"{_file(part)}\n{part['abstraction']}" for part in others)
        prompt = (
            "Write the code that is missing from the last file.\n\n"
            f"Declarations in other files:\n\n{declarations}\n\nSimilar code in other files:\n\n{similar}\n\n"
            f"After the missing code:\n\n{row['suffix']}\n\nBefore it:\n\n{_file(row)}\n{row['prefix']}"
        )
        yield ("code", prompt, row["middle"])


def _file(row: Row) -> str:
    return f"File: {row['code_file_path']}"


def _govreport(rows: Sequence[Row], lengths: Lengths, rng: random.Random) -> Iterator[Example]:
    """One report with its summary."""
    for row in rows:
        yield ("summarization", f"Summarize this report.\n\n{row['report']}", row["summary"])


def _xsum(rows: Sequence[Row], lengths: Lengths, rng: random.Random) -> Iterator[Example]:
    """Several articles, joined until the example is long enough, with one sentence on each."""
    articles: list[Row] = []
    room = lengths.draw(rng)
    for row in rows:
        articles.append(row)
        room -= lengths.count(row["document"] + row["summary"])
        if room <= 0:
            text = "\n\n".join(f"Article {number}\n{a['document']}" for number, a in enumerate(articles, start=1))
            prompt = f"Summarize each of these news articles in one sentence, in their order.\n\n{text}"
            yield ("summarization", prompt, "\n".join(a["summary"] for a in articles))
            articles, room = [], lengths.draw(rng)


#: The sources by name. Shares: the same for each task, as the paper does not say; code is one half of CoLT.
SOURCES = {
    "chatqa2": Source(
        columns=("question", "answer"),
        build=_chatqa2,
        share=0.2,
        load={"path": "nvidia/ChatQA2-Long-SFT-data", "name": "long_sft"},
    ),
    "musique": Source(
        columns=("paragraphs", "question", "answer", "answerable"),
        build=_musique,
        share=0.2,
        load={"path": "dgslibisey/MuSiQue"},
    ),
    "colt": Source(
        columns=("prefix", "middle", "suffix", "code_file_path", "cross_file_dependency", "similar_functions"),
        build=_colt,
        share=0.4,
        download="https://zenodo.org/records/15019938",
        nullable=("cross_file_dependency", "similar_functions"),
    ),
    "govreport": Source(
        columns=("report", "summary"),
        build=_govreport,
        share=0.1,
        load={"path": "ccdv/govreport-summarization", "revision": _PARQUET, "data_files": "document/train/*.parquet"},
    ),
    "xsum": Source(
        columns=("document", "summary"),
        build=_xsum,
        share=0.1,
        load={"path": "EdinburghNLP/xsum", "revision": _PARQUET, "data_files": "default/train/*.parquet"},
    ),
}
