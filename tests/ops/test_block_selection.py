"""XAttention's block selection against a token-by-token computation, and the shares it computes."""

import pytest
import torch
from numerics import make_qkv
from ops.dense import brute_force_kept, random_kept_blocks, sequences_of

from elastic_kernels import KeptBlocks, block_selection
from elastic_kernels.block_selection import reference


SIZES = {"block_size": 8, "stride": 4, "threshold": 0.6}


def check(query, key, *, start=None, cu_seqlens=None, **kwargs):
    kwargs = {**SIZES, **kwargs}
    kept = block_selection(query, key, start=start, cu_seqlens=cu_seqlens, **kwargs)
    for n, (row, begin, end) in enumerate(sequences_of(query.shape[0], key.shape[2], start, cu_seqlens)):
        first_query = max(begin - (key.shape[2] - query.shape[2]), 0)
        last_query = end - (key.shape[2] - query.shape[2])
        expected = brute_force_kept(query[row, :, first_query:last_query], key[row, :, begin:end], **kwargs)
        rows, columns = expected.shape[1:]
        assert torch.equal(kept.to_mask()[n, :, :rows, :columns], expected), f"sequence {n} keeps other blocks"
        assert kept.to_mask()[n].sum() == expected.sum(), f"sequence {n} keeps blocks beyond its end"
    return kept


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 31, 64, 70])
def test_length(length):
    check(*make_qkv(length=length)[:2])


@pytest.mark.parametrize("threshold", [0.05, 0.5, 0.9, 0.99])
def test_threshold(threshold):
    check(*make_qkv(length=70)[:2], threshold=threshold)


@pytest.mark.parametrize(("block_size", "stride"), [(8, 1), (8, 8), (12, 4), (64, 16)])
def test_block_size_and_stride(block_size, stride):
    check(*make_qkv(length=70)[:2], block_size=block_size, stride=stride)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 1), (9, 3), (4, 4)], ids=["6:1", "9:3", "4:4"])
def test_query_heads_read_their_own_group(heads, kv_heads):
    check(*make_qkv(heads=heads, kv_heads=kv_heads, length=50)[:2])


def test_scale():
    check(*make_qkv(length=70)[:2], scale=2.0)


def test_blocks_count_from_the_first_valid_token():
    check(*make_qkv(batch=4, length=45)[:2], start=torch.tensor([0, 3, 44, 45]))


def test_padding_content_is_never_read():
    query, key, _ = make_qkv(length=45)
    start = torch.tensor([11])
    expected = block_selection(query, key, start=start, **SIZES)
    query[:, :, :11] = torch.nan
    key[:, :, :11] = torch.nan
    assert torch.equal(block_selection(query, key, start=start, **SIZES).to_mask(), expected.to_mask())


def test_packed_segments_select_on_their_own():
    check(*make_qkv(batch=2, length=50)[:2], cu_seqlens=torch.tensor([0, 33, 34, 50, 50, 75, 100]))


def test_queries_on_a_block_boundary():
    check(*make_qkv(length=53, query_length=21)[:2])


def test_chunks_that_end_on_blocks_keep_what_the_whole_keeps():
    query, key, _ = make_qkv(batch=2, length=61)
    start = torch.tensor([0, 5])
    whole = block_selection(query[1:], key[1:], start=start[1:], **SIZES).to_mask()
    for first, stop in ((0, 29), (29, 45), (45, 61)):
        chunk = block_selection(query[1:, :, first:stop], key[1:, :, :stop], start=start[1:], **SIZES).to_mask()
        row, end = max(first - 5, 0) // 8, (stop - 5) // 8
        rows, columns = end - row, end
        chunk = chunk[:, :, :rows, :columns]
        assert torch.equal(chunk, whole[:, :, row : row + rows, :columns]), f"chunk at {first}"


def test_query_offset_inside_a_block_is_refused():
    with pytest.raises(ValueError, match=r"`query` must begin on a block of 8 tokens.*got an offset of 3"):
        block_selection(*make_qkv(length=20, query_length=17)[:2], **SIZES)


def test_padded_query_offset_inside_a_block_is_refused():
    with pytest.raises(ValueError, match=r"`query` must begin on a block of 8 tokens.*got an offset of 5 in row 1"):
        block_selection(*make_qkv(batch=2, length=24, query_length=16)[:2], start=torch.tensor([0, 3]), **SIZES)


def test_other_heads_keep_nothing():
    query, key, _ = make_qkv(batch=2, length=50)
    heads = torch.tensor([[True, False], [False, False]])
    kept = block_selection(query, key, heads=heads, **SIZES)
    expected = block_selection(query, key, **SIZES).to_mask()
    expected[0, 2:] = False
    expected[1] = False
    assert torch.equal(kept.to_mask(), expected)


def test_ties_go_to_the_lower_block():
    query, key, _ = make_qkv(length=80)
    kept = block_selection(query, torch.zeros_like(key), block_size=8, stride=4, threshold=0.5).to_mask()
    last_row = kept[0, 0, -1].tolist()
    # Ten blocks of nearly equal mass; the diagonal block's is lower, so four others besides it reach one half.
    assert last_row == [True] * 5 + [False] * 4 + [True]


def test_a_threshold_met_exactly_needs_no_further_block():
    query, key, _ = make_qkv(length=4)
    kept = block_selection(query, torch.zeros_like(key), block_size=1, stride=1, threshold=0.5).to_mask()
    assert kept[0, 0, -1].tolist() == [True, False, False, True]


def test_batches_of_query_blocks_do_not_change_the_result(monkeypatch):
    query, key, _ = make_qkv(length=70)
    whole = block_selection(query, key, **SIZES).to_mask()
    monkeypatch.setattr(reference, "_MAX_SCORES", 1)
    assert torch.equal(block_selection(query, key, **SIZES).to_mask(), whole)


def test_half_precision_is_scored_in_float32():
    query, key, _ = make_qkv(length=70, dtype=torch.bfloat16)
    expected = block_selection(query.float(), key.float(), **SIZES).to_mask()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(block_selection(query, key, **SIZES).to_mask(), expected)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 37, 40])
def test_computed_share_counts_pairs(length):
    blocks = 5
    kept = random_kept_blocks(1, 3, blocks, blocks, block_size=8)
    share = kept.computed_share(torch.tensor([length]))
    for head in range(3):
        pairs = [(i, j) for i in range(length) for j in range(i + 1)]
        computed = sum(bool(kept.to_mask()[0, head, i // 8, j // 8]) for i, j in pairs)
        assert share[0, head].item() == pytest.approx(computed / len(pairs), rel=1e-6), f"head {head}"


def test_computed_share_of_everything_and_of_an_empty_sequence_is_one():
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()
    assert KeptBlocks.from_mask(mask, 8).computed_share(torch.tensor([30, 0])).tolist() == [[1.0], [1.0]]


def test_computed_share_counts_beyond_float32():
    blocks = 2048  # 262,144 tokens: more pairs than float32 can count one by one
    mask = torch.eye(blocks, dtype=torch.bool).expand(1, 1, -1, -1)
    share = KeptBlocks.from_mask(mask, 128).computed_share(torch.tensor([blocks * 128]))
    assert share.item() == pytest.approx(129 / (blocks * 128 + 1), rel=1e-6)
