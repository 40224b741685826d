"""The router against float64: the fused kernels, interpreted or on a GPU, its definition, and its arguments' rules."""

import pytest
import torch
from numerics import assert_as_accurate_as

from elastic_kernels.router import LinearWeights, RouterWeights, router
from elastic_kernels.router.reference import hard_gate


ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are either interpreted or compiled")
# One program takes 32 hidden units; 16 shares are summed at a time; a tile holds at most 256 tokens.
CASES = {
    "one-token": {"tokens": 1},
    "above-a-tile": {"tokens": 300},
    "three-sequences": {"sequences": 3, "heads": 3},
    "head-dim-80": {"head_dim": 80, "hidden": 80},
    "head-dim-256": {"head_dim": 256, "hidden": 64, "heads": 1},
    "head-dim-18": {"head_dim": 18, "hidden": 54},
    "hidden-below-a-slice": {"hidden": 16},
    "hidden-of-many-slices": {"hidden": 528, "heads": 1},
    "raw-keys": {"standardized": False},
    "sparsity-bias": {"sparsity_bias": 0.7},
    "bf16-weights": {"weights_dtype": torch.bfloat16},
    "fp16-weights": {"weights_dtype": torch.float16},
}


def make_inputs(
    *,
    sequences=2,
    tokens=7,
    heads=2,
    head_dim=16,
    hidden=64,
    dtype=torch.float32,
    weights_dtype=torch.float32,
    standardized=True,
    sparsity_bias=0.0,
    device="cpu",
    seed=0,
):
    """(keys, valid, weights) and options of `router`; a third of the tokens is invalid and NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def linear(width_out, width_in):
        tensors = (normal(width_out, width_in) / width_in**0.5, normal(width_out))
        return LinearWeights(*(x.to(device, weights_dtype) for x in tensors))

    shared = normal(heads, head_dim)
    keys = (shared + normal(sequences, tokens, heads, head_dim)).to(device, dtype)
    valid = torch.rand(sequences, tokens, generator=generator).to(device) < 2 / 3
    valid[:, 0] = True
    keys[~valid] = torch.nan
    mlp = [(hidden, head_dim), (head_dim, hidden)]
    weights = RouterWeights(*(linear(*shape) for shape in (*mlp, *mlp, (2, head_dim))))
    options = {"sparsity_bias": sparsity_bias}
    if standardized:
        options["mean"] = shared.to(device, torch.float32)
        options["deviation"] = (normal(heads, head_dim).abs() + 0.5).to(device, torch.float32)
    return (keys, valid, weights), options


def in_float64(inputs, options):
    keys, valid, weights = inputs
    weights = RouterWeights(*(LinearWeights(*(x.double() for x in layer)) for layer in weights))
    options = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    return router(keys.double(), valid, weights, **options)


def assert_accurate(inputs, options):
    actual = router(*inputs, **options, implementation="triton")
    expected, eager = in_float64(inputs, options), router(*inputs, **options, implementation="reference")
    for what in ("pooled", "logits"):
        one, reference, other = (getattr(output, what).cpu() for output in (actual, expected, eager))
        assert_as_accurate_as(one, reference, other, what=what)
    assert torch.equal(actual.gate, hard_gate(actual.logits, options["sparsity_bias"]))


@ON_CPU
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_in_float32(case):
    assert_accurate(*make_inputs(**case))


@ON_CPU
@pytest.mark.parametrize("name", ["three-sequences", "head-dim-80"])
def test_kernel_on_float16_keys(name):
    assert_accurate(*make_inputs(**CASES[name], dtype=torch.float16))


@ON_CPU
@pytest.mark.parametrize("view", ["inside-a-fused-projection", "channels-apart"])
def test_kernel_takes_strided_keys(view):
    (keys, *others), options = make_inputs(hidden=16)
    if view == "channels-apart":
        strided = keys.transpose(2, 3).contiguous().transpose(2, 3)
    else:
        strided = torch.cat([keys, torch.full_like(keys, torch.inf)], dim=2)[:, :, :2]
    assert not strided.is_contiguous()
    expected = router(keys, *others, **options, implementation="triton")
    actual = router(strided, *others, **options, implementation="triton")
    assert torch.equal(actual.logits, expected.logits)


@ON_CPU
def test_kernel_gives_a_sequence_the_same_in_any_batch():
    (keys, valid, weights), options = make_inputs(sequences=3, heads=1)
    together = router(keys, valid, weights, **options, implementation="triton")
    for row in range(3):
        alone = router(keys[row : row + 1], valid[row : row + 1], weights, **options, implementation="triton")
        assert torch.equal(alone.logits[0], together.logits[row]), f"sequence {row}"


@pytest.mark.parametrize("implementation", ["reference", pytest.param("triton", marks=ON_CPU)])
def test_sequence_without_valid_keys_pools_to_zero(implementation):
    (keys, valid, weights), options = make_inputs()
    valid[1], keys[1] = False, torch.nan
    empty = router(keys, valid, weights, **options, implementation=implementation)
    keys[1], valid[1] = 0, True
    zero = router(keys, valid, weights, **options, implementation=implementation)
    assert empty.pooled[1].eq(0).all()
    assert torch.equal(empty.logits, zero.logits)


@pytest.mark.parametrize("implementation", ["reference", pytest.param("triton", marks=ON_CPU)])
@pytest.mark.parametrize(
    ("bias", "sparse"), [(0.0, False), (-1e-3, False), (1e-3, True)], ids=["tie", "below", "above"]
)
def test_ties_go_to_retrieval(implementation, bias, sparse):
    (keys, valid, weights), options = make_inputs(heads=1)
    weights.router_out.weight.zero_()
    weights.router_out.bias.fill_(0.25)
    output = router(keys, valid, weights, **options | {"sparsity_bias": bias}, implementation=implementation)
    assert output.logits.eq(0.25).all(), "the bias must not reach the logits"
    assert output.gate.eq(sparse).all()


def test_the_more_likely_mode_wins_after_the_bias():
    logits = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [2.0, 2.0]]])
    assert hard_gate(logits).tolist() == [[True, False, False]]
    assert hard_gate(logits, sparsity_bias=1.5).tolist() == [[True, True, True]]


def test_gradients_reach_keys_and_weights_through_the_reference():
    (keys, valid, weights), options = make_inputs(dtype=torch.float64)
    keys = torch.where(valid[:, :, None, None], keys, 0.0).requires_grad_()
    for layer in weights:
        layer.weight.requires_grad_()
    router(keys, valid, weights, **options).logits.sum().backward()
    assert keys.grad[valid].ne(0).all()
    assert keys.grad[~valid].eq(0).all()
    assert all(layer.weight.grad.abs().sum() > 0 for layer in weights)


def with_weights(name, value):
    _, _, weights = make_inputs()[0]
    return {"weights": weights._replace(**{name: value})}


KEYS, VALID, WEIGHTS = make_inputs()[0]
WRONG = {
    "keys-3d": ({"keys": KEYS[0]}, r"`keys` must be floating point \[seq.*\], got torch.float32 \(7, 2, 16\)"),
    "keys-int": ({"keys": KEYS.long()}, "`keys` must be floating point .* got torch.int64"),
    "valid-dtype": ({"valid": VALID.int()}, r"`valid` must be torch.bool of shape \(2, 7\), got torch.int32 \(2, 7\)"),
    "valid-shape": ({"valid": VALID[:1]}, r"`valid` must be torch.bool of shape \(2, 7\), got torch.bool \(1, 7\)"),
    "valid-device": ({"valid": VALID.to("meta")}, "`valid` must be on keys' device cpu, got meta"),
    "weights-shape": (
        with_weights("task_down", WEIGHTS.task_up),
        r"`weights.task_down` must have a weight \(16, 64\) and a bias \(16,\), got \(64, 16\) and \(64,\)",
    ),
    "weights-device": (
        with_weights("router_out", LinearWeights(*(x.to("meta") for x in WEIGHTS.router_out))),
        "`weights.router_out` must be on keys' device cpu, got meta",
    ),
    "mean-alone": ({"deviation": None}, "`deviation` must be given exactly when `mean` is, got one of them"),
    "mean-shape": ({"mean": torch.zeros(16)}, r"`mean` must have shape \(2, 16\), got \(16,\)"),
    "deviation-device": (
        {"deviation": torch.ones(2, 16, device="meta")},
        "`deviation` must be on keys' device cpu, got meta",
    ),
    "name": (
        {"implementation": "cuda"},
        r"`implementation` must be None or one of \('reference', 'triton'\), got 'cu",
    ),
    "float64": (
        {"keys": KEYS.double(), "implementation": "triton"},
        "`implementation` must compute the call, got 'triton': it takes fp16, bf16 and fp32, not torch.float64",
    ),
    "head-dim": (
        dict(zip(("keys", "valid", "weights"), make_inputs(head_dim=257)[0]))
        | {"mean": None, "deviation": None, "implementation": "triton"},
        "got 'triton': it takes a head_dim up to 256, not 257",
    ),
    "gradient": (
        {"keys": torch.zeros_like(KEYS, requires_grad=True), "implementation": "triton"},
        "got 'triton': it has no backward, and an input requires a gradient",
    ),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused(wrong, message):
    inputs, options = make_inputs()
    with pytest.raises(ValueError, match=message):
        router(**dict(zip(("keys", "valid", "weights"), inputs)) | options | wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=["fp32-weights", "bf16-weights"])
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_on_a_gpu(head_dim, sequences, weights_dtype):
    sizes = {"tokens": 200, "heads": 8, "head_dim": head_dim, "hidden": 4 * head_dim, "sequences": sequences}
    assert_accurate(*make_inputs(**sizes, weights_dtype=weights_dtype, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.gpu
def test_replayed_graph_gives_what_a_call_gives():
    (keys, valid, weights), options = make_inputs(heads=8, head_dim=128, hidden=512, device="cuda")
    router(keys, valid, weights, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = router(keys, valid, weights, **options)
    for seed in (1, 2):
        keys.copy_(make_inputs(heads=8, head_dim=128, hidden=512, seed=seed)[0][0].nan_to_num())
        graph.replay()
        called = router(keys, valid, weights, **options)
        assert torch.equal(replayed.logits, called.logits)
        assert torch.equal(replayed.gate, called.gate)
