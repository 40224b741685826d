"""Ragged storage: how many slots an entry needs, where tokens go, and a prompt moved into it."""

import pytest
import torch
from numerics import assert_equal_in_float64, make_qkv

from elastic_kernels.routed_decode import RaggedRows, routed_decode
from elastic_kernels.routed_decode.storage import count_slots, next_slots, pack_prompt


GATE = torch.tensor([[0, 1], [1, 0]])
START = torch.tensor([0, 4])
SINK, WINDOW = 3, 20


def write(flats, rows, tensors):
    """Writes tokens `[B, H, n, D]` behind those that the rows hold; the rows with these tokens."""
    count = tensors[0].shape[2]
    slots = next_slots(rows, GATE, count, sink_size=SINK).flatten()
    for flat, new in zip(flats, tensors):
        flat.index_copy_(0, slots, new.flatten(0, 2))
    return RaggedRows(rows.offsets, rows.lengths + count, rows.ring_size)


def assert_decodes_as_plain(query, flats, rows, key, value):
    sizes = {"sink_size": SINK, "window_size": WINDOW, "implementation": "reference"}
    ragged = routed_decode(query, *flats, GATE, **sizes, storage=rows)
    assert_equal_in_float64(ragged, routed_decode(query, key, value, GATE, **sizes, start=START))


def test_streaming_entries_need_a_sink_and_a_ring():
    counts = count_slots(GATE, torch.tensor([50, 8]), room=4, sink_size=3, ring_size=10)
    assert counts.tolist() == [[54, 13], [12, 12]]


def test_new_tokens_take_the_place_of_the_oldest():
    rows = RaggedRows(torch.tensor([[0, 100]]), torch.tensor([22]), ring_size=10)
    slots = next_slots(rows, torch.tensor([[0, 1]]), 3, sink_size=3)
    assert slots.tolist() == [[[22, 23, 24], [112, 103, 104]]]


@pytest.mark.parametrize("tokens", [5, 17, 18, 61], ids=lambda n: f"{n}-tokens")
def test_a_packed_prompt_lies_where_its_tokens_would_have_been_written(tokens):
    _, key, value = make_qkv(batch=2, length=tokens)
    flat_key, flat_value, rows = pack_prompt(key, value, GATE, room=6, sink_size=SINK, ring_size=10, start=START)
    assert rows.lengths.tolist() == [tokens, tokens - 4]
    for b, length in enumerate(rows.lengths.tolist()):
        for p in range(length):
            before = RaggedRows(rows.offsets, torch.full((2,), p), rows.ring_size)
            slots = next_slots(before, GATE, 1, sink_size=SINK)[b, :, 0]
            for h in range(2):
                if GATE[b, h] == 0 or p < SINK or p >= length - 10:
                    assert flat_key[slots[h]].equal(key[b, h, START[b] + p]), f"key of row {b}, head {h}, token {p}"
                    assert flat_value[slots[h]].equal(value[b, h, START[b] + p]), f"value, row {b}, head {h}, {p}"


def test_packing_allocates_no_more_than_the_entries_need():
    _, key, value = make_qkv(batch=2, length=61)
    flat_key, flat_value, rows = pack_prompt(key, value, GATE, room=6, sink_size=SINK, ring_size=10, start=START)
    assert rows.offsets.tolist() == [[0, 67], [80, 93]]
    assert flat_key.shape == flat_value.shape == (93 + 63, 16)


def test_a_known_total_changes_nothing():
    _, key, value = make_qkv(batch=2, length=61)
    sizes = {"room": 6, "sink_size": SINK, "ring_size": 10, "start": START}
    known, found = (pack_prompt(key, value, GATE, **sizes, **total) for total in ({"total": 156}, {}))
    assert known[0].equal(found[0])
    assert known[1].equal(found[1])


@pytest.mark.parametrize("prompt", [12, 57], ids=["ring-not-full", "ring-wrapped"])
def test_a_packed_prompt_and_new_tokens_decode_as_the_plain_cache(prompt):
    query, key, value = make_qkv(batch=2, query_length=4, length=prompt + 4)
    *flats, rows = pack_prompt(
        key[:, :, :prompt], value[:, :, :prompt], GATE, room=4, sink_size=SINK, ring_size=WINDOW + 7, start=START
    )
    rows = write(flats, rows, [x[:, :, prompt:] for x in (key, value)])
    assert_decodes_as_plain(query, flats, rows, key, value)


def test_rejected_tokens_leave_the_window_whole():
    query, key, value = make_qkv(batch=2, query_length=8, length=69)
    *flats, rows = pack_prompt(
        key[:, :, :60], value[:, :, :60], GATE, room=16, sink_size=SINK, ring_size=WINDOW + 7, start=START
    )
    proposed = [torch.cat([x[:, :, 60:61], torch.full_like(x[:, :, :7], 1e3)], 2) for x in (key, value)]
    rows = write(flats, rows, proposed)
    accepted = RaggedRows(rows.offsets, rows.lengths - 7, rows.ring_size)
    rows = write(flats, accepted, [x[:, :, 61:] for x in (key, value)])
    assert_decodes_as_plain(query, flats, rows, key, value)
