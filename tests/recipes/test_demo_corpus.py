"""What is read off one source text."""

import pytest
from demo_corpus import parse_module


SOURCE = '''\
"""Reads and writes boxes of things. More about boxes.

A second paragraph.
"""

import os


class Box:
    """A box holds things until they are taken out.

    Rest.
    """

    def open(self):
        """open() -> None"""
        return os

    def _hidden(self):
        """Hidden things are not of interest here."""


def close(box):
    box.lid = 1
    return box
'''


@pytest.fixture(scope="module")
def definitions():
    return {definition.qualified_name: definition for definition in parse_module("pkg.boxes", SOURCE).definitions}


def test_public_definitions_are_found_with_their_kind(definitions):
    kinds = {name: definition.kind for name, definition in definitions.items()}
    assert kinds == {
        "pkg.boxes": "module",
        "pkg.boxes.Box": "class",
        "Box.open": "method",
        "pkg.boxes.close": "function",
    }


@pytest.mark.parametrize(
    ("name", "summary"),
    [
        pytest.param("pkg.boxes", "Reads and writes boxes of things.", id="first-sentence-of-paragraph"),
        pytest.param("pkg.boxes.Box", "A box holds things until they are taken out.", id="class"),
        pytest.param("Box.open", "", id="signature-is-no-sentence"),
        pytest.param("pkg.boxes.close", "", id="no-docstring"),
    ],
)
def test_summary(definitions, name, summary):
    assert definitions[name].summary == summary


def test_body_leaves_the_docstring_out(definitions):
    assert "holds things" not in definitions["pkg.boxes.Box"].body
    assert definitions["pkg.boxes.Box"].body.lstrip().startswith("def open(self):")
    assert definitions["pkg.boxes.close"].body == "    box.lid = 1\n    return box"
