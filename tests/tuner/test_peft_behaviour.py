"""An ELASTIC adapter behaves as any PEFT adapter: added, switched, disabled, deleted, trained, cloned, unloaded."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, PeftModel, PeftType, get_peft_model

from elastic_peft import forced_routing, last_routing


@pytest.fixture
def saved(make_routed, logits, tmp_path):
    """Two saved adapters and the logits that each gives: name to (folder, logits, mode pair)."""
    first = make_routed(seed=1)
    second = make_routed(seed=3, mode_pair="FA-XA", xattn_block_size=4, xattn_stride=2, xattn_threshold=0.5)
    adapters = {}
    for name, model in (("first", first), ("second", second)):
        model.save_pretrained(tmp_path / name)
        adapters[name] = (tmp_path / name, logits(model), model.active_peft_config.mode_pair)
    return adapters


@pytest.fixture
def both(make_base, saved):
    """A model with both saved adapters, "first" active."""
    model = PeftModel.from_pretrained(make_base(), saved["first"][0], adapter_name="first")
    model.load_adapter(saved["second"][0], "second")
    return model


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")], ids="-then-".join)
def test_switching_runs_the_active_adapters_routing(both, saved, logits, order):
    for name in order:
        both.set_adapter(name)
        assert torch.equal(logits(both), saved[name][1]), f"{name} must give the logits it was saved with"
        assert last_routing(both).mode_pair == saved[name][2]


def test_disabling_gives_the_base_bitwise_and_ends(both, make_base, saved, logits):
    with both.disable_adapter():
        assert torch.equal(logits(both), logits(make_base()))
    assert torch.equal(logits(both), saved["first"][1])


def test_deleting_the_active_adapter_leaves_the_other_running(both, saved, logits):
    both.delete_adapter("first")
    assert both.active_adapters == ["second"]
    assert torch.equal(logits(both), saved["second"][1])
    assert not [key for key in both.state_dict() if ".first." in key], "a deleted adapter's tensors must be gone"


def test_a_deleted_name_can_be_loaded_again(both, saved, logits):
    both.delete_adapter("second")
    both.load_adapter(saved["first"][0], "second")
    both.set_adapter("second")
    assert torch.equal(logits(both), saved["first"][1])


def test_deleting_the_last_adapter_leaves_the_base(make_routed, make_base, logits):
    model = make_routed()
    model.delete_adapter("default")
    assert torch.equal(logits(model.base_model.model), logits(make_base()))


def test_loaded_adapters_are_frozen_unless_trainable(both, saved):
    assert trainable(both) == set()
    both.load_adapter(saved["first"][0], "third", is_trainable=True)
    both.set_adapter("third")
    assert len(trainable(both)) == 20, "two layers of five linear layers with biases"
    assert all(".third." in name for name in trainable(both))


def test_training_changes_the_active_adapter_only(both, inputs):
    both.set_adapter("second")
    before = {name: tensor.clone() for name, tensor in both.state_dict().items()}
    both.train()
    optimizer = torch.optim.SGD([p for p in both.parameters() if p.requires_grad], lr=0.1)
    both(**inputs, labels=inputs["input_ids"]).loss.backward()
    optimizer.step()
    changed = {name for name, tensor in both.state_dict().items() if not torch.equal(tensor, before[name])}
    assert len(changed) == 20
    assert all(".second." in name for name in changed)


def test_only_routers_train(make_routed):
    assert all("self_attn.router.elastic_" in name for name in trainable(make_routed()))


def test_parameters_a_layer_at_head_dim_128(make_base, make_config, capsys):
    model = get_peft_model(make_base(head_dim=128, num_hidden_layers=3), make_config())
    model.print_trainable_parameters()
    assert model.get_nb_trainable_parameters()[0] == 3 * 263_682
    assert f"trainable params: {3 * 263_682:,}" in capsys.readouterr().out


def test_injection_keeps_the_base_module_names(make_base, make_config):
    model = make_base()
    before = dict(model.named_modules())
    parameters = [name for name, _ in model.named_parameters()]
    get_peft_model(model, make_config())
    after = dict(model.named_modules())
    assert all(after[name] is module for name, module in before.items())
    assert [name for name, _ in model.named_parameters() if ".elastic_" not in name] == parameters


def test_unloading_gives_the_base_back(make_routed, make_base, logits):
    base = make_base()
    names, expected = list(base.state_dict()), logits(base)
    unloaded = make_routed(base).unload()
    assert unloaded is base
    assert list(base.state_dict()) == names
    assert torch.equal(logits(base), expected)
    assert not hasattr(base, "peft_config")
    assert "generate" not in vars(base)


def test_an_unloaded_base_takes_an_adapter_again(make_routed, saved, logits):
    base = make_routed(seed=5).unload()
    assert torch.equal(logits(PeftModel.from_pretrained(base, saved["first"][0])), saved["first"][1])


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_clone_routes_alike_and_is_independent(make_routed, make_base, logits, clone):
    model = make_routed()
    expected = logits(model)
    cloned = clone(model)
    assert torch.equal(logits(cloned), expected)
    generate = cloned.get_base_model().generate
    assert generate.model is cloned.get_base_model(), "`generate` must be the clone's own"
    assert torch.equal(logits(cloned.unload()), logits(make_base()))
    assert torch.equal(logits(model), expected), "unloading the clone must leave the original routed"


def test_peft_type_round_trips():
    assert PeftType("ELASTIC") is PeftType.ELASTIC
    assert pickle.loads(pickle.dumps(PeftType.ELASTIC)) is PeftType.ELASTIC
    assert copy.deepcopy(PeftType.ELASTIC) is PeftType.ELASTIC


def test_status_names_the_adapter(make_routed):
    status = make_routed().get_model_status()
    assert status.peft_types == {"default": "ELASTIC"}
    assert status.num_adapter_layers == 2
    assert status.enabled is True


@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
def test_merging_is_refused_and_harmless(make_routed, logits, merge):
    model = make_routed()
    expected = logits(model)
    with pytest.raises(ValueError, match="cannot be merged: which heads are sparse depends on each input"):
        getattr(model, merge)()
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("call", ["forward", "generate"])
def test_mixed_batches_are_refused(make_routed, inputs, call):
    with pytest.raises(ValueError, match="`adapter_names` must be None with ELASTIC adapters"):
        getattr(make_routed(), call)(**inputs, adapter_names=["default", "__base__"])


def test_several_active_adapters_are_refused(both, saved, logits):
    with pytest.raises(ValueError, match=r"`adapter_names` must name one ELASTIC adapter, got \['first', 'second'\]"):
        both.base_model.set_adapter(["first", "second"])
    assert torch.equal(logits(both), saved["first"][1])


def test_another_tuner_in_the_same_peft_model_is_refused(make_routed, logits):
    model = make_routed()
    expected = logits(model)
    with pytest.raises(ValueError, match="Cannot combine adapters with different peft types"):
        model.add_adapter("lora", LoraConfig(target_modules=["q_proj"]))
    assert torch.equal(logits(model), expected)


@torch.no_grad()
def test_a_decoder_without_a_head_is_routed_read_and_forced(make_base, make_config, inputs):
    model = get_peft_model(make_base().model, make_config())
    for choice, share in (("sparse", 1.0), ("retrieval", 0.0)):
        with forced_routing(model, choice):
            model(**inputs)
        assert last_routing(model).msr.tolist() == [share, share]


@torch.no_grad()
def test_a_decoder_takes_its_mask_by_position(make_base, make_config, inputs):
    model = get_peft_model(make_base().model, make_config())
    with forced_routing(model, "sparse"):
        expected = model(**inputs).last_hidden_state
        hidden = model(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
    assert last_routing(model).lengths.tolist() == [40, 35]
    assert torch.equal(hidden, expected)


def test_one_configuration_serves_several_models(make_base, make_config, tmp_path):
    config = make_config()
    first = get_peft_model(make_base(), config)
    get_peft_model(make_base(head_dim=8), config)
    assert config.head_dim is None
    first.save_pretrained(tmp_path)
    PeftModel.from_pretrained(make_base(), tmp_path)


@torch.no_grad()
def test_labels_of_whole_sequences_hide_no_tokens_from_the_routers(make_routed, inputs):
    model = make_routed()
    model(**inputs)
    expected = last_routing(model).logits
    model.get_base_model().loss_function = lambda logits, labels, **kwargs: logits.sum()
    model(**inputs, labels=torch.tensor([-100, 2]))
    assert torch.equal(last_routing(model).logits, expected)


@torch.no_grad()
def test_a_failed_pass_leaves_the_last_record(make_routed, inputs):
    model = make_routed()
    model(**inputs)
    record = last_routing(model)
    broken = model.get_base_model().model.layers[1].mlp
    broken.forward = lambda hidden_states: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model(**inputs)
    assert last_routing(model) is record
