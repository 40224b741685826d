"""Rows of generation: the dense side decodes what transformers' own cache decodes, and the largest batch is found."""

import generate
import pytest
import torch
from transformers import Cache, DynamicCache


@torch.no_grad()
def decode(model, ids, cache, *, copies=1, steps=3):
    outputs = [model(ids, past_key_values=cache).logits[:, -1:]]
    cache.batch_repeat_interleave(copies)
    token = ids[:, :1].repeat_interleave(copies, 0)
    return outputs + [model(token, past_key_values=cache).logits for _ in range(steps)]


@pytest.mark.parametrize("copies", [1, 3])
def test_a_preallocated_cache_decodes_as_a_dynamic_one(make_routed, inputs, copies):
    model = make_routed()
    with model.disable_adapter():
        caches = [Cache(layer_class_to_replicate=generate.PreallocatedLayer), DynamicCache(config=model.config)]
        results = [decode(model, inputs["input_ids"], cache, copies=copies) for cache in caches]
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected)


def test_a_step_has_room_for_all_tokens():
    assert 1 + generate.EAGER_STEPS + 2 + generate.ROUNDS * (1 + generate.REPLAYS) <= generate.NEW_TOKENS


class Layer:
    gate = [True]


class Sequences:
    """A cache that counts the sequences of all caches against `room`."""

    def __init__(self, owner):
        self.owner, self.layers = owner, [Layer()]
        self.batch_repeat_interleave(1)

    def batch_repeat_interleave(self, count):
        held = sum(len(cache.layers[0].gate) for cache in self.owner.caches if cache is not self)
        if held + count > self.owner.room:
            raise torch.OutOfMemoryError
        self.layers[0].gate = [True] * count
        self.owner.caches = [cache for cache in self.owner.caches if cache is not self] + [self]


class Owner:
    def __init__(self, room):
        self.room, self.caches = room, []

    def prefill(self, ids):
        return Sequences(self)


@pytest.mark.parametrize("room", [1, 2, 5, 6, 9], ids="fits {}".format)
def test_the_largest_batch_is_what_fits(monkeypatch, room):
    owner = Owner(room)
    monkeypatch.setattr(generate, "release_memory", lambda: owner.caches.clear())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 60))
    assert generate.largest_batch(owner, None, held=10, peak=10) == room
