"""Gradients of the fused kernels against float64 autograd: interpreted, or on a GPU in a tier of their own."""

import pytest
import torch
from numerics import assert_as_accurate_as, make_like, make_qkv
from ops import cases
from ops.dense import dense_attention, mode_mask, random_kept_blocks

from elastic_kernels import KeptBlocks, routed_attention
from elastic_kernels.routed_attention.mix import mix_by_gate


SIZES = {"sink_size": 3, "window_size": 20}
DEFAULTS = {"batch": 1, "heads": 2, "kv_heads": 2, "head_dim": 16, "mode_pair": "FA-SSA", "block_size": 32}
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are either interpreted or compiled")
# Under the interpreter a tile has 32 queries and 16 keys.
CASES = {
    "one-token": {"length": 1},
    "two-tokens": {"length": 2},
    "below-a-tile": {"length": 31},
    "one-tile": {"length": 32},
    "above-a-tile": {"length": 33},
    "several-tiles": {"length": 97},
    "groups-12-to-2": {"heads": 12, "length": 20},
    "groups-9-to-3": {"heads": 9, "kv_heads": 3, "length": 20},
    "groups-8-to-2": {"heads": 8, "length": 20},
    "head-dim-64": {"length": 33, "head_dim": 64},
    "head-dim-80": {"length": 33, "head_dim": 80},
    "all-retrieval": {"length": 40, "gate": [[0, 0]]},
    "all-sparse": {"length": 40, "gate": [[1, 1]]},
    "sparse-first": {"length": 40, "gate": [[1, 0]]},
    "no-sink": {"length": 60, "sink_size": 0},
    "window-of-one": {"length": 60, "window_size": 1},
    "sink-beyond-window": {"length": 60, "sink_size": 40, "window_size": 5},
    "window-beyond-length": {"length": 40, "window_size": 2**40},
    "chunk": {"length": 90, "query_length": 23},
    "one-query": {"length": 70, "query_length": 1},
    "padded": {"length": 50, "batch": 2, "start": [0, 29]},
    "nothing-but-padding": {"length": 20, "batch": 2, "start": [20, 0]},
    "padded-chunk": {"length": 70, "query_length": 37, "batch": 2, "start": [55, 10]},
    "packed": {"length": 36, "batch": 2, "cu_seqlens": [0, 3, 36, 72]},
    "empty-segment": {"length": 36, "cu_seqlens": [0, 18, 18, 36]},
    "softcap": {"length": 40, "softcap": 2.0},
    "sinks": {"length": 40, "sinks": True},
    "sinks-padded": {"length": 40, "sinks": True, "batch": 2, "start": [0, 11]},
    "XA-groups": {"heads": 4, "length": 40, "mode_pair": "XA-SSA"},
    "XA-blocks-below-a-tile": {"length": 40, "mode_pair": "XA-SSA", "block_size": 16},
    **cases.XA_CASES,
}
GPU_CASES = {
    "1": {"length": 1},
    "127": {"length": 127},
    "129": {"length": 129, "batch": 2},
    "507": {"length": 507, "heads": 12},
    "1025": {"length": 1025, "heads": 8},
    "softcap": {"length": 400, "softcap": 20.0},
    **cases.GPU_CASES,
}

# What the backward launches for the gradient of one input, beside the inner products.
LAUNCHES = {"query": {"dq"}, "key": {"dkv"}, "value": {"dkv"}, "gate": {"forward"}, "sinks": set()}


def make_case(case, dtype, device="cpu"):
    """Inputs by name in `dtype`, each with a gradient, and the other arguments."""
    case = DEFAULTS | case
    names = ("batch", "heads", "kv_heads", "length", "query_length", "head_dim")
    qkv = make_qkv(**{name: case[name] for name in names if name in case}, dtype=dtype)
    # Views as a projection leaves them: heads inside tokens.
    inputs = dict(zip(("query", "key", "value"), (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv)))
    sequences = len(case["cu_seqlens"]) - 1 if "cu_seqlens" in case else case["batch"]
    alternating = (torch.arange(sequences * case["kv_heads"]) % 2).view(sequences, -1)
    inputs["gate"] = torch.tensor(case["gate"]) if "gate" in case else alternating
    if "sinks" in case:
        inputs["sinks"] = torch.linspace(-1, 1, case["heads"])
    inputs = {name: x.to(device, dtype).requires_grad_() for name, x in inputs.items()}
    options = {name: case.get(name, size) for name, size in SIZES.items()}
    options |= {"mode_pair": case["mode_pair"], "softcap": case.get("softcap")}
    options |= {n: torch.tensor(case[n], device=device) for n in ("start", "cu_seqlens") if n in case}
    if "XA" in case["mode_pair"]:
        blocks = [-(-x.shape[2] // case["block_size"]) for x in qkv[:2]]
        kept = random_kept_blocks(sequences, case["heads"], *blocks, case["block_size"])
        options["kept_blocks"] = KeptBlocks(kept.indices.to(device), kept.counts.to(device), kept.block_size)
    return inputs, options


def both_modes(query, key, value, *, sinks=None, mode_pair, softcap, **where):
    """Output of each mode by dense attention in the inputs' dtype."""
    masks = [mode_mask(mode, query, key, **where) for mode in mode_pair.split("-")]
    return [dense_attention(query, key, value, mask, softcap=softcap, sinks=sinks)[0] for mask in masks]


def dense(gate, **arguments):
    return mix_by_gate(gate, *both_modes(**arguments), arguments.get("cu_seqlens"))


def gradients(attend, inputs, options, grad):
    output = attend(**inputs, **options)
    return dict(zip(inputs, torch.autograd.grad(output, list(inputs.values()), grad.to(output))))


def magnitudes(reference, grad, outputs):
    """What the rounding of each gradient is relative to: sums may cancel, to nothing for a single key."""
    largest = max(reference[name].abs().max() for name in ("query", "key", "value"))
    summed = (grad * (outputs[0].abs() + outputs[1].abs())).norm()
    return {name: summed if name in ("gate", "sinks") else largest for name in reference}


def fused(implementation="triton"):
    return lambda **arguments: routed_attention(**arguments, implementation=implementation)


def assert_accurate(case, dtype, *, device="cpu", implementation="triton"):
    inputs, options = make_case(case, dtype)
    grad = make_like(inputs["query"])
    actual = gradients(fused(implementation), *make_case(case, dtype, device), grad)
    eager = gradients(dense, inputs, options, grad)
    doubles = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    reference = gradients(dense, doubles, options, grad.double())
    doubles.pop("gate")
    sizes = magnitudes(reference, grad.double(), both_modes(**doubles, **options))
    for name, size in sizes.items():
        one, other, exact = (grads[name].cpu() + size.to(grads[name].dtype) for grads in (actual, eager, reference))
        units = 8 if device == "cuda" and dtype == torch.float32 else 2
        assert_as_accurate_as(one, exact, other, what=f"gradient of {name}", units=units)


@ON_CPU
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_in_float32(case):
    assert_accurate(case, torch.float32)


@ON_CPU
@pytest.mark.parametrize("name", ["several-tiles", "padded", "XA-SSA"])
def test_gradients_in_float16(name):
    assert_accurate(CASES[name], torch.float16)


@ON_CPU
@pytest.mark.parametrize("name", ["above-a-tile", "empty-segment", "XA-groups"])
def test_the_same_bits_twice(name):
    inputs, options = make_case(CASES[name], torch.float32)
    grad = make_like(inputs["query"])
    one, other = (gradients(fused(), inputs, options, grad) for _ in range(2))
    assert all(torch.equal(one[key], other[key]) for key in one)


@ON_CPU
def test_views_and_expanded_gradients():
    query, key, value = make_qkv(length=20, heads=2, dtype=torch.float32)
    everything = torch.cat([query, key, value], 1).transpose(1, 2).contiguous()
    channels_apart = torch.stack([query, query], -1)[..., 0]
    gate = torch.tensor([[0.0, 1.0]])
    views = everything.transpose(1, 2).split(2, 1)
    grads = []
    for inputs in (views, (channels_apart, key, value), (query, key, value)):
        inputs = [x.detach().requires_grad_() for x in inputs]
        output = routed_attention(*inputs, gate, mode_pair="FA-SSA", **SIZES, implementation="triton")
        grads.append(torch.autograd.grad(output.sum(), inputs))
    for name, *others, plain in zip(("query", "key", "value"), *grads):
        assert all(torch.equal(other, plain) for other in others), f"gradient of {name}"


@ON_CPU
@pytest.mark.parametrize("wanted", LAUNCHES)
def test_only_wanted_gradients_are_computed(monkeypatch, wanted):
    from elastic_kernels.routed_attention import backward, forward

    inputs, options = make_case({"length": 20, "sinks": True}, torch.float32)
    inputs = {name: x.detach().requires_grad_(name == wanted) for name, x in inputs.items()}
    ran = []

    def watch(module, function, name):
        original = getattr(module, function)
        monkeypatch.setattr(module, function, lambda *args, **options: ran.append(name) or original(*args, **options))

    watch(forward, "routed_attention_forward", "forward")
    output = fused()(**inputs, **options)
    assert ran == ["forward"]
    ran.clear()
    for name in ("dq", "dkv"):
        watch(backward, f"launch_{name}", name)
    output.sum().backward()
    assert set(ran) == LAUNCHES[wanted]


@ON_CPU
def test_lse_carries_no_gradient():
    inputs, options = make_case({"length": 20}, torch.float32)
    output, lse = fused()(**inputs, **options, return_lse=True)
    assert output.requires_grad
    assert not lse.requires_grad


@ON_CPU
def test_nothing_but_the_inputs_output_and_lse_waits_for_the_backward():
    inputs, options = make_case({"length": 20}, torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        output, lse = fused()(**inputs, **options, return_lse=True)
    held = {x.data_ptr() for x in saved}
    assert held == {x.data_ptr() for x in (*inputs.values(), output, lse)}


@ON_CPU
def test_query_lists_are_the_transposed_kept_blocks():
    from elastic_kernels.routed_attention._query_lists import query_lists

    kept = random_kept_blocks(2, 2, 5, 7, 16)
    transposed = KeptBlocks(*query_lists(kept), 16)
    assert torch.equal(transposed.to_mask(), kept.to_mask().transpose(2, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "hopper"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES)
def test_gradients_on_a_gpu(case, dtype, head_dim, implementation):
    if implementation == "hopper" and "softcap" in case:
        pytest.skip("the Hopper kernel has no softcap")
    case = {"sink_size": 100, "window_size": 200, "head_dim": head_dim} | case
    assert_accurate(case, dtype, device="cuda", implementation=implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 80, 96, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_every_head_dim_on_a_gpu(head_dim, dtype):
    case = {"length": 300, "heads": 4, "head_dim": head_dim, "sink_size": 10, "window_size": 100}
    assert_accurate(case, dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("mode_pair", ["FA-SSA", "FA-XA", "XA-SSA"])
@pytest.mark.parametrize("length", [1024, 4096])
def test_long_gradients_on_a_gpu(length, mode_pair):
    case = {"length": length, "heads": 8, "head_dim": 128, "mode_pair": mode_pair, "block_size": 128}
    inputs, options = make_case(case | {"sink_size": 128, "window_size": 512}, torch.bfloat16, "cuda")
    grad = make_like(inputs["query"].cpu())
    one, other = (gradients(fused(None), inputs, options, grad) for _ in range(2))
    singles = {name: x.detach().float().requires_grad_() for name, x in inputs.items()}
    reference = gradients(fused("reference"), singles, options, grad)
    for name, actual in one.items():
        assert torch.equal(actual, other[name]), f"gradient of {name} differs from run to run"
        error = ((actual.float() - reference[name]).norm() / reference[name].norm()).item()
        assert error < 0.02, f"gradient of {name} is off by {error:.1e}"


@pytest.mark.gpu
def test_above_32k_tokens():
    shape = {"length": 40_000, "heads": 4, "head_dim": 128, "sink_size": 128, "window_size": 2048}
    inputs, options = make_case(shape, torch.bfloat16, "cuda")
    grads = gradients(fused(None), inputs, options, make_like(inputs["query"].cpu()))
    for name, grad in grads.items():
        assert grad.isfinite().all(), f"gradient of {name} is not finite"
        assert grad.any(), f"gradient of {name} is zero"


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    fused_qkv = torch.randn(1, 70_000, 48, 768, device="cuda", dtype=torch.bfloat16)[..., :128].transpose(1, 2)
    inputs = [x.detach().requires_grad_() for x in fused_qkv.split([32, 8, 8], 1)]
    gate = torch.tensor([[0.0, 1.0] * 4], device="cuda", requires_grad=True)
    grads = []
    for query, key, value in (inputs, [x.detach().contiguous().requires_grad_() for x in inputs]):
        output = routed_attention(query, key, value, gate, mode_pair="FA-SSA", sink_size=128, window_size=2048)
        grads.append(torch.autograd.grad(output.square().sum(), (query, key, value, gate)))
    for name, one, other in zip(("query", "key", "value", "gate"), *grads):
        assert torch.equal(one, other), f"gradient of {name}"
