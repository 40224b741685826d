"""Engines that cut a sequence over devices are refused, wherever they come from: no layer may attend a shard."""

from contextlib import nullcontext

import pytest
import torch
from torch.distributed.tensor.experimental import context_parallel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from elastic_peft import forced_routing


REFUSED = "Sequence and context parallelism must be off with an active ELASTIC adapter, got "


@pytest.fixture
def use_ulysses(monkeypatch):
    """Replaces the attention of every model as DeepSpeed's Ulysses does; the list grows with each call of it."""

    def use():
        original, calls = ALL_ATTENTION_FUNCTIONS["sdpa"], []

        def wrapper(*args, **kwargs):
            calls.append(1)
            return original(*args, **kwargs)

        wrapper.__module__ = "deepspeed.runtime.sequence_parallel.ulysses_sp"
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", wrapper)
        return calls

    return use


def test_context_parallelism_is_refused(make_routed, inputs, one_process_mesh):
    model = make_routed()
    ids = inputs["input_ids"].clone()
    message = REFUSED + r"torch\.distributed\."
    with (
        context_parallel(one_process_mesh, buffers=[ids], buffer_seq_dims=[1]),
        pytest.raises(ValueError, match=message),
    ):
        model(input_ids=ids)


def test_attention_is_back_after_context_parallelism(make_routed, inputs, one_process_mesh):
    model = make_routed()
    ids = inputs["input_ids"].clone()
    expected = model(input_ids=ids).logits
    with context_parallel(one_process_mesh, buffers=[ids], buffer_seq_dims=[1]):
        pass
    assert torch.equal(model(input_ids=ids).logits, expected)


@pytest.mark.parametrize("mode", ["routed", "retrieval", "sparse"])
def test_ulysses_is_refused(make_routed, inputs, use_ulysses, mode):
    model = make_routed()
    use_ulysses()
    routing = nullcontext() if mode == "routed" else forced_routing(model, mode)
    with routing, pytest.raises(ValueError, match=REFUSED + r"deepspeed\."):
        model(**inputs)


def test_an_engine_that_is_an_object_is_refused(make_routed, inputs, monkeypatch):
    engine = type("Engine", (), {"__module__": "deepspeed.engine", "__call__": lambda *args, **kwargs: None})
    model = make_routed()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", engine())
    with pytest.raises(ValueError, match=REFUSED + r"deepspeed\."):
        model(**inputs)


def test_ulysses_has_the_model_while_the_adapter_is_disabled(make_routed, inputs, use_ulysses):
    model = make_routed()
    calls = use_ulysses()
    with model.disable_adapter():
        model(**inputs)
    assert len(calls) == model.config.num_hidden_layers
