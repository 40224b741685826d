"""The examples of the reproduction: seven sets of tokenised text, told apart by set and by phrasing.

The file holds `{split}/{set}/ids` `[N, S]` and `{split}/{set}/lens` `[N, 2]`, the tokens of the prompt and of prompt
and answer together, for the splits `train` and `eval`; tokens of SmolLM2, chat template applied.
"""

import random
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase


TASKS = {
    "sqa_foldoc": "single_qa",
    "sqa_pkg": "single_qa",
    "niah_single": "single_qa",
    "mhop_wordnet": "multihop_qa",
    "summ_rfc": "summarization",
    "code_stdlib": "code",
    "icl_wordnet": "in_context_learning",
}
#: Other tasks over the sets' documents, see `reproduction.crossed`.
QUESTION = {name: f"{name}-question" for name in TASKS}
CONTINUED = {name: f"{name}-continued" for name in TASKS if name != "code_stdlib"}
CROSSED = dict.fromkeys(QUESTION.values(), "single_qa") | dict.fromkeys(CONTINUED.values(), "continuation")
SENSITIVE = ("sqa_foldoc", "sqa_pkg", "niah_single", "mhop_wordnet")
ROBUST = ("summ_rfc", "code_stdlib", "icl_wordnet")
#: Which of a set's phrasings `choose_phrasing` takes: all, all but one, or that one.
PHRASINGS = ("all", "seen", "unseen")


@dataclass(frozen=True)
class Example:
    """One prompt with its answer, in tokens."""

    set: str
    ids: tuple[int, ...]
    prompt_end: int

    @property
    def task(self) -> str:
        """Its task, one of an adapter's `t_values`."""
        return TASKS[self.set] if self.set in TASKS else CROSSED[self.set]

    def cut(self, answer_tokens: int | None) -> "Example":
        """The example with at most so many tokens of its answer; `None`: all."""
        return self if answer_tokens is None else replace(self, ids=self.ids[: self.prompt_end + answer_tokens])


def load_examples(file: Path, split: str) -> dict[str, list[Example]]:
    """Every example of a split, by set.

    Args:
        file: as the module describes.
        split: `"train"` or `"eval"`.
    """
    examples = {}
    with np.load(file) as arrays:
        for name in TASKS:
            rows = zip(arrays[f"{split}/{name}/ids"], arrays[f"{split}/{name}/lens"].tolist())
            examples[name] = [Example(name, tuple(ids[:end].tolist()), prompt_end) for ids, (prompt_end, end) in rows]
    return examples


def user_text(tokenizer: PreTrainedTokenizerBase, example: Example) -> str:
    """What the user says in an example."""
    prompt = tokenizer.decode(example.ids[: example.prompt_end])
    return prompt.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]


def choose_phrasing(
    tokenizer: PreTrainedTokenizerBase, examples: dict[str, list[Example]], phrasing: str
) -> dict[str, list[Example]]:
    """The examples whose instructions are phrased in a seen way, or in the one that is kept unseen.

    An instruction opens a prompt and, in most sets, another closes it; the last of each in the alphabet is unseen.
    A seen example has neither of the two, an unseen one has both.

    Args:
        tokenizer: of the examples.
        examples: by set.
        phrasing: one of `PHRASINGS`.
    """
    if phrasing == "all":
        return examples
    chosen = {}
    for name, members in examples.items():
        words = [_instructions(tokenizer, example) for example in members]
        kept = []
        for position in (0, 1):
            found = sorted({pair[position] for pair in words})
            unseen = found[-1] if len(found) > 1 else None
            kept.append([unseen is None or (pair[position] == unseen) == (phrasing == "unseen") for pair in words])
        chosen[name] = [example for example, *keep in zip(members, *kept) if all(keep)]
    return chosen


def _instructions(tokenizer: PreTrainedTokenizerBase, example: Example) -> tuple[str, str]:
    """The first line of the prompt, and the first word of its last line: what follows it is the example's own."""
    lines = [line for line in user_text(tokenizer, example).split("\n") if line.strip()]
    return lines[0], lines[-1].split()[0]


def interleave(examples: dict[str, list[Example]], count: int, seed: int) -> list[Example]:
    """`count` examples, one of each set in turn, each set in an order of its own and again from its first.

    Args:
        examples: by set.
        count: number of examples.
        seed: of the orders.
    """
    shuffled = [random.Random(seed).sample(members, len(members)) for members in examples.values()]
    return list(islice((example for row in zip(*map(cycle, shuffled)) for example in row), count))
