"""Every rule of the operators' arguments: a ValueError that names the argument, the rule and the value."""

from dataclasses import replace

import pytest
import torch
from numerics import make_qkv

from elastic_kernels import KeptBlocks, block_selection, routed_attention


QUERY, KEY, VALUE = make_qkv(batch=2, heads=4, kv_heads=2, length=12, head_dim=8)
KEPT = KeptBlocks.from_mask(torch.ones(2, 4, 3, 3, dtype=torch.bool).tril(), 4)
ELSEWHERE = torch.device("meta")
GOOD = {
    "query": QUERY,
    "key": KEY,
    "value": VALUE,
    "gate": torch.zeros(2, 2, dtype=torch.bool),
    "mode_pair": "FA-SSA",
    "sink_size": 2,
    "window_size": 4,
}
BOUNDS = torch.tensor([0, 12, 24])

# Shared by both operators: what is wrong -> (arguments, message).
SHARED = {
    "query-3d": ({"query": QUERY[0]}, r"`query` must be \[batch, heads, tokens, head_dim\], got shape \(4, 12, 8\)"),
    "key-3d": ({"key": KEY[0]}, r"`key` must be \[batch, heads, tokens, head_dim\], got shape \(2, 12, 8\)"),
    "query-int": ({"query": QUERY.long()}, "`query` must be a floating-point tensor, got torch.int64"),
    "key-dtype": ({"key": KEY.float()}, "`key` must have query's dtype torch.float64, got torch.float32"),
    "key-device": ({"key": KEY.to(ELSEWHERE)}, "`key` must be on query's device cpu, got meta"),
    "key-batch": ({"key": KEY[:1]}, "`key` must have query's batch size 2, got 1"),
    "key-head-dim": ({"key": KEY[..., :4]}, "`key` must have query's head_dim 8, got 4"),
    "heads": ({"query": QUERY[:, :3]}, "`query` heads must be a multiple of the 2 key heads, got 3"),
    "query-longer": ({"query": QUERY.repeat(1, 1, 2, 1)}, r"`query` must hold 1 to 12 tokens \(the key's\), got 24"),
    "query-empty": ({"query": QUERY[:, :, :0]}, r"`query` must hold 1 to 12 tokens \(the key's\), got 0"),
    "start-shape": ({"start": torch.zeros(3, dtype=torch.long)}, r"`start` must be integers of shape \(2,\), got .*3"),
    "start-dtype": ({"start": torch.zeros(2)}, r"`start` must be integers of shape \(2,\), got torch.float32"),
    "start-device": ({"start": BOUNDS[:2].to(ELSEWHERE)}, "`start` must be on query's device cpu, got meta"),
    "start-value": ({"start": torch.tensor([0, 13])}, "`start` must lie between 0 and the key length 12, got 13"),
    "both-layouts": ({"start": BOUNDS[:2], "cu_seqlens": BOUNDS}, "`start` must be None when `cu_seqlens` is given"),
    "bounds-shape": ({"cu_seqlens": BOUNDS[:1]}, "`cu_seqlens` must be one dimension of at least 2 integers, got"),
    "bounds-dtype": ({"cu_seqlens": BOUNDS.float()}, "`cu_seqlens` must be one dimension of at least 2 integers, got"),
    "bounds-device": ({"cu_seqlens": BOUNDS.to(ELSEWHERE)}, "`cu_seqlens` must be on query's device cpu, got meta"),
    "bounds-offset": (
        {"query": QUERY[:, :, :5], "cu_seqlens": BOUNDS},
        "`cu_seqlens` must come with as many queries as keys, got 5 and 12",
    ),
    "bounds-short": (
        {"cu_seqlens": torch.tensor([0, 12, 20])},
        "`cu_seqlens` must run from 0 to the 24 .* got 0 to 20",
    ),
    "bounds-order": (
        {"cu_seqlens": torch.tensor([0, 8, 4, 12, 24])},
        "`cu_seqlens` must not decrease, got 8 before 4",
    ),
    "bounds-crossing": ({"cu_seqlens": torch.tensor([0, 8, 24])}, "`cu_seqlens` must not cross a row of 12 .*8:24"),
}
ROUTED = {
    "implementation": ({"implementation": "cuda"}, "`implementation` must be None or one of .* got 'cuda'"),
    "mode-pair": ({"mode_pair": "SSA-FA"}, "`mode_pair` must be one of FA-SSA, FA-XA, XA-SSA, got 'SSA-FA'"),
    "value-dtype": ({"value": VALUE.half()}, "`value` must have query's dtype torch.float64, got torch.float16"),
    "value-shape": ({"value": VALUE[:, :1]}, r"`value` must have key's shape \(2, 2, 12, 8\), got \(2, 1, 12, 8\)"),
    "sink-negative": ({"sink_size": -1}, "`sink_size` must be an integer of at least 0, got -1"),
    "window-zero": ({"window_size": 0}, "`window_size` must be an integer of at least 1, got 0"),
    "window-float": ({"window_size": 4.0}, "`window_size` must be an integer of at least 1, got 4.0"),
    "gate-heads": ({"gate": torch.zeros(2, 4)}, r"`gate` must be .* = \(2, 2\), got \(2, 4\)"),
    "gate-segments": ({"cu_seqlens": torch.tensor([0, 4, 12, 24])}, r"`gate` must be .* = \(3, 2\), got \(2, 2\)"),
    "gate-device": ({"gate": torch.zeros(2, 2, device=ELSEWHERE)}, "`gate` must be on query's device cpu, got meta"),
    "gate-complex": (
        {"gate": torch.zeros(2, 2, dtype=torch.complex64)},
        "`gate` must be bool, integer or floating point, got torch.complex64",
    ),
    "blocks-missing": ({"mode_pair": "FA-XA"}, "`kept_blocks` must be given for a pair with XA, got None with FA-XA"),
    "blocks-unused": ({"kept_blocks": KEPT}, "`kept_blocks` must be None for a pair without XA, got one with FA-SSA"),
    "blocks-heads": (
        {"mode_pair": "XA-SSA", "kept_blocks": KeptBlocks(KEPT.indices[:, :2], KEPT.counts[:, :2], 4)},
        "`kept_blocks` must be for 2 sequences and 4 query heads, got lists of shape",
    ),
    "blocks-device": (
        {"mode_pair": "XA-SSA", "kept_blocks": KeptBlocks(KEPT.indices.to(ELSEWHERE), KEPT.counts.to(ELSEWHERE), 4)},
        "`kept_blocks` must be on query's device cpu, got meta",
    ),
    "softcap": ({"softcap": 0.0}, "`softcap` must be positive, got 0.0"),
    "sinks-shape": ({"sinks": torch.zeros(2)}, r"`sinks` must be floating point of shape \(4,\), got .*\(2,\)"),
    "sinks-dtype": (
        {"sinks": BOUNDS.new_zeros(4)},
        r"`sinks` must be floating point of shape \(4,\), got torch.int64",
    ),
    "sinks-device": ({"sinks": torch.zeros(4, device=ELSEWHERE)}, "`sinks` must be on query's device cpu, got meta"),
}
SELECTION = {
    "block-size": ({"block_size": 0}, "`block_size` must be an integer of at least 1, got 0"),
    "stride": ({"stride": 0}, "`stride` must be an integer of at least 1, got 0"),
    "stride-divides": ({"stride": 3}, "`block_size` must be a multiple of `stride` 3, got 4"),
    "threshold-zero": ({"threshold": 0.0}, "`threshold` must be above 0 and at most 1, got 0.0"),
    "threshold-above": ({"threshold": 1.5}, "`threshold` must be above 0 and at most 1, got 1.5"),
}


def test_the_good_arguments_are_accepted():
    routed_attention(**GOOD)


@pytest.mark.parametrize("case", SHARED | ROUTED)
def test_routed_attention_refuses(case):
    changes, message = (SHARED | ROUTED)[case]
    arguments = {**GOOD, **changes}
    if case.startswith("bounds") or case == "both-layouts":
        arguments["gate"] = torch.zeros(len(arguments["cu_seqlens"]) - 1, 2)
    with pytest.raises(ValueError, match=message):
        routed_attention(**arguments)


@pytest.mark.parametrize("case", SHARED | SELECTION)
def test_block_selection_refuses(case):
    changes, message = (SHARED | SELECTION)[case]
    with pytest.raises(ValueError, match=message):
        block_selection(**{"query": QUERY, "key": KEY, "block_size": 4, "stride": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": KEPT.indices[0]}, r"`indices` must be int16 or int32 .* got torch.int16 \(4, 3, 3\)"),
        ({"indices": KEPT.indices.long()}, "`indices` must be int16 or int32 .* got torch.int64"),
        ({"counts": KEPT.counts[:, :2]}, r"`counts` must be int32 of shape \(2, 4, 3\), got torch.int32 \(2, 2, 3\)"),
        ({"counts": KEPT.counts.long()}, r"`counts` must be int32 of shape \(2, 4, 3\), got torch.int64"),
        ({"block_size": 0}, "`block_size` must be at least 1, got 0"),
    ],
    ids=["indices-3d", "indices-int64", "counts-shape", "counts-int64", "block-size"],
)
def test_kept_blocks_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(KEPT, **changes)


def test_computed_share_refuses_other_lengths():
    with pytest.raises(ValueError, match=r"`lengths` must have shape \(2,\), got \(3,\)"):
        KEPT.computed_share(BOUNDS)


def test_computed_share_refuses_the_lists_of_a_chunk():
    with pytest.raises(ValueError, match="`indices` must be of whole sequences, got 1 x 3 blocks"):
        KeptBlocks(KEPT.indices[:, :, 2:], KEPT.counts[:, :, 2:], 4).computed_share(BOUNDS[:2])


def test_kept_blocks_that_do_not_cover_the_tokens_are_refused():
    query, key, value = make_qkv(length=40)
    kept = KeptBlocks.from_mask(torch.ones(1, 4, 1, 1, dtype=torch.bool), 16)
    # On the fused kernels such lists are read past their end; the shape alone tells.
    with pytest.raises(ValueError, match="`kept_blocks` must"):
        routed_attention(
            query.float(), key.float(), value.float(), torch.zeros(1, 2, dtype=torch.bool), mode_pair="FA-XA",
            sink_size=2, window_size=4, kept_blocks=kept, implementation="triton",
        )  # fmt: skip
