"""Rows of decoding: the bytes that routing needs, and caches that take turns."""

import pytest
from decode import needed_bytes, take_turns
from inputs import HEAD_DIM


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1000, 8 * 1000), (131_072, 2 * 131_072 + 6 * 2176)],
    ids=["below-the-window", "128K"],
)
def test_decode_needs_whole_rows_of_full_heads_only(length, expected):
    assert needed_bytes(length, 3, 0.75) == 3 * expected * 2 * HEAD_DIM * 2


def test_caches_take_turns():
    run = take_turns(lambda query, key, value: key, None, [("a", "A"), ("b", "B")])
    assert [run() for _ in range(3)] == ["a", "b", "a"]
