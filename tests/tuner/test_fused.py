"""A routed model on the fused kernels, here under Triton's interpreter, gives what it gives on the reference."""

import pytest
import torch
from peft import get_peft_model
from transformers import StaticCache

from elastic_kernels.routed_attention.dispatch import choose_implementation
from elastic_peft import RoutingTape, forced_routing, last_routing, mode_pairs


DECISIONS = torch.tensor([[[True, False]] * 2, [[False, True]] * 2])


@pytest.fixture
def use(monkeypatch):
    """Makes prompts that the kernels take run on the named implementation."""

    def choose(name):
        monkeypatch.setattr(mode_pairs, "choose_implementation", lambda _, *args, **options: name)
        return name

    return choose


@torch.no_grad()
def run(model, **inputs):
    with forced_routing(model, DECISIONS):
        logits = model(**inputs).logits
    return logits[inputs["attention_mask"].bool()], last_routing(model).implementation


@pytest.mark.parametrize("cache", ["no cache", "dynamic", "static"])
@pytest.mark.parametrize("mode_pair", ["FA-SSA", "FA-XA", "XA-SSA"])
def test_fused_prompts_equal_the_reference(make_base, make_config, use, mode_pair, cache):
    sizes = {"xattn_block_size": 16, "xattn_stride": 4, "xattn_threshold": 0.5}
    model = get_peft_model(make_base(), make_config(mode_pair=mode_pair, **sizes))
    ids = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    results = {}
    for name in ("reference", "triton"):
        use(name)
        options = {"use_cache": cache != "no cache"}
        if cache == "static":
            options["past_key_values"] = StaticCache(config=model.config, max_cache_len=64)
        results[name], ran = run(model, input_ids=ids, attention_mask=mask, **options)
        assert ran == name
    torch.testing.assert_close(results["triton"], results["reference"], rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        assert (model(input_ids=ids, attention_mask=mask).logits[mask.bool()] - results["triton"]).abs().max() > 1e-3


def test_devices_without_kernels_run_the_reference(make_routed, inputs):
    model = make_routed()
    model(**inputs)
    assert last_routing(model).implementation == "reference"
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    assert choose_implementation(None, q, q, q) == "reference"


@pytest.mark.parametrize("mode_pair", ["FA-SSA", "FA-XA", "XA-SSA"])
def test_a_training_step_on_the_kernels_equals_one_on_the_reference(make_routed, inputs, use, mode_pair):
    sizes = {"xattn_block_size": 16, "xattn_stride": 4, "xattn_threshold": 0.5}
    use("reference")
    model = make_routed(mode_pair=mode_pair, **sizes).train()
    labels = inputs["input_ids"].clone()
    labels[:, :29] = -100
    results = {}
    for name in ("reference", "triton"):
        use(name)
        model.zero_grad()
        tape = RoutingTape(seeds=[1, 2])
        model(**inputs, labels=labels, elastic_tape=tape).loss.backward()
        assert last_routing(model).implementation == name
        decisions = torch.stack(list(tape.gates.values()))
        assert 0 < decisions.sum() < decisions.numel(), "one mode does not occur"
        results[name] = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    assert results["triton"].keys() == results["reference"].keys()
    for key, expected in results["reference"].items():
        torch.testing.assert_close(
            results["triton"][key], expected, rtol=1e-3, atol=1e-6, msg=lambda t, key=key: f"{key}: {t}"
        )


@pytest.mark.parametrize("mode_pair", ["FA-SSA", "FA-XA", "XA-SSA"])
def test_training_on_the_kernels_never_runs_the_models_own_attention(make_routed, inputs, use, monkeypatch, mode_pair):
    model = make_routed(mode_pair=mode_pair, xattn_block_size=16, xattn_stride=4).train()
    use("triton")
    monkeypatch.setattr(mode_pairs.PairAttention, "full", lambda self: pytest.fail("the model's own attention ran"))
    labels = inputs["input_ids"].clone()
    labels[:, :29] = -100
    model(**inputs, labels=labels, elastic_tape=RoutingTape(seeds=[1, 2])).loss.backward()
