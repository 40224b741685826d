"""A model whose layers lie on two GPUs generates what it generates on one."""

import pytest
import torch
from families_zoo import build, perturb_routers
from generation.tiny import assert_same_logits, generate, logits_of, tokens
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, DynamicCache

from elastic_peft import ElasticConfig, calibrate_standardization, last_routing


LAYERS = 4
SIZES = {"sink_size": 16, "window_size": 64, "pool_size": 20, "xattn_block_size": 64, "xattn_threshold": 0.6}
LENGTHS = [400, 170]


@pytest.fixture(scope="module", params=["FA-SSA", "FA-XA"])
def saved(request, tmp_path_factory):
    """Folders of a base model and of an adapter."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": 128, "head_dim": 64}
    base = build("llama", **sizes)
    base.save_pretrained(folder / "base")
    config = ElasticConfig(mode_pair=request.param, task_type="CAUSAL_LM", **SIZES)
    model = perturb_routers(get_peft_model(base, config))
    calibrate_standardization(model, [{"input_ids": torch.cat([tokens(300, seed) for seed in range(8)])}])
    model.save_pretrained(folder / "adapter")
    return folder


def load(saved, device_map):
    base = AutoModelForCausalLM.from_pretrained(saved / "base", device_map=device_map, dtype=torch.float32)
    return PeftModel.from_pretrained(base, saved / "adapter")


def answer(model):
    width = max(LENGTHS)
    rows = [torch.nn.functional.pad(tokens(length, seed), (width - length, 0)) for seed, length in enumerate(LENGTHS)]
    mask = torch.stack([torch.arange(width) >= width - length for length in LENGTHS]).long()
    cache = DynamicCache(config=model.config)
    inputs = {"input_ids": torch.cat(rows).to(model.device), "attention_mask": mask.to(model.device)}
    return generate(model, **inputs, past_key_values=cache), last_routing(model), cache


def compare(saved, device_map):
    """Compares a placement with one device; returns the devices of the cache's layers."""
    expected, expected_record, _ = answer(load(saved, {"": next(iter(device_map.values()))}))
    output, record, cache = answer(load(saved, device_map))
    assert expected_record.decisions.any()
    assert not expected_record.decisions.all()
    assert torch.equal(record.decisions.cpu(), expected_record.decisions.cpu())
    for row in range(len(LENGTHS)):
        assert_same_logits(logits_of(output, row).cpu(), logits_of(expected, row).cpu())
    return [(layer.keys if layer.store is None else layer.store.keys).device for layer in cache.layers]


def placement(first, second):
    """Two layers on each of two devices."""
    layers = {f"model.layers.{index}": first if index < LAYERS // 2 else second for index in range(LAYERS)}
    return {"model.embed_tokens": first, "model.rotary_emb": first, **layers, "model.norm": second, "lm_head": second}


def test_one_device_named_twice(saved):
    assert {device.type for device in compare(saved, placement("cpu", "cpu"))} == {"cpu"}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(saved):
    devices = compare(saved, placement(0, 1))
    assert [device.index for device in devices] == [0, 0, 1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_that_are_chosen_by_size(saved):
    output, record, _ = answer(load(saved, "balanced"))
    expected, expected_record, _ = answer(load(saved, {"": 0}))
    assert torch.equal(record.decisions.cpu(), expected_record.decisions.cpu())
    assert_same_logits(logits_of(output).cpu(), logits_of(expected).cpu())
