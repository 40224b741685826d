"""Padded rows through `torch.compile` as one graph: decisions and logits of the eager model, at every length."""

import pytest
import torch
from numerics import assert_equal_in_float64

from elastic_peft import last_routing


XATTENTION = {"xattn_block_size": 4, "xattn_stride": 2, "xattn_threshold": 0.6}


def padded(inputs, length):
    """The first columns of `inputs`, the second row's 5 slots of padding among them."""
    return {**{name: value[:, :length].contiguous() for name, value in inputs.items()}, "use_cache": False}


def assert_compiled_equals_eager(model, compiled, call):
    expected = model(**call).logits
    decisions = last_routing(model).decisions
    assert 0 < decisions.float().mean() < 1, "heads of both modes must run"
    actual = compiled(**call).logits
    assert torch.equal(last_routing(model).decisions, decisions), "the graph must route as the eager model"
    valid = call["attention_mask"].bool()
    assert_equal_in_float64(actual[valid], expected[valid], what="logits")


@pytest.mark.parametrize("mode_pair", ["FA-SSA", "FA-XA", "XA-SSA"])
@torch.no_grad()
def test_padded_rows_of_every_pair_compile_as_one_graph(make_routed, inputs, mode_pair):
    model = make_routed(mode_pair=mode_pair, **XATTENTION).double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_compiled_equals_eager(model, compiled, padded(inputs, 40))


@torch.no_grad()
def test_padded_rows_of_another_length_run_with_dynamic_shapes(make_routed, inputs):
    model = make_routed().double()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (40, 31):
        assert_compiled_equals_eager(model, compiled, padded(inputs, length))
