"""The gate's gradient from a sample of query tiles: which tiles count, unbiasedness, and what stays untouched."""

import pytest
import torch
from numerics import assert_equal_in_float64, make_like
from ops.dense import sequences_of
from ops.test_training_kernels import ON_CPU, both_modes, fused, gradients, make_case

from elastic_kernels import routed_attention
from elastic_kernels.routed_attention import _prefill, backward_delta, counterfactual


# Interpreted kernels are slow: tiles as short as theirs of queries, two of the inner products' each.
TILE = 32
CASES = {
    "groups": {"heads": 4, "length": 80},
    "padded": {"batch": 2, "length": 80, "start": [0, 21]},
    "nothing-but-padding": {"batch": 2, "length": 35, "start": [0, 35]},
    "packed": {"length": 80, "cu_seqlens": [0, 3, 3, 45, 80]},
    "chunk": {"length": 80, "query_length": 55},
    "padded-chunk": {"batch": 2, "length": 80, "query_length": 50, "start": [60, 7]},
    "XA-SSA": {"length": 80, "mode_pair": "XA-SSA"},
    "FA-XA-blocks-below-a-tile": {"length": 50, "mode_pair": "FA-XA", "block_size": 16},
    "head-dim-64": {"length": 50, "head_dim": 64},
    "head-dim-128": {"length": 50, "head_dim": 128},
}
IMPLEMENTATIONS = [pytest.param("triton", marks=ON_CPU), "reference"]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(counterfactual, "TILE", TILE)
    monkeypatch.setattr(backward_delta, "_BLOCK_M", TILE // 2)


def sampling(inputs, count, offset=None):
    """The options of a sample of one tile in `count`: the `offset`-th of each stratum, or random ones."""
    gate, length = inputs["gate"], inputs["query"].shape[2]
    shape = (*gate.shape, counterfactual.num_strata(length, 1 / count))
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(count))
    if offset is not None:
        noise = torch.full(shape, (offset + 0.5) / count)
    return {"counterfactual_fraction": 1 / count, "counterfactual_noise": noise}


def gate_gradient(inputs, options, grad, implementation):
    output = routed_attention(**inputs, **options, implementation=implementation)
    return torch.autograd.grad(output, inputs["gate"], grad.to(output))[0]


def gate_only(case, dtype):
    """Inputs of which the gate alone has a gradient, and the other arguments."""
    inputs, options = make_case(case, dtype)
    return {name: x.detach().requires_grad_(name == "gate") for name, x in inputs.items()}, options


def sampled_gradient(inputs, options, grad, noise):
    """The gate's gradient by its definition, tile by tile in float64."""
    doubles = {name: x.detach().double() for name, x in inputs.items()}
    gate = doubles.pop("gate")
    retrieval, sparse = both_modes(**doubles, **options)
    products = (grad.double() * (sparse - retrieval)).sum(-1)  # [B, Hq, Q]
    count = round(1 / noise["counterfactual_fraction"])
    batch, heads, queries = products.shape
    length = inputs["key"].shape[2]
    result = torch.zeros_like(gate)
    where = {name: options[name] for name in ("start", "cu_seqlens") if name in options}
    for n, (row, begin, end) in enumerate(sequences_of(batch, length, **where)):
        first = max(begin - (length - queries), 0)
        for number, at in enumerate(range(first, end - (length - queries), TILE)):
            for head in range(heads):
                kv_head = head * gate.shape[1] // heads
                draw = noise["counterfactual_noise"][n, kv_head, number // count].item()
                if number % count == int(draw * count):
                    tokens = slice(at, min(at + TILE, end - (length - queries)))
                    result[n, kv_head] += count * products[row, head, tokens].sum()
    return result


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradient_is_that_of_the_sampled_tiles(case, implementation):
    exact = implementation == "reference"
    inputs, options = gate_only(case, torch.float64 if exact else torch.float32)
    grad = make_like(inputs["query"])
    noise = sampling(inputs, 2)
    actual = gate_gradient(inputs, options | noise, grad, implementation)
    expected = sampled_gradient(inputs, options, grad, noise)
    if exact:
        assert_equal_in_float64(actual, expected)
    else:
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("case", [CASES["groups"], CASES["packed"], CASES["padded-chunk"]], ids=str)
def test_mean_over_every_offset_is_the_whole_gradient(case, count):
    inputs, options = gate_only(case, torch.float64)
    grad = make_like(inputs["query"])
    whole = gate_gradient(inputs, options, grad, "reference")
    samples = [sampling(inputs, count, offset) for offset in range(count)]
    estimates = torch.stack([gate_gradient(inputs, options | sample, grad, "reference") for sample in samples])
    assert_equal_in_float64(estimates.mean(0), whole)
    assert not torch.allclose(estimates[0], whole), "the sample leaves nothing out"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_else_changes(implementation):
    inputs, options = make_case({"length": 40, "sinks": True}, torch.float32)
    grad = make_like(inputs["query"])
    whole = gradients(fused(implementation), inputs, options, grad)
    estimate = gradients(fused(implementation), inputs, options | sampling(inputs, 2), grad)
    outputs = [fused(implementation)(**inputs, **options, **sample) for sample in ({}, sampling(inputs, 2))]
    assert torch.equal(*outputs)
    assert not torch.equal(estimate.pop("gate"), whole.pop("gate"))
    for name, expected in whole.items():
        assert torch.equal(estimate[name], expected), f"gradient of {name}"


@ON_CPU
def test_other_tiles_are_neither_computed_nor_read(monkeypatch):
    def empty_outputs(query, with_lse=True):
        lse = query.new_full(query.shape[:3], torch.nan, dtype=torch.float32) if with_lse else None
        held.append(torch.full_like(query.transpose(1, 2).contiguous(), torch.nan).transpose(1, 2))
        return held[-1], lse

    held = []
    inputs, options = gate_only({"kv_heads": 1, "length": 80, "gate": [[1]]}, torch.float32)
    grad = make_like(inputs["query"])
    sample = sampling(inputs, 2, offset=1)  # tile 1 of 0, 1, 2
    monkeypatch.setattr(_prefill, "empty_outputs", empty_outputs)
    actual = gate_gradient(inputs, options | sample, grad, "triton").double()
    torch.testing.assert_close(actual, sampled_gradient(inputs, options, grad, sample), rtol=1e-4, atol=1e-3)
    written = held[-1].isfinite().all(-1)
    assert written[:, :, TILE : 2 * TILE].all()
    assert not written[:, :, :TILE].any()
    assert not written[:, :, 2 * TILE :].any()


@pytest.mark.parametrize(
    ("fraction", "noise", "message"),
    [
        (0.3, None, r"`counterfactual_fraction` must be 1 / n .*got 0.3\."),
        (0.0, None, r"`counterfactual_fraction` must be 1 / n .*got 0.0\."),
        (-0.5, None, r"`counterfactual_fraction` must be 1 / n .*got -0.5\."),
        (2, None, r"`counterfactual_fraction` must be 1 / n .*got 2\."),
        (float("nan"), None, r"`counterfactual_fraction` must be 1 / n .*got nan\."),
        (1.0, torch.zeros(1, 2, 1), "`counterfactual_noise` must be None at a `counterfactual_fraction` of 1"),
        (0.5, None, "`counterfactual_noise` must be given at a `counterfactual_fraction` of 0.5, got None"),
        (0.5, torch.zeros(1, 2, 1), r"`counterfactual_noise` must be float32 .*\(1, 2, 2\) or more strata, got"),
        (0.5, torch.zeros(2, 2, 2), r"`counterfactual_noise` must be float32 .*got torch.float32 \(2, 2, 2\)"),
        (0.5, torch.zeros(1, 2, 2, dtype=torch.float64), "`counterfactual_noise` must be float32 .*got torch.float64"),
        (
            0.5,
            torch.zeros(1, 2, 2, device="meta"),
            "`counterfactual_noise` must be on the gate's device cpu, got meta",
        ),
    ],
)
def test_refused_arguments(fraction, noise, message):
    inputs, options = make_case({"length": 80}, torch.float32)
    with pytest.raises(ValueError, match=message):
        routed_attention(**inputs, **options, counterfactual_fraction=fraction, counterfactual_noise=noise)


def test_noise_next_to_one_samples_the_last_tile():
    largest = torch.tensor([[[1 - 2**-24]]])
    sampled = counterfactual.sample_tiles(1 / 3, largest, torch.zeros(1, 1), 3 * TILE)
    assert sampled.mask.tolist() == [[[False, False, True]]]


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "hopper"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "case",
    [
        {"length": 2000, "heads": 8, "mode_pair": "FA-SSA"},
        {"length": 1500, "batch": 2, "start": [0, 411]},
        {"length": 1500, "cu_seqlens": [0, 100, 900, 1500]},
        {"length": 1500, "mode_pair": "XA-SSA", "block_size": 128},
    ],
    ids=["groups", "padded", "packed", "XA-SSA"],
)
def test_sampled_tiles_on_a_gpu(monkeypatch, case, head_dim, implementation):
    monkeypatch.undo()
    case = {"sink_size": 100, "window_size": 200, "head_dim": head_dim} | case
    inputs, options = make_case(case, torch.bfloat16, "cuda")
    grad = make_like(inputs["query"].cpu())
    sample = {name: x.cuda() if name.endswith("noise") else x for name, x in sampling(inputs, 4).items()}
    whole = gradients(fused(implementation), inputs, options, grad)
    estimate = gradients(fused(implementation), inputs, options | sample, grad)
    singles = {name: x.detach().float().requires_grad_() for name, x in inputs.items()}
    expected = gradients(fused("reference"), singles, options | sample, grad)["gate"]
    gate = estimate.pop("gate").float()
    assert (gate - expected).norm() <= 0.02 * expected.norm()
    assert not torch.equal(gate, whole.pop("gate").float())
    for name, other in whole.items():
        assert torch.equal(estimate[name], other), f"gradient of {name}"
