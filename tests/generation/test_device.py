"""Generation on the fused kernels: what it computes, what it holds, and that decoding never waits for the device."""

import copy
from functools import partial

import pytest
import torch
from families_zoo import build
from generation.tiny import assert_same_logits, generate, left_padded, logits_of, routed
from peft import get_peft_model
from transformers import DynamicCache, StaticCache

from elastic_kernels.routed_decode import routed_decode
from elastic_peft import ElasticConfig, forced_routing, last_routing, operators
from elastic_peft.ragged_store import RaggedStore


def test_interpreted_kernels_decode_what_the_reference_decodes(monkeypatch):
    model = routed()
    ids, mask = left_padded([20, 11])
    outputs = []
    for implementation in ("reference", "triton"):
        decode = partial(routed_decode, implementation=implementation)
        monkeypatch.setattr(operators, "routed_decode", decode)
        options = {"max_new_tokens": 2, "min_new_tokens": 2}
        outputs.append(generate(model, input_ids=ids, attention_mask=mask, **options))
    for row in range(len(ids)):
        assert_same_logits(*(logits_of(output, row) for output in outputs))


LENGTH = 32768
STATIC = partial(StaticCache, max_cache_len=LENGTH + 400)
QUARTER_FULL = torch.tensor([[True, True, False, True]] * 2)


@pytest.fixture(scope="module")
def big_model():
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2 * LENGTH}
    base = build("llama", **sizes).to("cuda", torch.bfloat16)
    base.set_attn_implementation("sdpa")
    return get_peft_model(base, ElasticConfig(task_type="CAUSAL_LM"))


@torch.no_grad()
def filled_cache(model, decisions, make_cache=DynamicCache):
    cache = make_cache(config=model.config)
    ids = torch.randint(3, 96, (1, LENGTH), generator=torch.Generator().manual_seed(0)).cuda()
    with forced_routing(model, decisions):
        model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


@pytest.mark.gpu
def test_freed_memory_returns_to_the_allocator(big_model):
    filled_cache(big_model, QUARTER_FULL)  # what the libraries allocate once does not count
    held = []
    for decisions in (QUARTER_FULL, "retrieval"):
        before = torch.cuda.memory_allocated()
        cache = filled_cache(big_model, decisions)
        held.append(torch.cuda.memory_allocated() - before)
        del cache
    dense = int(last_routing(big_model).kv_bytes_dense.sum())
    assert held[1] >= dense
    assert held[0] <= 0.33 * dense


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("make_cache", "count"),
    # transformers itself waits before it masks several tokens that continue a static cache.
    [(DynamicCache, 1), (DynamicCache, 8), (DynamicCache, 9), (STATIC, 1)],
    ids=["dynamic-1", "dynamic-8", "dynamic-9", "static-1"],
)
@torch.no_grad()
def test_decoding_does_not_wait_for_the_device(big_model, make_cache, count):
    cache = filled_cache(big_model, QUARTER_FULL, make_cache)
    ids = torch.full((1, count), 5, device="cuda")
    big_model(ids, past_key_values=cache)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(300 // count):  # more than there is room for at first
            big_model(ids, past_key_values=cache)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.gpu
@torch.no_grad()
def test_a_models_step_is_captured_once_and_replayed(big_model):
    cache = filled_cache(big_model, QUARTER_FULL)
    eager = copy.deepcopy(cache)
    ids, position = torch.full((1, 1), 5, device="cuda"), torch.full((1, 1), LENGTH, device="cuda")
    big_model(ids, position_ids=position, past_key_values=copy.deepcopy(cache))  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = big_model(ids, position_ids=position, past_key_values=cache).logits
    for step in range(20):
        ids.fill_(3 + step)
        position.fill_(LENGTH + step)
        graph.replay()
        expected = big_model(ids, position_ids=position, past_key_values=eager).logits
        torch.testing.assert_close(logits, expected, msg=lambda text, step=step: f"step {step}: {text}")


@pytest.mark.gpu
def test_a_step_is_captured_once_and_replayed():
    generator = torch.Generator("cuda").manual_seed(0)
    gate = QUARTER_FULL.cuda()
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16, generator=generator)
    key, value = draw(2, 4, 5000, 64), draw(2, 4, 5000, 64)
    store = RaggedStore(key, value, gate, None, [0, 0], sink_size=128, window_size=2048)
    eager = copy.deepcopy(store)
    query, key, value = draw(2, 8, 1, 64), draw(2, 4, 1, 64), draw(2, 4, 1, 64)
    scores = {"softcap": None, "sinks": None, "scale": None}

    def step(store):
        store.append(key, value)
        return store.attend(query, **scores)

    step(copy.deepcopy(store))  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step(store)
    for index in range(100):
        for tensor in (query, key, value):
            tensor.copy_(draw(tensor.shape))
        graph.replay()
        assert torch.equal(output, step(eager)), f"step {index}"
