"""Text for RULER's prompts that comes with Python: its language reference, and the names that its modules define."""

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from demo_corpus import Definition, Module, standard_library

from elastic_peft.evaluation.ruler_prompt import Question, Sources


WORD = re.compile(r"\b[a-z]{4,10}\b")
# Grammar, headings, listings and code start with a space or hold one of these.
NO_PROSE = re.compile(r"^\s|::=|\*\*\*|===|---", re.MULTILINE)
LISTED_NAMES = 12


def python_sources(haystack: Path | None = None) -> Sources:
    """What RULER's prompts are made of.

    Args:
        haystack: a text file, UTF-8, to hide needles in; `None` takes the language reference behind Python's `help`.

    Returns:
        The sources. They change with the version of Python.

    Raises:
        ModuleNotFoundError: this Python was installed without the reference.
    """
    modules = standard_library()
    uses = Counter(word for module in modules for word in set(WORD.findall(module.source)))
    return Sources(
        prose=language_reference() if haystack is None else haystack.read_text(encoding="utf-8"),
        words=sorted(word for word, count in uses.items() if count > 1),  # once: abbreviations, mostly
        single_hop=list(single_hop(modules)),
        multi_hop=list(multi_hop(modules)),
    )


def language_reference() -> str:
    """The paragraphs of Python's language reference that are prose, about 30,000 tokens."""
    from pydoc_data.topics import topics

    paragraphs = (paragraph for text in topics.values() for paragraph in text.split("\n\n"))
    prose = (p for p in paragraphs if p[:1].isupper() and p.rstrip().endswith(".") and not NO_PROSE.search(p))
    return " ".join(dict.fromkeys(" ".join(paragraph.split()) for paragraph in prose))


def single_hop(modules: Sequence[Module]) -> Iterator[Question]:
    """Which name a sentence describes: each document describes one."""
    for definition in _described(modules):
        name = definition.qualified_name
        document = f"`{name}` is a {definition.kind}. {definition.summary}"
        yield Question(f"Which name is described as: {definition.summary}", (name,), (document,))


def multi_hop(modules: Sequence[Module]) -> Iterator[Question]:
    """Which module or class defines the name that a sentence describes: one document describes it, one lists it."""
    members: dict[str, list[str]] = {}
    for definition in _definitions(modules):
        if definition.kind != "module":
            members.setdefault(definition.parent, []).append(definition.name)
    described = {d.name: d for d in _described(modules) if d.kind != "module"}
    parents: dict[str, set[str]] = {}
    for parent, names in members.items():
        for name in names:
            parents.setdefault(name, set()).add(parent)
    for definition in described.values():
        parent = definition.parent
        if parents[definition.name] != {parent}:
            continue  # another module or class defines the same name
        others = [name for name in members[parent] if name != definition.name]
        listed = random.Random(definition.qualified_name).sample(others, min(LISTED_NAMES, len(others)))
        listing = ", ".join(f"`{name}`" for name in sorted([*listed, definition.name]))
        yield Question(
            f"Where is the name defined that is described as: {definition.summary}",
            (parent,),
            (f"`{definition.name}` is a {definition.kind}. {definition.summary}", f"`{parent}` defines {listing}."),
        )


def _described(modules: Sequence[Module]) -> list[Definition]:
    """Definitions with a summary, one for each summary and each name."""
    by_summary = {d.summary: d for d in _definitions(modules) if d.summary}
    return list({d.qualified_name: d for d in by_summary.values()}.values())


def _definitions(modules: Sequence[Module]) -> list[Definition]:
    return [definition for module in modules for definition in module.definitions]
