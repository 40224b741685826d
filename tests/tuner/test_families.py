"""Every supported family routes, trains, saves and loads; every refused family says why."""

from __future__ import annotations

import pytest
import torch
from families_zoo import REFUSED, SMALL, SUPPORTED, build, perturb_routers
from peft import PeftModel, get_peft_model
from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration

from elastic_peft import ElasticConfig, RoutingTape, calibrate_standardization, forced_routing, last_routing
from elastic_peft.layer import ElasticLayer


SINK, WINDOW, LENGTH = 2, 8, 40


def config(**overrides):
    return ElasticConfig(sink_size=SINK, window_size=WINDOW, pool_size=5, task_type="CAUSAL_LM", **overrides)


def token_ids(seed, rows=2):
    return torch.randint(3, 96, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def routers(model):
    return [module for module in model.modules() if isinstance(module, ElasticLayer)]


@pytest.fixture(scope="module", params=list(SUPPORTED))
def family(request):
    """(model_type, base logits on one batch, the routed model with perturbed, calibrated routers)."""
    overrides, layers = SUPPORTED[request.param]
    base = build(request.param, **overrides)
    with torch.no_grad():
        expected = base(token_ids(0)).logits
    model = get_peft_model(base, config())
    perturb_routers(model)
    calibrate_standardization(model, [{"input_ids": token_ids(seed, rows=4)} for seed in range(3)])
    return request.param, layers, expected, model


@torch.no_grad()
def test_all_heads_full_is_the_base_model_to_the_last_bit(family):
    _, _, expected, model = family
    with forced_routing(model, "retrieval"):
        assert torch.equal(model(token_ids(0)).logits, expected)
    assert last_routing(model).msr.tolist() == [0, 0]


@torch.no_grad()
def test_all_heads_sparse_differs_beyond_sink_and_window_only(family):
    model_type, _, expected, model = family
    with forced_routing(model, "sparse"):
        logits = model(token_ids(0)).logits
    record = last_routing(model)
    assert LENGTH > SINK + WINDOW
    assert record.implementation == "reference"
    assert record.msr.tolist() == [1, 1]
    same = SINK + WINDOW
    # XAttention apart, a prefix within sink and window is computed alike; MoE routing may still round differently.
    torch.testing.assert_close(logits[:, :same], expected[:, :same], rtol=1e-3, atol=1e-3)
    assert (logits[:, same:] - expected[:, same:]).abs().max() > 1e-3, model_type


@torch.no_grad()
def test_routed_layers_are_the_full_attention_layers(family):
    _, layers, _, model = family
    model(token_ids(0))
    assert last_routing(model).layers == layers


@torch.no_grad()
def test_routing_depends_on_the_input_and_both_modes_occur(family):
    _, _, _, model = family
    model(torch.cat([token_ids(seed) for seed in range(8)]))
    decisions = last_routing(model).decisions
    assert decisions.any()
    assert not decisions.all()
    assert (decisions != decisions[:1]).any()


def test_gradients_reach_every_router_and_nothing_else(family):
    _, _, _, model = family
    model.train()
    try:
        tape = RoutingTape(temperature=1.0, seeds=[1, 2])
        ids = token_ids(0)
        loss = model(ids, labels=ids, elastic_tape=tape).loss
        assert sorted(tape.gates) == last_routing(model).layers
        (loss + tape.msr().mean()).backward()
        for name, parameter in model.named_parameters():
            if ".self_attn.router." in name:
                assert parameter.grad is not None, name
                assert parameter.grad.abs().sum() > 0, name
            else:
                assert parameter.grad is None, name
    finally:
        model.zero_grad()
        model.eval()


@torch.no_grad()
def test_save_and_load_is_bit_exact(family, tmp_path):
    model_type, _, _, model = family
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build(model_type, **SUPPORTED[model_type][0]), tmp_path)
    ids = token_ids(5)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    saved, reloaded = last_routing(model), last_routing(loaded)
    assert torch.equal(saved.decisions, reloaded.decisions)
    assert torch.equal(saved.logits, reloaded.logits)


@torch.no_grad()
def test_disabled_adapter_is_the_base_model_to_the_last_bit(family):
    _, _, expected, model = family
    with model.disable_adapter():
        assert torch.equal(model(token_ids(0)).logits, expected)


@torch.no_grad()
def test_cached_generation_equals_recomputing_every_step(family):
    _, _, _, model = family
    ids = token_ids(3)
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 6,
        "min_new_tokens": 6,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    cached = model.generate(input_ids=ids, **options)
    decisions = last_routing(model).decisions
    recomputed = model.generate(input_ids=ids, use_cache=False, **options)
    assert torch.equal(last_routing(model).decisions, decisions)
    for step, (left, right) in enumerate(zip(cached.logits, recomputed.logits)):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-3, msg=lambda m, s=step: f"step {s}: {m}")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_family_gives_the_reason_and_is_left_as_it_was(name):
    model_type, overrides, reason = REFUSED[name]
    base = build(model_type, **overrides)
    ids = token_ids(0)
    with torch.no_grad():
        before = base(ids).logits
    with pytest.raises(ValueError, match=reason):
        get_peft_model(base, config())
    assert not routers(base)
    with torch.no_grad():
        assert torch.equal(base(ids).logits, before)


def test_an_encoder_decoder_is_refused():
    sides = {side: {**SMALL, "layer_types": ["full_attention"] * 2} for side in ("encoder", "decoder")}
    base = T5GemmaForConditionalGeneration(T5GemmaConfig(**sides))
    with pytest.raises(ValueError, match="`model` must be a decoder alone, got t5gemma: an encoder-decoder"):
        get_peft_model(base, config())


@pytest.mark.parametrize("mode_pair", ["FA-XA", "XA-SSA"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "phi3", "gemma2"])
@torch.no_grad()
def test_xattention_pairs_run_and_differ(model_type, mode_pair):
    base = build(model_type, **SUPPORTED[model_type][0])
    ids = token_ids(0)
    expected = base(ids).logits
    model = get_peft_model(base, config(mode_pair=mode_pair, xattn_block_size=4, xattn_stride=2, xattn_threshold=0.5))
    perturb_routers(model)
    logits = model(ids).logits
    record = last_routing(model)
    assert record.implementation == "reference"
    assert (logits - expected).abs().max() > 1e-4
    assert (record.esr > 0).any()
    with forced_routing(model, "retrieval"):
        retrieval = model(ids).logits
    assert torch.equal(retrieval, expected) == (mode_pair == "FA-XA")
