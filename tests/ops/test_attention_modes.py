"""Full, streaming and block-sparse attention against dense masks in float64."""

import functools

import pytest
import torch
from numerics import assert_as_accurate_as, assert_equal_in_float64, make_like, make_qkv
from ops.dense import dense_attention, mode_mask, random_kept_blocks

from elastic_kernels import KeptBlocks
from elastic_kernels.routed_attention import reference
from elastic_kernels.routed_attention.reference import block_sparse_attention, full_attention, streaming_attention


BLOCK = 16
MODES = pytest.mark.parametrize("mode", ["FA", "SSA", "XA"])


def run_both(mode, query, key, value, *, sink_size=3, window_size=9, start=None, cu_seqlens=None, **kwargs):
    """(output, lse) of the reference and of the dense definition."""
    where = {"start": start, "cu_seqlens": cu_seqlens}
    if mode == "FA":
        actual = full_attention(query, key, value, **where, **kwargs)
        mask = mode_mask(mode, query, key, **where)
    elif mode == "SSA":
        sizes = {"sink_size": sink_size, "window_size": window_size}
        actual = streaming_attention(query, key, value, **sizes, **where, **kwargs)
        mask = mode_mask(mode, query, key, **sizes, **where)
    else:
        sequences = query.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        blocks = [-(-tokens // BLOCK) for tokens in (query.shape[2], key.shape[2])]
        kept = random_kept_blocks(sequences, query.shape[1], *blocks, BLOCK)
        actual = block_sparse_attention(query, key, value, kept_blocks=kept, **where, **kwargs)
        mask = mode_mask(mode, query, key, kept_blocks=kept, **where)
    return actual, dense_attention(query, key, value, mask, **kwargs)


def check(mode, query, key, value, **kwargs):
    (output, lse), (expected, expected_lse) = run_both(mode, query, key, value, **kwargs)
    assert_equal_in_float64(output, expected, what="output")
    assert_equal_in_float64(lse, expected_lse, what="lse")


@MODES
@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 2), (9, 3), (8, 2), (4, 4)], ids=["12:2", "9:3", "8:2", "4:4"])
def test_query_heads_read_their_own_group(mode, heads, kv_heads):
    check(mode, *make_qkv(heads=heads, kv_heads=kv_heads))


@MODES
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_head_dim(mode, head_dim):
    check(mode, *make_qkv(head_dim=head_dim))


@MODES
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 507, 1025])
def test_length(mode, length):
    check(mode, *make_qkv(heads=2, kv_heads=1, length=length))


@pytest.mark.parametrize(
    ("sink_size", "window_size"),
    [(0, 1), (0, 7), (5, 1), (4, 40), (4, 1000), (1000, 1)],
    ids=["self-only", "no-sink", "sink-and-self", "window-is-length", "window-beyond", "sink-beyond"],
)
def test_streaming_sizes(sink_size, window_size):
    check("SSA", *make_qkv(), sink_size=sink_size, window_size=window_size)


@MODES
def test_left_padding_never_counts(mode):
    start = torch.tensor([0, 5, 39, 40])
    check(mode, *make_qkv(batch=4), start=start)


@MODES
def test_padding_is_zero_and_its_content_is_never_read(mode):
    query, key, value = make_qkv(batch=3)
    start = torch.tensor([17, 39, 40])
    for row, first in enumerate(start.tolist()):
        for tensor in (query, key, value):
            tensor[row, :, :first] = torch.nan
    (output, lse), _ = run_both(mode, query, key, value, start=start)
    padded = torch.arange(40) < start[:, None]
    assert (output.transpose(1, 2)[padded] == 0).all()
    assert (lse.transpose(1, 2)[padded] == -torch.inf).all()
    assert output.isfinite().all()


@MODES
def test_packed_segments_equal_separate_sequences(mode):
    query, key, value = make_qkv(batch=2, length=50)
    bounds = [0, 33, 34, 50, 50, 75, 100]
    check(mode, query, key, value, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


@MODES
@pytest.mark.parametrize("query_length", [1, 8, 24])
def test_queries_sit_at_the_end_of_the_keys(mode, query_length):
    check(mode, *make_qkv(batch=2, query_length=query_length))


@MODES
def test_query_offset_with_padding_inside_the_chunk(mode):
    start = torch.tensor([0, 16, 32, 40, 48])
    check(mode, *make_qkv(batch=5, length=48, query_length=16), start=start)


@MODES
def test_prefill_in_chunks_equals_prefill_in_one_go(mode):
    query, key, value = make_qkv(length=64)
    kept = random_kept_blocks(1, 4, 4, 4, BLOCK)
    run = {
        "FA": full_attention,
        "SSA": functools.partial(streaming_attention, sink_size=3, window_size=9),
        "XA": block_sparse_attention,
    }[mode]

    def blocks(rows):
        if mode != "XA":
            return {}
        return {"kept_blocks": KeptBlocks(kept.indices[:, :, rows], kept.counts[:, :, rows], BLOCK)}

    whole, _ = run(query, key, value, **blocks(slice(None)))
    for first in range(0, 64, 32):
        stop, rows = first + 32, slice(first // BLOCK, (first + 32) // BLOCK)
        chunk, _ = run(query[:, :, first:stop], key[:, :, :stop], value[:, :, :stop], **blocks(rows))
        assert_equal_in_float64(chunk, whole[:, :, first:stop], what=f"chunk at {first}")


@MODES
def test_softcap(mode):
    check(mode, *make_qkv(), softcap=0.7)


@MODES
def test_scale(mode):
    check(mode, *make_qkv(), scale=0.7)


@MODES
def test_sinks_join_the_denominator(mode):
    sinks = torch.tensor([-3.0, 0.0, 2.0, 1000.0], dtype=torch.float64)
    check(mode, *make_qkv(batch=2), sinks=sinks, start=torch.tensor([0, 11]))


@MODES
def test_views_of_a_fused_projection(mode):
    fused = make_like(torch.empty(2, 40, (4 + 2 + 2) * 16, dtype=torch.float64))
    query, key, value = (
        part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in fused.split([4 * 16, 2 * 16, 2 * 16], dim=-1)
    )
    assert not query.is_contiguous()
    check(mode, query, key, value, start=torch.tensor([0, 7]))


def test_streaming_window_over_everything_equals_full():
    query, key, value = make_qkv(length=200)
    output, _ = streaming_attention(query, key, value, sink_size=0, window_size=200)
    assert torch.equal(output, full_attention(query, key, value)[0])


def test_every_block_kept_equals_full():
    query, key, value = make_qkv(length=200)
    kept = KeptBlocks.from_mask(torch.ones(1, 4, 13, 13, dtype=torch.bool).tril(), BLOCK)
    output, _ = block_sparse_attention(query, key, value, kept_blocks=kept)
    assert torch.equal(output, full_attention(query, key, value)[0])


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(reference, "_MAX_SCORES", 1)


GRADIENT_CASES = pytest.mark.parametrize(
    "case",
    [
        {},
        {"softcap": 0.7},
        {"start": torch.tensor([0, 23])},
        {"query_length": 24, "start": torch.tensor([0, 23])},
        {"cu_seqlens": torch.tensor([0, 33, 34, 40, 80])},
    ],
    ids=["plain", "softcap", "padded", "offset", "packed"],
)


def check_gradients(mode, case, head_dim=16):
    case = dict(case)
    inputs = make_qkv(batch=2, query_length=case.pop("query_length", None), head_dim=head_dim, requires_grad=True)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 4.0], dtype=torch.float64, requires_grad=True)
    (output, lse), (expected, expected_lse) = run_both(mode, *inputs, sinks=sinks, **case)
    valid = lse.isfinite()
    grads, expected_grads = (
        torch.autograd.grad([o, l[valid]], [*inputs, sinks], [make_like(o), make_like(l[valid])])
        for o, l in ((output, lse), (expected, expected_lse))
    )
    for name, grad, expected_grad in zip(("query", "key", "value", "sinks"), grads, expected_grads):
        assert_equal_in_float64(grad, expected_grad, what=f"gradient of {name}")


@MODES
@GRADIENT_CASES
def test_gradients(mode, case):
    check_gradients(mode, case)


@MODES
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_gradients_of_head_dim(mode, head_dim):
    check_gradients(mode, {}, head_dim)


@MODES
@GRADIENT_CASES
def test_gradients_recomputed_chunk_by_chunk(mode, case, small_chunks):
    check_gradients(mode, case)


@MODES
def test_chunks_do_not_change_the_result(mode, small_chunks):
    check(mode, *make_qkv(batch=2, length=75), start=torch.tensor([0, 30]))


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_no_less_accurate_than_eager_in_the_same_dtype(mode, dtype):
    inputs = make_qkv(length=129, dtype=dtype, requires_grad=True)
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    (output, _), (eager, _) = run_both(mode, *inputs)
    _, (exact, _) = run_both(mode, *doubles)
    assert_as_accurate_as(output, exact, eager, what="output")
    grad = make_like(output)
    grads, eager_grads = torch.autograd.grad(output, inputs, grad), torch.autograd.grad(eager, inputs, grad)
    exact_grads = torch.autograd.grad(exact, doubles, grad.double())
    for name, *gradients in zip(("query", "key", "value"), grads, exact_grads, eager_grads):
        assert_as_accurate_as(*gradients, what=f"gradient of {name}")


@MODES
def test_autocast_does_not_lower_the_precision(mode):
    inputs = make_qkv(dtype=torch.float32)
    expected, _ = run_both(mode, *inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, _ = run_both(mode, *inputs)
    assert torch.equal(actual[0], expected[0])


def test_kept_blocks_that_miss_a_block_are_refused():
    kept = random_kept_blocks(1, 4, 2, 2, BLOCK)
    with pytest.raises(ValueError, match="`kept_blocks` must cover"):
        block_sparse_attention(*make_qkv(length=40), kept_blocks=kept)
