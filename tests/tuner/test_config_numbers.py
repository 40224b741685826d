"""Numbers of a configuration: those of numpy become plain, the largest sizes run, a saved file keeps its bytes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from elastic_peft import ElasticConfig, last_routing
from elastic_peft.checks import MAX_SIZE


SHIPPED = Path(__file__).parents[2] / "hub_cards" / "smollm2-135m-fa-ssa"


@pytest.mark.parametrize(
    ("field", "value", "stored"),
    [
        ("target_sparsity", np.float32(0.5), 0.5),
        ("t_values", {"qa": np.float32(0.5), "code": np.int64(1)}, {"qa": 0.5, "code": 1}),
        ("sink_size", np.int64(4), 4),
        ("window_size", np.int32(8), 8),
        ("xattn_block_size", np.int64(32), 32),
        ("xattn_stride", np.int64(8), 8),
        ("xattn_threshold", np.float32(0.5), 0.5),
        ("pool_size", np.uint8(4), 4),
        ("router_expansion", np.int64(2), 2),
        ("format_version", np.int64(1), 1),
        ("sparsity_bias", np.float16(-0.5), -0.5),
        ("sparsity_bias", np.float32("inf"), float("inf")),
        ("layers_to_transform", np.int64(1), [1]),
        ("layers_to_transform", [np.int64(0), 1], [0, 1]),
        ("head_dim", np.int64(16), 16),
        ("num_key_value_heads", {np.int64(0): np.int64(2)}, {0: 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_numbers_of_numpy_become_plain(field, value, stored):
    found = getattr(ElasticConfig(**{field: value}), field)
    assert repr(found) == repr(stored)


def test_a_configuration_with_numbers_of_numpy_saves(tmp_path):
    config = ElasticConfig(sink_size=np.int64(4), t_values={"qa": np.float32(0.5)}, layers_to_transform=[np.int64(1)])
    config.save_pretrained(tmp_path)
    assert ElasticConfig.from_pretrained(tmp_path) == config


def test_the_shipped_configuration_is_saved_as_it_was(tmp_path):
    ElasticConfig.from_pretrained(SHIPPED).save_pretrained(tmp_path)
    before, after = (json.loads((folder / "adapter_config.json").read_text()) for folder in (SHIPPED, tmp_path))
    assert repr(after) == repr(before)


@pytest.fixture
def widest(make_routed):
    return make_routed(sink_size=MAX_SIZE, window_size=MAX_SIZE)


def test_the_largest_sizes_are_dense(widest, make_base, inputs):
    with torch.no_grad():
        logits = widest(**inputs).logits
        assert torch.equal(logits, make_base()(**inputs).logits)


def test_the_largest_sizes_generate_as_the_base_model(widest, make_base, inputs):
    options = {"max_new_tokens": 8, "do_sample": False}
    generated = widest.generate(**inputs, **options)
    decisions = last_routing(widest).decisions
    assert 0 < decisions.float().mean() < 1, "heads of both kinds must decode"
    assert torch.equal(generated, make_base().generate(**inputs, **options))
