"""`routed_attention`: each head of each sequence runs the mode its gate names, forward and backward."""

import pytest
import torch
from numerics import assert_equal_in_float64, make_like, make_qkv
from ops.dense import dense_attention, mode_mask

from elastic_kernels import KeptBlocks, block_selection, routed_attention


SIZES = {"sink_size": 3, "window_size": 9}
PAIRS = pytest.mark.parametrize("mode_pair", ["FA-SSA", "FA-XA", "XA-SSA"])
LAYOUTS = pytest.mark.parametrize(
    "where",
    [{}, {"start": torch.tensor([7, 31])}, {"cu_seqlens": torch.tensor([0, 40, 64, 128])}],
    ids=["rows", "padded", "packed"],
)


def make_case(mode_pair, where):
    """Inputs, a gate in which both modes occur, the arguments, and the dense mask of each mode."""
    query, key, value = make_qkv(batch=2, length=64, requires_grad=True)
    gate = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    gate = gate[: len(where["cu_seqlens"]) - 1 if "cu_seqlens" in where else 2].requires_grad_()
    kept = None
    if "XA" in mode_pair:
        kept = block_selection(query, key, block_size=8, stride=4, threshold=0.5, **where)
    masks = [mode_mask(mode, query, key, **SIZES, kept_blocks=kept, **where) for mode in mode_pair.split("-")]
    assert not torch.equal(*masks), "the two modes must differ for this test to say anything"
    return query, key, value, gate, {"mode_pair": mode_pair, **SIZES, "kept_blocks": kept, **where}, masks


def spread(gate, where):
    """The gate of every token and query head `[2, 4, 64, 1]`."""
    if "cu_seqlens" in where:
        lengths = where["cu_seqlens"].diff().tolist()
        tokens = torch.cat([row.expand(length, -1) for row, length in zip(gate, lengths)]).view(2, 64, 2)
    else:
        tokens = gate[:, None].expand(-1, 64, -1)
    return torch.repeat_interleave(tokens.transpose(1, 2), 2, dim=1)[..., None]


@PAIRS
@LAYOUTS
def test_output_lse_and_gradients(mode_pair, where):
    query, key, value, gate, arguments, masks = make_case(mode_pair, where)
    output, lse = routed_attention(query, key, value, gate, **arguments, return_lse=True)

    (retrieval, retrieval_lse), (sparse, sparse_lse) = (dense_attention(query, key, value, mask) for mask in masks)
    weight = spread(gate, where)
    expected = (1 - weight) * retrieval + weight * sparse
    assert_equal_in_float64(output, expected, what="output")
    expected_lse = torch.where(weight[..., 0].bool(), sparse_lse, retrieval_lse)
    assert_equal_in_float64(lse, expected_lse.detach(), what="lse")

    inputs, grad = (query, key, value, gate), make_like(output)
    actual_grads, expected_grads = (torch.autograd.grad(result, inputs, grad) for result in (output, expected))
    for name, one, other in zip(("query", "key", "value", "gate"), actual_grads, expected_grads):
        assert_equal_in_float64(one, other, what=f"gradient of {name}")


@PAIRS
@pytest.mark.parametrize("side", [0, 1], ids=["retrieval", "sparse"])
def test_one_mode_for_all_heads_is_that_mode(mode_pair, side):
    query, key, value, _, arguments, masks = make_case(mode_pair, {})
    gate = torch.full((2, 2), side, dtype=torch.bool)
    expected, _ = dense_attention(query, key, value, masks[side])
    assert_equal_in_float64(routed_attention(query, key, value, gate, **arguments), expected)


def test_lse_carries_no_gradient():
    *inputs, gate, arguments, _ = make_case("FA-SSA", {})
    _, lse = routed_attention(*inputs, gate, **arguments, return_lse=True)
    assert not lse.requires_grad


def test_query_offset_sees_the_earliest_keys():
    query, key, value = make_qkv(batch=2, length=64, query_length=1)
    value[:, :, :3] += 1000.0
    gate = torch.tensor([[False, True], [True, False]])
    output = routed_attention(query, key, value, gate, mode_pair="FA-SSA", **SIZES)
    assert (output > 1.0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
def test_output_has_the_query_dtype_and_lse_float32(dtype):
    query, key, value = make_qkv(dtype=dtype)
    gate = torch.tensor([[0, 1]])
    output, lse = routed_attention(query, key, value, gate, mode_pair="FA-SSA", **SIZES, return_lse=True)
    assert (output.dtype, lse.dtype) == (dtype, torch.float32)


def test_compiles_without_a_graph_break():
    query, key, value, gate, arguments, _ = make_case("FA-SSA", {})

    def run(query, key, value, gate):
        return routed_attention(query, key, value, gate, **arguments)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    (expected,) = torch.autograd.grad(run(query, key, value, gate).square().sum(), gate)
    (actual,) = torch.autograd.grad(compiled(query, key, value, gate).square().sum(), gate)
    assert_equal_in_float64(actual, expected, what="gradient of gate")


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_blocks_that_nobody_asked_for_leave_the_diagonal(implementation):
    query, key, value = make_qkv(length=70, dtype=torch.float32)
    blocks = torch.ones(1, 4, 5, 5, dtype=torch.bool).tril()
    kept = KeptBlocks.from_mask(blocks, 16)
    kept.counts[:, 2:] = 0  # the second key-value head's
    diagonal = KeptBlocks.from_mask(
        torch.cat([blocks[:, :2], torch.eye(5, dtype=torch.bool).expand(1, 2, -1, -1)], 1), 16
    )
    options = {"mode_pair": "FA-XA", "sink_size": 0, "window_size": 1, "implementation": implementation}
    gate = torch.ones(1, 2, dtype=torch.bool)
    unlisted, listed = (routed_attention(query, key, value, gate, kept_blocks=x, **options) for x in (kept, diagonal))
    torch.testing.assert_close(unlisted, listed, rtol=1e-5, atol=1e-6)
