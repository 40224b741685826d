"""The hard mix of two outputs and its gradients."""

import pytest
import torch
from numerics import assert_equal_in_float64, make_like

from elastic_kernels.routed_attention.reference import mix_by_gate


BATCH, HEADS, KV_HEADS, TOKENS, HEAD_DIM = 2, 6, 2, 5, 3
GATE = [[0, 1], [1, 0], [1, 1]]
BOUNDS = [0, 2, 5, 10]
LAYOUTS = pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])


def make_case(packed, dtype=torch.float64):
    """gate, retrieval, sparse, cu_seqlens, and the gate of every token and query head `[B, Hq, S, 1]`."""
    retrieval = make_like(torch.empty(BATCH, HEADS, TOKENS, HEAD_DIM, dtype=torch.float64), seed=1)
    sparse = make_like(retrieval, seed=2)
    gate = torch.tensor(GATE if packed else GATE[:BATCH], dtype=dtype)
    return gate, retrieval, sparse, torch.tensor(BOUNDS) if packed else None


def spread(gate, packed):
    """The gate of every token and query head `[B, Hq, S, 1]`, token by token."""
    segments = [[0, 0, 1, 1, 1], [2] * 5] if packed else [[0] * 5, [1] * 5]
    group = HEADS // KV_HEADS
    rows = [[[gate[n, h // group] for n in row] for h in range(HEADS)] for row in segments]
    return torch.stack([torch.stack([torch.stack(head) for head in row]) for row in rows])[..., None]


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64], ids=["bool", "int", "float"])
def test_selects_by_sequence_and_group(packed, dtype):
    gate, retrieval, sparse, cu_seqlens = make_case(packed, dtype)
    expected = torch.where(spread(gate, packed).bool(), sparse, retrieval)
    assert torch.equal(mix_by_gate(gate, retrieval, sparse, cu_seqlens), expected)


@LAYOUTS
def test_gradients_are_those_of_the_weighted_sum(packed):
    gate, retrieval, sparse, cu_seqlens = make_case(packed)
    inputs = [tensor.requires_grad_() for tensor in (gate, retrieval, sparse)]
    weight = spread(gate, packed)
    weighted = (1 - weight) * retrieval + weight * sparse
    grad = make_like(weighted)
    expected = torch.autograd.grad(weighted, inputs, grad)
    actual = torch.autograd.grad(mix_by_gate(gate, retrieval, sparse, cu_seqlens), inputs, grad)
    for name, one, other in zip(("gate", "retrieval", "sparse"), actual, expected):
        assert_equal_in_float64(one, other, what=f"gradient of {name}")


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=["bool", "float"])
def test_gradcheck_of_the_outputs(packed, dtype):
    gate, retrieval, sparse, cu_seqlens = make_case(packed, dtype)
    inputs = (retrieval.requires_grad_(), sparse.requires_grad_())
    assert torch.autograd.gradcheck(lambda r, s: mix_by_gate(gate, r, s, cu_seqlens), inputs)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=["bool", "float"])
def test_what_the_other_mode_holds_reaches_neither_output_nor_gradients(dtype):
    gate, retrieval, sparse, _ = make_case(packed=False, dtype=dtype)
    selected = spread(gate, packed=False).bool()
    retrieval = retrieval.masked_fill(selected, torch.nan).requires_grad_()
    sparse = sparse.masked_fill(~selected, torch.inf).requires_grad_()
    output = mix_by_gate(gate, retrieval, sparse)
    grads = torch.autograd.grad(output.square().sum(), (retrieval, sparse))
    for name, tensor in zip(("output", "gradient of retrieval", "gradient of sparse"), (output, *grads)):
        assert tensor.isfinite().all(), f"{name} is not finite"


def test_gate_gradient_is_summed_in_float32_for_half_outputs():
    size = (1, 1, 4097, 1)  # bfloat16 has no 4097
    retrieval, sparse = torch.zeros(size, dtype=torch.bfloat16), torch.ones(size, dtype=torch.bfloat16)
    gate = torch.ones(1, 1, requires_grad=True)
    mix_by_gate(gate, retrieval, sparse).float().sum().backward()
    assert gate.grad.item() == 4097
