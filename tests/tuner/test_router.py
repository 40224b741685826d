"""Boundary pooling, standardisation and the router's arithmetic, exactly as the method defines them."""

from __future__ import annotations

import functools

import pytest
import torch
from accelerate import cpu_offload
from families_zoo import build
from peft import get_peft_model
from torch import nn

from elastic_kernels.router import router
from elastic_peft import ElasticConfig, calibrate_standardization, forced_routing, last_routing
from elastic_peft.context import decoder_scope, routed_decoder
from elastic_peft.families import pre_rotary_keys
from elastic_peft.router import (
    InputStandardizer,
    boundary_indices,
    decide,
    make_router,
    masked_mean,
    router_logits,
)
from elastic_peft.standardization import is_calibrated


def pooled_tokens(first, end, pool_size, width):
    positions, valid = boundary_indices(torch.tensor(first), torch.tensor(end), pool_size, width)
    return [row[keep].tolist() for row, keep in zip(positions, valid)]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (10, [0, 1, 2, 7, 8, 9]),
        (7, [0, 1, 2, 4, 5, 6]),
        (6, [0, 1, 2, 3, 4, 5]),
        (5, [0, 1, 2, 3, 4]),
        (1, [0]),
        (0, []),
    ],
    ids=lambda value: f"{value}-tokens" if isinstance(value, int) else "",
)
def test_pooling_takes_both_ends_and_each_token_once(end, expected):
    assert pooled_tokens([0], [end], 3, 10) == [expected]


@pytest.mark.parametrize("width", [4, 5, 6, 7, 50])
def test_pooling_does_not_depend_on_the_batch_width(width):
    assert pooled_tokens([0], [4], 3, width) == [[0, 1, 2, 3]]


def test_pooling_none_takes_the_whole_prompt_and_nothing_else():
    assert pooled_tokens([2, 10], [5, 17], None, 10) == [[2, 3, 4], [10, 11, 12, 13, 14, 15, 16]]


def test_pooling_starts_at_each_sequence():
    assert pooled_tokens([3, 20], [10, 40], 2, 20) == [[3, 4, 8, 9], [20, 21, 38, 39]]


def test_masked_mean_ignores_nan_in_padding_and_gives_zero_for_an_empty_row():
    keys = torch.randn(2, 3, 2, 4)
    keys[0, 2] = float("nan")
    valid = torch.tensor([[True, True, False], [False, False, False]])
    mean = masked_mean(keys, valid)
    torch.testing.assert_close(mean[0], keys[0, :2].mean(dim=0))
    assert mean[1].eq(0).all()


@pytest.mark.parametrize(("head_dim", "expected"), [(128, 263_682), (64, 66_306)])
def test_router_has_the_papers_number_of_parameters(head_dim, expected):
    layers = make_router(head_dim, expansion=4)
    assert sum(p.numel() for module in layers.values() for p in module.parameters()) == expected


def test_router_starts_neutral_with_gradients_everywhere():
    layers = make_router(16, expansion=4)
    logits = router_logits(torch.randn(3, 2, 16), layers)
    assert logits.abs().max() < 0.1
    (logits[..., 1] - logits[..., 0]).sum().backward()
    for name, module in layers.items():
        assert module.weight.grad.abs().sum() > 0, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_router_computes_in_float32_whatever_its_weights_dtype(dtype):
    layers = make_router(16, expansion=2)
    pooled = torch.randn(3, 2, 16)
    rounded = {name: module.to(dtype) for name, module in layers.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = router_logits(pooled, rounded)
    assert logits.dtype == torch.float32
    exact = router_logits(pooled, {name: module.to(torch.float32) for name, module in rounded.items()})
    torch.testing.assert_close(logits, exact, rtol=0, atol=0)


@pytest.fixture
def boundary():
    """Keys of 5 boundary tokens of 2 sequences and which of them count."""
    keys = torch.randn(2, 5, 3, 16, generator=torch.Generator().manual_seed(0))
    return keys, torch.arange(5) < torch.tensor([[5], [2]])


def count_calls(layers):
    """Names of the layers, one entry a call."""
    calls = []
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda *args, name=name: calls.append(name))
    return calls


def test_layers_that_learn_are_called(boundary):
    layers = make_router(16, expansion=2)
    calls = count_calls(layers)
    with torch.no_grad():
        read = decide(*boundary, layers, None, 0.0)
    assert calls == [], "weights that are at hand are read"
    called = decide(*boundary, layers, None, 0.0)
    assert sorted(calls) == sorted(layers)
    for one, other in zip(called, read):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_layers_whose_weights_are_elsewhere_are_called(boundary):
    layers = make_router(16, expansion=2)
    expected = decide(*boundary, layers, None, 0.5)
    cpu_offload(nn.ModuleDict(layers), execution_device=torch.device("cpu"))
    assert layers["task_up"].weight.is_meta
    for one, other in zip(decide(*boundary, layers, None, 0.5), expected):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_decision_is_float32_whatever_the_models_dtype(boundary, dtype):
    keys, valid = boundary
    layers = {name: layer.to(dtype) for name, layer in make_router(16, expansion=2).items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = decide(keys.to(dtype), valid, layers, None, 0.0)
    exact = decide(keys.to(dtype).float(), valid, {name: layer.float() for name, layer in layers.items()}, None, 0.0)
    assert output.logits.dtype == output.pooled.dtype == torch.float32
    for one, other in zip(output, exact):
        assert torch.equal(one, other)


def test_standardizer_floors_the_deviation():
    standardizer = InputStandardizer(1, 2)
    standardizer.calibrate(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 2.0]]))
    torch.testing.assert_close(standardizer(torch.tensor([[[1.0, 4.0]]])), torch.tensor([[[0.0, 1.0]]]))
    assert standardizer.deviation[0, 0] == torch.tensor(1e-4)


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_casting_the_model_keeps_the_statistics(cast):
    standardizer = InputStandardizer(1, 2)
    mean, deviation = torch.tensor([[100.3, -7.7]]), torch.tensor([[0.011, 0.3]])
    standardizer.calibrate(mean, deviation)
    getattr(standardizer, cast)()
    assert torch.equal(standardizer.mean, mean)
    assert torch.equal(standardizer.deviation, deviation)


@pytest.fixture
def model():
    return get_peft_model(build("llama"), ElasticConfig(sink_size=2, window_size=8, pool_size=3))


def tokens(*shape, seed=0):
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def pooled_keys(model, **inputs):
    """The pooled keys `[N, H, d]` of the first layer."""
    scope = decoder_scope(routed_decoder(model))
    scope.pooled = {}
    try:
        with forced_routing(model, "retrieval"):
            model(**inputs)
        return scope.pooled[0]
    finally:
        scope.pooled = None


@torch.no_grad()
def expected_keys(model, ids):
    """Mean over the given tokens of the first layer's keys before the rotary embedding."""
    decoder = routed_decoder(model)
    layer = decoder.layers[0]
    hidden = layer.input_layernorm(decoder.embed_tokens(ids))
    return pre_rotary_keys(layer.self_attn, hidden).mean(dim=0)


def test_model_pools_the_prompts_ends(model):
    ids = tokens(2, 20)
    pooled = pooled_keys(model, input_ids=ids)
    for row in range(2):
        ends = torch.cat([ids[row, :3], ids[row, -3:]])
        torch.testing.assert_close(pooled[row], expected_keys(model, ends))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_never_pooled(model, side):
    ids = tokens(1, 20)
    padding = torch.zeros(1, 7, dtype=torch.long)
    mask = torch.ones(1, 27, dtype=torch.long)
    if side == "left":
        padded, mask[:, :7] = torch.cat([padding, ids], dim=1), 0
    else:
        padded, mask[:, 20:] = torch.cat([ids, padding], dim=1), 0
    pooled = pooled_keys(model, input_ids=padded, attention_mask=mask)
    torch.testing.assert_close(pooled, pooled_keys(model, input_ids=ids))


@pytest.mark.parametrize("given_by", ["labels", "labels-without-prompt_end", "prompt_end"])
def test_answers_are_never_pooled(model, given_by):
    ids = tokens(1, 20)
    labels = ids.clone()
    labels[:, :12] = -100
    inputs = {
        "labels": {"labels": labels},
        "labels-without-prompt_end": {"labels": labels, "prompt_end": None},
        "prompt_end": {"prompt_end": torch.tensor([12])},
    }[given_by]
    pooled = pooled_keys(model, input_ids=ids, **inputs)
    torch.testing.assert_close(pooled, pooled_keys(model, input_ids=ids[:, :12]))


@pytest.mark.parametrize("label", ["all supervised", "none supervised"])
def test_without_a_masked_prompt_everything_is_pooled(model, label):
    ids = tokens(1, 20)
    labels = ids.clone() if label == "all supervised" else torch.full_like(ids, -100)
    pooled = pooled_keys(model, input_ids=ids, labels=labels)
    torch.testing.assert_close(pooled, pooled_keys(model, input_ids=ids))


@pytest.mark.parametrize("given_by", ["position_ids", "cu_seqlens"])
@pytest.mark.parametrize("rows", [1, 2], ids=["one-row", "two-rows"])
def test_packed_rows_pool_each_sequence_and_its_prompt_only(model, given_by, rows):
    lengths, prompts = [9, 1, 15, 5], [6, 1, 15, 4]
    ids = tokens(rows, sum(lengths))
    labels = torch.full_like(ids, -100)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    for end, length, prompt in zip(ends, lengths, prompts):
        labels[:, end - length + prompt : end] = 1
    position_ids = torch.cat([torch.arange(n) for n in lengths]).expand(rows, -1)
    inputs = {"position_ids": position_ids, "use_cache": False}
    if given_by == "cu_seqlens":
        boundaries = [0, *(row * sum(lengths) + end for row in range(rows) for end in ends)]
        inputs["cu_seq_lens_q"] = torch.tensor(boundaries, dtype=torch.int32)
    pooled = pooled_keys(model, input_ids=ids, labels=labels, **inputs)
    alone = [
        pooled_keys(model, input_ids=ids[row : row + 1, end - length : end - length + prompt])[0]
        for row in range(rows)
        for end, length, prompt in zip(ends, lengths, prompts)
    ]
    torch.testing.assert_close(pooled, torch.stack(alone))


def test_rows_are_not_packed_while_a_cache_is_filled(model):
    ids = tokens(1, 20)
    restarts = torch.cat([torch.arange(12), torch.arange(8)])[None]
    model(ids, position_ids=restarts, use_cache=True)
    assert last_routing(model).lengths.tolist() == [20]
    with pytest.raises(ValueError, match="`use_cache` must be False for packed rows"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 12, 20]), use_cache=True)


def test_calibration_gives_the_mean_and_deviation_over_sequences(model):
    batches = [{"input_ids": tokens(3, 20, seed=seed)} for seed in range(2)]
    keys = torch.cat([pooled_keys(model, **batch) for batch in batches])
    assert not is_calibrated(model)
    calibrate_standardization(model, batches)
    assert is_calibrated(model)
    standardizer = routed_decoder(model).layers[0].self_attn.router.standardizer
    torch.testing.assert_close(standardizer.mean, keys.mean(dim=0))
    torch.testing.assert_close(standardizer.deviation, keys.std(dim=0, correction=0), rtol=1e-3, atol=1e-5)


def test_calibration_leaves_each_modules_mode_as_it_was(model):
    before = {name: module.training for name, module in model.named_modules()}
    calibrate_standardization(model, [{"input_ids": tokens(3, 20)}])
    assert {name: module.training for name, module in model.named_modules()} == before


def test_uncalibrated_adapter_says_so_when_it_decides(model):
    with pytest.warns(UserWarning, match="is not calibrated"):
        model(tokens(1, 20))


@pytest.mark.parametrize("sign", [1, -1], ids=["all-sparse", "all-retrieval"])
@torch.no_grad()
def test_sparsity_bias_moves_every_decision_at_inference(sign):
    config = ElasticConfig(sink_size=2, window_size=8, sparsity_bias=sign * 100.0, standardize_input=False)
    model = get_peft_model(build("llama"), config)
    model(tokens(2, 20))
    assert last_routing(model).msr.tolist() == [max(sign, 0)] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are either interpreted or compiled")
@torch.no_grad()
def test_model_on_the_fused_router_decides_as_on_the_reference(make_routed, inputs, monkeypatch):
    model = make_routed()
    records = {}
    for name in ("reference", "triton"):
        monkeypatch.setattr("elastic_peft.operators.router", functools.partial(router, implementation=name))
        model(**inputs)
        records[name] = last_routing(model)
    torch.testing.assert_close(records["triton"].logits, records["reference"].logits, rtol=1e-4, atol=1e-5)
    decisions = records["reference"].decisions
    assert torch.equal(records["triton"].decisions, decisions)
    assert decisions.any()
    assert not decisions.all()
