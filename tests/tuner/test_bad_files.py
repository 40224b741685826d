"""Loading a bad adapter is one clear error that leaves the base, or the adapter loaded before, as it was."""

import json
import shutil
import warnings

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from elastic_peft import ElasticConfig


WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@pytest.fixture
def folder(make_routed, tmp_path):
    """A good adapter's folder, for the test to damage."""
    make_routed().save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def edit_config(folder, **fields):
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_weights(folder, edit):
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


def truncate(folder, size):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:size])


def key_of(tensors, part):
    return next(key for key in sorted(tensors) if part in key)


def drop(part):
    def edit(tensors):
        for key in [key for key in tensors if part in key]:
            del tensors[key]

    return edit


def poison(tensors):
    tensors[key_of(tensors, "task_up.weight")][0, 0] = float("nan")


def reshape(tensors):
    tensors[key_of(tensors, "task_up.weight")] = torch.zeros(64, 15)


def add_layer(tensors):
    tensors[key_of(tensors, "task_up.weight").replace("layers.0", "layers.9")] = torch.zeros(64, 16)


def lora_weights(folder):
    tensors = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(8, 32)}
    save_file(tensors, folder / WEIGHTS)


def pickled_weights(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


# id -> (damage to the folder, words of the message)
DAMAGES = {
    "truncated": (lambda f: truncate(f, -1000), f"`{WEIGHTS}` must be a complete safetensors file"),
    "truncated-header": (lambda f: truncate(f, 5), f"`{WEIGHTS}` must be a complete safetensors file"),
    "empty-file": (lambda f: truncate(f, 0), f"`{WEIGHTS}` must be a complete safetensors file"),
    "not-safetensors": (lambda f: (f / WEIGHTS).write_bytes(b"\x93" * 500), "must be a complete safetensors file"),
    "no-weights": (lambda f: (f / WEIGHTS).unlink(), f"`{WEIGHTS}` must be beside the adapter's configuration"),
    "pickled-weights": (pickled_weights, "weights in another format are not loaded"),
    "no-config": (lambda f: (f / CONFIG).unlink(), "adapter_config.json"),
    "config-not-json": (lambda f: (f / CONFIG).write_text("{"), "Expecting property name"),
    "lora-weights": (lora_weights, r"got none of its tensors but .*lora_A"),
    "missing-tensor": (
        lambda f: edit_weights(f, drop("layers.1.self_attn.router.elastic_router_out.bias")),
        "got 25 of",
    ),
    "missing-statistics": (lambda f: edit_weights(f, drop("standardizer")), "got 20 of 26 tensors, without .*mean"),
    "tensor-too-many": (lambda f: edit_weights(f, add_layer), "got 1 tensors too many, such as .*layers.9"),
    "unused-statistics": (lambda f: edit_config(f, standardize_input=False), "got 6 tensors too many"),
    "wrong-shape": (lambda f: edit_weights(f, reshape), r"got shape \(64, 15\) instead of \(64, 16\) for .*task_up"),
    "wrong-expansion": (lambda f: edit_config(f, router_expansion=2), r"got shape \(64, 16\) instead of \(32, 16\)"),
    "nan": (lambda f: edit_weights(f, poison), "got values that are not finite in .*task_up"),
    "unknown-mode": (lambda f: edit_config(f, mode_pair="FA-NSA"), "`mode_pair` must be one of .*, got 'FA-NSA'"),
    "newer-format": (lambda f: edit_config(f, format_version=7), "`format_version` must be at most 1 .*, got 7"),
    "other-head-dim": (lambda f: edit_config(f, head_dim=64), "`head_dim` must be that of the base model, 16, got 64"),
    "other-heads": (
        lambda f: edit_config(f, num_key_value_heads={"0": 4, "1": 4}),
        r"`num_key_value_heads` must be those of .* \{0: 2, 1: 2\}, got \{0: 4, 1: 4\}",
    ),
    "fewer-layers": (
        lambda f: edit_config(f, num_key_value_heads={"0": 2}),
        "`num_key_value_heads` must cover 2 layers, .*, got 1",
    ),
    "more-layers": (
        lambda f: edit_config(f, num_key_value_heads={"0": 2, "1": 2, "2": 2}),
        "`num_key_value_heads` must cover 2 layers, .*, got 3",
    ),
    "layer-that-is-not-there": (
        lambda f: edit_config(f, layers_to_transform=[5]),
        "`layers_to_transform` must name layers that can be routed, got 5: the model has 2 layers",
    ),
}


@pytest.fixture(params=DAMAGES.values(), ids=DAMAGES.keys())
def damaged(request, folder):
    """A damaged adapter's folder, and words of the error it must give."""
    damage, message = request.param
    damage(folder)
    return folder, message


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True], ids=["", "low-cpu-memory"])
def test_a_failed_load_leaves_the_base_as_it_was(damaged, make_base, logits, low_cpu_mem_usage):
    folder, message = damaged
    base = make_base()
    modules, expected = [name for name, _ in base.named_modules()], logits(base)
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(base, folder, low_cpu_mem_usage=low_cpu_mem_usage)
    assert [name for name, _ in base.named_modules()] == modules
    assert not hasattr(base, "peft_config")
    assert torch.equal(logits(base), expected)


def test_a_failed_load_leaves_the_adapter_loaded_before(damaged, make_routed, logits):
    folder, message = damaged
    model = make_routed(seed=3)
    state, expected = list(model.state_dict()), logits(model)
    with pytest.raises(ValueError, match=message):
        model.load_adapter(folder, "other")
    assert list(model.peft_config) == ["default"]
    assert list(model.state_dict()) == state
    assert torch.equal(logits(model), expected)


def test_a_failed_reload_keeps_the_weights_that_are_there(folder, make_routed, logits):
    model = make_routed(seed=3)
    expected = logits(model)
    edit_weights(folder, poison)
    with pytest.raises(ValueError, match="not finite"):
        model.load_adapter(folder, "default")
    assert torch.equal(logits(model), expected)


def test_a_failed_name_can_be_loaded_again(folder, make_routed, make_base, logits, tmp_path):
    good = tmp_path / "good"
    shutil.copytree(folder, good)
    edit_config(folder, sparsity_bias=9.0)
    edit_weights(folder, poison)
    model = make_routed(seed=3)
    with pytest.raises(ValueError, match="not finite"):
        model.load_adapter(folder, "other")
    model.load_adapter(good, "other")
    model.set_adapter("other")
    assert model.peft_config["other"].sparsity_bias == 0.0, "the failed adapter's configuration must be gone"
    assert torch.equal(logits(model), logits(PeftModel.from_pretrained(make_base(), good)))


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ({"head_dim": 8}, "`head_dim` must be that of the base model, 8, got 16"),
        ({"num_key_value_heads": 4}, r"must be those of the base model's routed layers, \{0: 4, 1: 4\}, got \{0: 2"),
        ({"num_hidden_layers": 3}, "must cover 3 layers, .*, got 2"),
        ({"num_hidden_layers": 1}, "must cover 1 layers, .*, got 2"),
    ],
    ids=["head-dim", "key-value-heads", "more-layers", "fewer-layers"],
)
def test_another_base_is_refused_with_both_numbers(folder, make_base, logits, base, message):
    other = make_base(**base)
    expected = logits(other)
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(other, folder)
    assert torch.equal(logits(other), expected)


def test_an_unknown_field_is_ignored_with_a_warning_that_names_it(folder, make_base, logits):
    expected = logits(PeftModel.from_pretrained(make_base(), folder))
    edit_config(folder, field_of_a_newer_peft=3)
    with pytest.warns(UserWarning, match="field_of_a_newer_peft"):
        model = PeftModel.from_pretrained(make_base(), folder)
    assert torch.equal(logits(model), expected)


def test_an_adapter_without_its_weights_does_not_run(folder, make_base, logits):
    model = get_peft_model(make_base(), PeftConfig.from_pretrained(folder)).eval()
    with pytest.raises(ValueError, match="The weights of adapter 'default' were never loaded"):
        logits(model)


def test_a_lora_adapter_does_not_join_an_elastic_one(make_base, make_routed, logits, tmp_path):
    get_peft_model(make_base(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    model = make_routed()
    expected = logits(model)
    with pytest.raises(ValueError, match="Cannot combine adapters with different peft types"):
        model.load_adapter(tmp_path, "lora")
    assert torch.equal(logits(model), expected)


def test_a_configuration_alone_can_be_read(make_config, tmp_path):
    make_config(window_size=7).save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ElasticConfig.from_pretrained(tmp_path).window_size == 7
