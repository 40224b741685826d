"""Parts of a source: the examples of one block of its rows, each a file that is there whole or not at all."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from data_sources import SOURCES, Example, Lengths, Row
from datasets import IterableDataset, load_dataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase


BLOCK = 500  # rows
_LAST = "-last"
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_SCHEMA = pa.schema(
    [
        ("prompt", _MESSAGES),
        ("completion", _MESSAGES),
        ("task", pa.string()),
        ("source", pa.string()),
        ("tokens", pa.int64()),
    ]
)


class PartBuilder:
    """Writes the parts of one source.

    Args:
        name: of the source.
        tokenizer: has a chat template.
        minimum: tokens of an example at least.
        maximum: tokens of an example at most.
        template_options: further arguments of the chat template.
        seed: a part depends on it, on the source and on the part's number alone.
    """

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        minimum: int,
        maximum: int,
        template_options: dict[str, Any],
        seed: int,
    ) -> None:
        self.name = name
        self.source = SOURCES[name]
        self.tokenizer = tokenizer
        self.lengths = Lengths(lambda text: len(tokenizer(text, add_special_tokens=False).input_ids), minimum, maximum)
        self.template_options = template_options
        self.seed = seed

    def run(self, folder: Path, files: str | None, wanted: int) -> None:
        """Writes parts until their examples have enough tokens or the source ends.

        Args:
            folder: of the parts; those that are there are kept.
            files: pattern of local files to read instead of the Hub's.
            wanted: tokens.

        Raises:
            ValueError: the source cannot be read, lacks a column, or must be downloaded first.
        """
        folder.mkdir(parents=True, exist_ok=True)
        parts = sorted(folder.glob("*.parquet"))
        written = sum(sum(pq.read_table(part, columns=["tokens"])["tokens"].to_pylist()) for part in parts)
        is_exhausted = bool(parts) and parts[-1].stem.endswith(_LAST)
        with tqdm(total=wanted, initial=written, desc=self.name, unit=" tokens", unit_scale=True) as bar:
            if is_exhausted or written >= wanted:
                return
            rows = iter(self._stream(files).skip(len(parts) * BLOCK))
            for number in range(len(parts), 100_000):
                block = list(islice(rows, BLOCK))
                is_exhausted = len(block) < BLOCK
                examples = list(self.examples(block, number))
                _write(examples, folder / f"{number:05}{_LAST if is_exhausted else ''}.parquet")
                bar.update(sum(example["tokens"] for example in examples))
                if is_exhausted or bar.n >= wanted:
                    return

    def examples(self, block: Sequence[Row], number: int) -> Iterator[Row]:
        """The examples of one block that have a wanted length.

        Args:
            block: rows of the source.
            number: of the block.

        Raises:
            ValueError: a row lacks a column, or holds what the source does not.
        """
        for row in block:
            missing = [column for column in self.source.columns if column not in row]
            if missing:
                raise ValueError(
                    f"`{self.name}` must have the columns {', '.join(self.source.columns)}; got {', '.join(row)}, "
                    f"without {', '.join(missing)}."
                )
        for task, prompt, completion in self._build(block, number):
            if not completion.strip():
                continue
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            tokens = self._count(messages)
            if self.lengths.minimum <= tokens <= self.lengths.maximum:
                yield {
                    "prompt": messages[:1],
                    "completion": messages[1:],
                    "task": task,
                    "source": self.name,
                    "tokens": tokens,
                }

    def _build(self, block: Sequence[Row], number: int) -> list[Example]:
        """What the source makes of those rows of a block that have a value in each column that needs one."""
        needed = set(self.source.columns) - set(self.source.nullable)
        rows = [row for row in block if all(row[column] is not None for column in needed)]
        rng = random.Random(f"{self.seed}-{self.name}-{number}")
        try:
            return list(self.source.build(rows, self.lengths, rng))
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            first = number * BLOCK
            raise ValueError(
                f"`{self.name}` must have rows in the form of its data set; got, among rows {first} to "
                f"{first + len(block) - 1}, one that cannot be read: {error!r}."
            ) from error

    def _count(self, messages: list[dict[str, str]]) -> int:
        encoded: Any = self.tokenizer.apply_chat_template(messages, return_dict=True, **self.template_options)
        return len(encoded["input_ids"])

    def _stream(self, files: str | None) -> IterableDataset:
        if files is not None:
            kind = "parquet" if files.endswith(".parquet") else "json"
            try:
                return load_dataset(kind, data_files=files, split="train", streaming=True)
            except (FileNotFoundError, StopIteration) as error:
                raise ValueError(f"`files` must name files with rows for {self.name}, got {files!r}.") from error
        if self.source.load is None:
            raise ValueError(
                f"`files` must name the files of {self.name}, which the Hub does not have: download and unpack them "
                f"from {self.source.download}; got none."
            )
        return load_dataset(**self.source.load, split="train", streaming=True)


def _write(examples: list[Row], path: Path) -> None:
    partial = path.with_suffix(".partial")
    pq.write_table(pa.Table.from_pylist(examples, schema=_SCHEMA), partial)
    partial.rename(path)
