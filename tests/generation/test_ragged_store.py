"""The storage that frees streaming heads' keys and values: later tokens attend as if nothing had been freed."""

import copy

import pytest
import torch
from numerics import assert_equal_in_float64

from elastic_kernels.routed_attention.reference import routed_attention_reference
from elastic_peft import ElasticConfig
from elastic_peft.ragged_store import MAX_ROOM, SLACK, RaggedStore


SINK, WINDOW, HEAD_DIM = 3, 8, 4
GATE = torch.tensor([[True, False, True], [False, False, True], [True, True, True]])
PADDING = [0, 5, 11]


class Sequences:
    """Random tokens that go into a store and, whole, into the definition."""

    def __init__(self, length, padding=PADDING, gate=GATE, sink_size=SINK, window_size=WINDOW, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.start = torch.tensor(padding) if any(padding) else None
        self.gate = gate
        self.sizes = {"sink_size": sink_size, "window_size": window_size}
        self.key, self.value = (self.draw(gate.shape[1], length) for _ in range(2))
        config = ElasticConfig(**self.sizes)
        self.store = RaggedStore(self.key, self.value, gate, self.start, padding, config.sink_size, config.window_size)

    def draw(self, heads, count):
        shape = (len(self.gate), heads, count, HEAD_DIM)
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def step(self, count):
        """Writes `count` tokens and compares their attention with the definition's."""
        key, value = (self.draw(self.gate.shape[1], count) for _ in range(2))
        query = self.draw(2 * self.gate.shape[1], count)
        self.key, self.value = torch.cat([self.key, key], dim=2), torch.cat([self.value, value], dim=2)
        if self.store.takes(count):
            self.store.append(key, value)
            output = self.store.attend(query, softcap=None, sinks=None, scale=None)
        else:
            output, _ = self.attend(query, *self.store.extend(key, value))
        expected, _ = self.attend(query, self.key, self.value)
        assert_equal_in_float64(
            output, expected, what=f"attention of {count} tokens after {self.key.shape[2] - count}"
        )

    def attend(self, query, key, value):
        return routed_attention_reference(
            query, key, value, self.gate, mode_pair="FA-SSA", start=self.start, **self.sizes
        )

    def take_back(self, count):
        self.store.take_back(count)
        self.key, self.value = self.key[:, :, :-count], self.value[:, :, :-count]

    def select(self, rows):
        index = torch.tensor(rows)
        self.store.select(index)
        self.gate, self.key, self.value = self.gate[index], self.key[index], self.value[index]
        self.start = None if self.start is None else self.start[index]


@pytest.mark.parametrize(
    ("length", "steps"),
    [(12, 50), (SINK + WINDOW + SLACK - 1, 3), (SINK + WINDOW + SLACK, 3), (SINK + WINDOW + SLACK + 1, 3), (150, 45)],
)
def test_single_tokens(length, steps):
    sequences = Sequences(length)
    for _ in range(steps):
        sequences.step(1)


@pytest.mark.parametrize(
    "counts",
    [[8, 8, 8, 8, 8, 8], [9, 1, 9, 1], [33, 33, 1, 33], [34, 1], [100, 1, 7], [1, 300, 1]],
    ids=lambda counts: "-".join(map(str, counts)),
)
def test_several_tokens_at_once(counts):
    sequences = Sequences(60)
    for count in counts:
        sequences.step(count)


@pytest.mark.parametrize(
    "sizes",
    [{"sink_size": 0}, {"window_size": 1}, {"sink_size": 0, "window_size": 1}, {"window_size": 500}],
    ids=lambda sizes: "-".join(f"{name}-{value}" for name, value in sizes.items()),
)
def test_degenerate_sinks_and_windows(sizes):
    sequences = Sequences(60, **sizes)
    for count in [1, 5, 33, 40, 1]:
        sequences.step(count)


@pytest.mark.parametrize("gate", [GATE | True, GATE & False], ids=["all-sparse", "all-full"])
def test_heads_of_one_kind(gate):
    sequences = Sequences(60, gate=gate)
    for count in [1, 33, 40, 1]:
        sequences.step(count)


@pytest.mark.parametrize("length", [15, 60], ids=lambda n: f"prompt-{n}")
def test_a_rejected_draft_leaves_no_trace(length):
    sequences = Sequences(length)
    for drafted, rejected in [(9, 8), (33, 32), (1, 1), (5, 2), (33, 32), (33, 1), (40, 32), (20, 20)]:
        sequences.step(drafted)
        sequences.take_back(rejected)
    sequences.step(1)


def test_taking_back_twice_counts_from_the_newest_token_ever_written():
    sequences = Sequences(60)
    sequences.step(20)
    sequences.take_back(20)
    sequences.step(10)
    sequences.take_back(SLACK - 10)
    with pytest.raises(ValueError, match=f"got {SLACK + 1} tokens to remove"):
        sequences.store.take_back(1)
    sequences.step(33)


def test_the_longest_sequence_decides_what_can_be_taken_back():
    store = Sequences(60, padding=[0, 55, 58]).store
    with pytest.raises(ValueError, match=f"got {SLACK + 1} tokens to remove"):
        store.take_back(SLACK + 1)


def test_a_short_sequence_gives_back_any_number():
    sequences = Sequences(SINK + WINDOW + SLACK, padding=[0, 1, 2])
    sequences.take_back(SINK + WINDOW + SLACK - 3)
    sequences.step(20)


@pytest.mark.parametrize("rows", [[1, 1, 0], [2, 0], [0, 0, 1, 1, 2, 2], [2]], ids=str)
def test_selected_rows_go_on_as_their_own(rows):
    sequences = Sequences(60)
    sequences.step(7)
    sequences.select(rows)
    for count in [1, 33, 40, 1]:
        sequences.step(count)


def test_rows_selected_before_the_window_is_full_go_on_as_their_own():
    sequences = Sequences(20)
    sequences.select([2, 2, 1])
    for count in [1, 30, 30, 1]:
        sequences.step(count)


def test_a_copy_goes_its_own_way():
    sequences = Sequences(60)
    original = copy.deepcopy(sequences)
    sequences.step(9)
    original.step(1)
    sequences.step(1)


def test_only_what_later_tokens_attend_is_held():
    length, padding = 4000, [0, 1500, 3990]
    store = Sequences(length, padding=padding).store
    streaming = SINK + WINDOW + SLACK
    tokens = [length + MAX_ROOM - pad for pad in padding]
    expected = [sum(min(n, streaming) if sparse else n for sparse in row) for n, row in zip(tokens, GATE.tolist())]
    assert store.slots.tolist() == expected
    assert store.keys.shape == store.values.shape == (sum(expected), HEAD_DIM)


def test_full_rows_grow_in_steps():
    store = Sequences(4000, padding=[0, 0, 0]).store
    sizes = set()
    for _ in range(2 * MAX_ROOM):
        store.append(*torch.zeros(2, 3, 3, 1, HEAD_DIM, dtype=torch.float64))
        sizes.add(len(store.keys))
    assert len(sizes) == 2
    assert max(sizes) - min(sizes) == (~GATE).sum() * (MAX_ROOM + 1)
