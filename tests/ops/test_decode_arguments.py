"""Every rule of the decode operator's arguments: a ValueError that names the argument, the rule and the value."""

import pytest
import torch
from numerics import make_qkv

from elastic_kernels.routed_decode import RaggedRows, routed_decode


QUERY, KEY, VALUE = make_qkv(heads=4, kv_heads=2, length=12, query_length=1, head_dim=8)
GATE = torch.zeros(1, 2, dtype=torch.bool)
FLAT = {"key": KEY[0, 0], "value": VALUE[0, 0]}
ROWS = RaggedRows(torch.tensor([[0, 6]]), torch.tensor([6]), ring_size=4)
WRONG = {
    "queries": ({"query": QUERY.repeat(1, 1, 9, 1)}, "`query` must hold 1 to 8 tokens, got 9"),
    "gate-float": ({"gate": GATE.float()}, "`gate` must be bool or integer, got torch.float32"),
    "gate-shape": ({"gate": GATE[:, :1]}, r"`gate` must be .* = \(1, 2\), got shape \(1, 1\)"),
    "value-shape": ({"value": VALUE[:, :, 1:]}, r"`value` must have key's shape \(1, 2, 12, 8\), got"),
    "key-strides": ({"key": KEY.mT.contiguous().mT}, "`key` must be contiguous along head_dim, got strides"),
    "length-shape": ({"length": torch.tensor([1, 2])}, r"`length` must be integers of shape \(\) or \(1,\), got"),
    "length-dtype": ({"length": torch.tensor(3.0)}, r"`length` must be integers .* got torch.float32"),
    "length-value": ({"length": torch.tensor(13)}, "`length` must lie between 0 and the 12 keys, got 13 for row 0"),
    "window": ({"window_size": 0}, "`window_size` must be an integer of at least 1, got 0"),
    "softcap": ({"softcap": 0.0}, "`softcap` must be positive, got 0.0"),
    "sinks": ({"sinks": torch.zeros(3)}, r"`sinks` must be floating point of shape \(4,\), got torch.float32 \(3,\)"),
    "implementation": ({"implementation": "cuda"}, "`implementation` must be None or one of .* got 'cuda'"),
    "float64": ({"implementation": "triton"}, "'triton': it (takes fp16, bf16 and fp32, not torch.float64|needs a)"),
    "storage-key": ({"storage": ROWS}, r"`key` must be \[slots, 8\] with `storage`, got shape \(1, 2, 12, 8\)"),
    "storage-start": ({**FLAT, "storage": ROWS, "start": torch.zeros(1).long()}, "`start` and `length` must be None"),
    "storage-batch": (
        {**FLAT, "storage": ROWS, "query": QUERY.repeat(2, 1, 1, 1), "gate": GATE.repeat(2, 1)},
        "`storage` must be for 2 sequences and a divisor of 4 heads, got offsets",
    ),
    "storage-ring": ({**FLAT, "storage": ROWS, "window_size": 5}, "`storage` must have rings of at least 5 .* got 4"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(change, message):
    good = {"query": QUERY, "key": KEY, "value": VALUE, "gate": GATE, "sink_size": 2, "window_size": 4}
    with pytest.raises(ValueError, match=message):
        routed_decode(**good | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.zeros(2, 3)}, r"`offsets` must be int64 \[batch, key-value heads\], got torch.float32"),
        ({"lengths": torch.zeros(3).long()}, r"`lengths` must be integers of shape \(2,\), got torch.int64 \(3,\)"),
        ({"ring_size": 0}, "`ring_size` must be an integer of at least 1, got 0"),
    ],
    ids=["offsets", "lengths", "ring-size"],
)
def test_wrong_storage(change, message):
    with pytest.raises(ValueError, match=message):
        RaggedRows(**{"offsets": torch.zeros(2, 3).long(), "lengths": torch.zeros(2).long(), "ring_size": 4} | change)
