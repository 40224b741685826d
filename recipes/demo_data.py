"""The demo's examples: five tasks over the standard library's own text, answers determined by the prompt."""

import random
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache

from demo_corpus import Definition, Module, standard_library
from transformers import PreTrainedTokenizerBase


TASKS = ("single_qa", "multihop_qa", "summarization", "code", "in_context_learning")
# One module in five is kept for evaluation: no file serves both splits.
EVALUATION_EVERY = 5
CODE_ANSWER_TOKENS = 48

PHRASINGS = {
    "single_qa": (
        "This is a glossary of Python names.\n\n{context}\n\nWhat does the glossary say about `{query}`?",
        "Read these descriptions.\n\n{context}\n\nRepeat the description of `{query}`.",
        "Notes from a manual:\n\n{context}\n\nQuestion: how is `{query}` described? Answer in the same words.",
    ),
    "multihop_qa": (
        "These are facts about Python names.\n\n{context}\n\nHow is the one that defines `{query}` described?",
        "Read these lines.\n\n{context}\n\nFind what defines `{query}` and repeat the description of what you found.",
        "Notes on some source code:\n\n{context}\n\nQuestion: `{query}` is defined by something. What is that thing?",
    ),
    "summarization": (
        "This is a piece of Python source.\n\n{context}\n\nSay in one sentence what it is for.",
        "Read this code.\n\n{context}\n\nWrite the first sentence of its documentation.",
        "Source code without its documentation:\n\n{context}\n\nSummarize it in one sentence.",
    ),
    "code": (
        "This is the beginning of a Python file.\n\n{context}\n\nWrite the next lines.",
        "Continue this source code.\n\n{context}\n\nOnly write what follows.",
        "A Python file breaks off here:\n\n{context}\n\nComplete it.",
    ),
    "in_context_learning": (
        "Every line gives a name and its label.\n\n{context}\n\nWhat is the label of `{query}`?",
        "Learn from these examples.\n\n{context}\n\nNow label `{query}`.",
        "Labelled names:\n\n{context}\n\nGive the label that belongs to `{query}`.",
    ),
}


class Split:
    """The text that one split may use: its own modules, less what the other split also says."""

    def __init__(self, evaluation: bool, modules: Sequence[Module] | None = None) -> None:
        modules = standard_library() if modules is None else modules
        held_out = [module for index, module in enumerate(modules) if index % EVALUATION_EVERY == 0]
        training = [module for index, module in enumerate(modules) if index % EVALUATION_EVERY]
        self.modules = held_out if evaluation else training
        others = training if evaluation else []
        self._known = {text for d in _definitions(others) for text in (d.qualified_name, d.summary)} - {""}

    @cached_property
    def definitions(self) -> list[Definition]:
        """Every definition whose name and summary the other split does not hold, one per name."""
        unique = {d.qualified_name: d for d in _definitions(self.modules)}
        return [d for d in unique.values() if d.qualified_name not in self._known and d.summary not in self._known]

    @cached_property
    def described(self) -> list[Definition]:
        """The definitions that have a summary, one per summary."""
        return list({d.summary: d for d in self.definitions if d.summary}.values())

    @cached_property
    def members(self) -> list[tuple[Definition, list[str]]]:
        """Described modules and classes, one per name, each with the names that it defines."""
        children: dict[str, list[str]] = {}
        for definition in self.definitions:
            children.setdefault(definition.parent, []).append(definition.name)
        owners = {d.name: d for d in self.described if d.kind in ("module", "class") and d.name in children}
        return [(owner, children[name]) for name, owner in owners.items()]


def _definitions(modules: Sequence[Module]) -> list[Definition]:
    return [definition for module in modules for definition in module.definitions]


class ExampleBuilder:
    """Writes examples of at most `length` tokens, chat template and answer included.

    Args:
        tokenizer: has a chat template.
        split: the text to draw from.
        length: tokens of an example at most.
        sink_size: tokens at the start that a streaming head always sees.
        window_size: tokens before a query that a streaming head sees. The evidence of a question lies between the two,
            so that streaming heads alone cannot answer.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, split: Split, length: int, sink_size: int, window_size: int
    ) -> None:
        self.tokenizer = tokenizer
        self.split = split
        self.length = length
        self.sink_size = sink_size
        self.window_size = window_size
        self._tokens = lru_cache(maxsize=None)(lambda text: len(tokenizer(text, add_special_tokens=False).input_ids))

    def example(self, task: str, rng: random.Random) -> dict:
        """One example.

        Args:
            task: one of `TASKS`.
            rng: decides everything that is drawn.

        Returns:
            `prompt` and `completion` (one chat message each) and `task`.

        Raises:
            ValueError: the task is unknown, or `length` leaves no room for the evidence.
        """
        if task not in TASKS:
            raise ValueError(f"`task` must be one of {', '.join(TASKS)}, got {task!r}.")
        write: Callable[[random.Random, str], tuple[str, str]] = getattr(self, f"_{task}")
        question, answer = write(rng, rng.choice(PHRASINGS[task]))
        return {
            "prompt": [{"role": "user", "content": question}],
            "completion": [{"role": "assistant", "content": answer}],
            "task": task,
        }

    def _single_qa(self, rng: random.Random, phrasing: str) -> tuple[str, str]:
        target, *others = rng.sample(self.split.described, len(self.split.described))
        lines = [f"`{d.qualified_name}`: {d.summary}" for d in (target, *others)]
        phrasing = phrasing.replace("{query}", target.qualified_name)
        return self._hide(rng, phrasing, lines[:1], lines[1:], target.summary), target.summary

    def _multihop_qa(self, rng: random.Random, phrasing: str) -> tuple[str, str]:
        pairs: dict[str, Definition] = {}
        for owner, children in rng.sample(self.split.members, len(self.split.members)):
            pairs.setdefault(rng.choice(children), owner)
        hops = [
            (f"`{child}` is defined by `{owner.name}`.", f"`{owner.name}`: {owner.summary}")
            for child, owner in pairs.items()
        ]
        query, target = next(iter(pairs.items()))
        phrasing = phrasing.replace("{query}", query)
        distractors = [line for hop in hops[1:] for line in hop]
        return self._hide(rng, phrasing, list(hops[0]), distractors, target.summary), target.summary

    def _summarization(self, rng: random.Random, phrasing: str) -> tuple[str, str]:
        units = [d for d in self.split.described if d.kind in ("module", "class")]
        for unit in rng.sample(units, len(units)):
            room = self._room(phrasing, unit.summary)
            lines, used = self._fit(unit.body.splitlines(), room)
            context = "\n".join(lines)
            if used >= room // 2 and unit.summary not in context:
                return phrasing.replace("{context}", context), unit.summary
        raise ValueError(f"`length` must not exceed every source file, got {self.length}.")

    def _code(self, rng: random.Random, phrasing: str) -> tuple[str, str]:
        for module in rng.sample(self.split.modules, len(self.split.modules)):
            lines = module.source.splitlines()
            cut = rng.randrange(len(lines) // 2, len(lines)) if lines else 0
            answer = "\n".join(self._fit(lines[cut:], CODE_ANSWER_TOKENS)[0]).strip()
            room = self._room(phrasing, answer)
            before, used = self._fit(lines[cut - 1 :: -1] if cut else [], room)
            if answer and used >= room // 2:
                return phrasing.replace("{context}", "\n".join(reversed(before))), answer
        raise ValueError(f"`length` must not exceed every source file, got {self.length}.")

    def _in_context_learning(self, rng: random.Random, phrasing: str) -> tuple[str, str]:
        kinds = ("class", "function", "method")
        pools = {kind: [d.qualified_name for d in self.split.definitions if d.kind == kind] for kind in kinds}
        drawn = [(name, kind) for kind in kinds for name in rng.sample(pools[kind], min(map(len, pools.values())))]
        (query, answer), *shots = rng.sample(drawn, len(drawn))
        phrasing = phrasing.replace("{query}", query)
        lines, _ = self._fit([f"{name} -> {kind}" for name, kind in shots], self._room(phrasing, answer))
        return phrasing.replace("{context}", "\n".join(lines)), answer

    def _room(self, phrasing: str, answer: str) -> int:
        """Tokens left for the context; the lines' counts add up to within a token or two of the joined text's."""
        chat = [
            {"role": "user", "content": phrasing.replace("{context}", "")},
            {"role": "assistant", "content": answer},
        ]
        return self.length - self._tokens(self.tokenizer.apply_chat_template(chat, tokenize=False)) - 4

    def _fit(self, lines: Sequence[str], room: int) -> tuple[list[str], int]:
        """The leading lines that fit into `room` tokens, and the tokens they take."""
        taken: list[str] = []
        used = 0
        for line in lines:
            tokens = self._tokens(line + "\n")
            if used + tokens > room:
                break
            taken.append(line)
            used += tokens
        return taken, used

    def _hide(
        self, rng: random.Random, phrasing: str, evidence: list[str], distractors: list[str], answer: str
    ) -> str:
        """Fills the prompt, with the evidence where neither sink nor window reaches from the answer's first token."""
        before, after = (self._tokens(part) for part in phrasing.split("{context}"))
        room = self._room(phrasing, answer) - sum(self._tokens(line + "\n") for line in evidence)
        lines, used = self._fit(distractors, room)
        rng.shuffle(lines)
        seen = 0
        slots = []
        for slot, line in enumerate([*lines, ""]):
            if before + seen >= self.sink_size and used - seen + after >= self.window_size:
                slots.append(slot)
            seen += self._tokens(line + "\n")
        if not slots:
            raise ValueError(
                f"`length` must leave room for evidence beyond {self.sink_size} sink and {self.window_size} window "
                f"tokens, got {self.length}."
            )
        for line, slot in zip(evidence, sorted(rng.choices(slots, k=len(evidence)), reverse=True)):
            lines.insert(slot, line)
        return phrasing.replace("{context}", "\n".join(lines))


def build_examples(builder: ExampleBuilder, count: int, seed: int) -> list[dict]:
    """The first `count` examples, tasks in turn, so that every five neighbours hold one of each.

    Args:
        builder: writes them.
        count: number of examples.
        seed: example i depends on it and on i alone.

    Returns:
        Rows with `prompt`, `completion` and `task`.
    """
    return [builder.example(TASKS[i % len(TASKS)], random.Random(f"{seed}-{i}")) for i in range(count)]
