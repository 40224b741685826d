"""Saved adapters come back bit for bit, by each of PEFT's and transformers' ways to load one."""

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from elastic_peft import last_routing


@pytest.fixture
def base_folder(make_base, tmp_path):
    make_base().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(base_folder, make_routed, logits, tmp_path):
    """Folder of an adapter that names its base model, and the logits that it gives."""
    model = make_routed(AutoModelForCausalLM.from_pretrained(base_folder))
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", logits(model)


def by_peft_model(folder, base_folder, **options):
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_folder), folder, **options)


def by_low_cpu_memory(folder, base_folder):
    return by_peft_model(folder, base_folder, low_cpu_mem_usage=True)


def by_load_adapter(folder, base_folder):
    model = by_peft_model(folder, base_folder, adapter_name="first")
    model.load_adapter(folder, "second")
    model.set_adapter("second")
    return model


def by_auto_peft(folder, base_folder):
    return AutoPeftModelForCausalLM.from_pretrained(folder).eval()


def by_auto_model(folder, base_folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def by_transformers(folder, base_folder):
    model = AutoModelForCausalLM.from_pretrained(base_folder)
    model.load_adapter(folder)
    return model


def by_injection(folder, base_folder):
    model = AutoModelForCausalLM.from_pretrained(base_folder)
    inject_adapter_in_model(PeftConfig.from_pretrained(folder), model)
    set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))
    return model.eval()


LOADERS = [
    by_peft_model,
    by_low_cpu_memory,
    by_load_adapter,
    by_auto_peft,
    by_auto_model,
    by_transformers,
    by_injection,
]


@pytest.mark.parametrize("load", LOADERS, ids=lambda load: load.__name__)
def test_loading_is_bit_exact(adapter, base_folder, logits, load):
    folder, expected = adapter
    model = load(folder, base_folder)
    assert torch.equal(logits(model), expected)
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", ["elastic", "weight", "elastic_x", "a-b", "router", "elastic_router_out", "mean"])
@pytest.mark.filterwarnings("ignore:Adapter name")
def test_awkward_adapter_names_are_bit_exact(make_routed, make_base, logits, tmp_path, name):
    model = make_routed(adapter_name=name)
    model.save_pretrained(tmp_path)
    expected = logits(model)
    for reload_name in (name, "default"):
        loaded = PeftModel.from_pretrained(make_base(), tmp_path / name, adapter_name=reload_name)
        assert torch.equal(logits(loaded), expected), f"loaded as {reload_name!r}"


@pytest.mark.parametrize("name", ["default.v2", "keys", ""], ids=["dot", "module-dict-attribute", "empty"])
def test_impossible_adapter_names_are_refused(make_base, make_config, logits, name):
    base = make_base()
    with pytest.raises(ValueError, match="`adapter_name` must be a name without dots"):
        inject_adapter_in_model(make_config(), base, adapter_name=name)
    assert not [key for key, _ in base.named_modules() if "router" in key]
    assert torch.equal(logits(base), logits(make_base()))


def test_the_file_holds_routers_and_their_statistics_only(adapter):
    tensors = load_file(adapter[0] / "adapter_model.safetensors")
    assert len(tensors) == 2 * (5 * 2 + 3), "five linear layers with biases and three buffers in each of two layers"
    assert all(".self_attn.router.elastic_" in name for name in tensors)


def test_routing_some_layers_saves_and_loads_those(make_routed, make_base, logits, tmp_path):
    model = make_routed(layers_to_transform=[1])
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_base(), tmp_path, low_cpu_mem_usage=True)
    assert torch.equal(logits(loaded), logits(model))
    assert last_routing(loaded).layers == [1]


@pytest.mark.parametrize("order", [("lora", "elastic"), ("elastic", "lora")], ids="-then-".join)
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_injected_beside_lora_each_loads_alone(make_base, make_config, set_routers, logits, tmp_path, order):
    configs = {
        "lora": LoraConfig(target_modules=["q_proj", "k_proj"], init_lora_weights=False),
        "elastic": make_config(),
    }
    model = make_base()
    for name in order:
        inject_adapter_in_model(configs[name], model, adapter_name=name)
    model.eval()
    set_routers(model, "elastic")
    expected = logits(model)
    for name, config in configs.items():
        tensors = get_peft_model_state_dict(model, adapter_name=name)
        assert all(f".{name}_" in key for key in tensors), f"{name} must save its own tensors only"
        config.save_pretrained(tmp_path / name)
        tensors = {f"base_model.model.{key}": tensor for key, tensor in tensors.items()}
        save_file(tensors, tmp_path / name / "adapter_model.safetensors")

    merged = PeftModel.from_pretrained(make_base(), tmp_path / "lora").merge_and_unload()
    routed = PeftModel.from_pretrained(merged, tmp_path / "elastic")
    torch.testing.assert_close(logits(routed), expected, rtol=1e-4, atol=1e-4)
    assert 0 < last_routing(routed).decisions.float().mean() < 1, "both modes must occur"


def test_a_base_with_merged_lora_is_routed(make_base, make_routed, logits):
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    merged = get_peft_model(make_base(), lora).merge_and_unload()
    expected = logits(merged)
    model = make_routed(merged)
    assert not torch.equal(logits(model), expected)
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)
