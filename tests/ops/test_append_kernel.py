"""The kernel that writes new tokens into ragged storage writes the reference's bits, and nothing else."""

import pytest
import torch

from elastic_kernels.routed_decode import RaggedRows
from elastic_kernels.routed_decode.storage import append_tokens, count_slots


SINK, RING = 3, 10
GATE = torch.tensor([[0, 1, 1], [1, 0, 1]])


def append(implementation, lengths, count, head_dim, dtype, gate):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(lengths)
    slots = count_slots(gate, lengths, room=count, sink_size=SINK, ring_size=RING)
    rows = RaggedRows((slots.flatten().cumsum(0) - slots.flatten()).view_as(slots), lengths, RING)
    key, value = (torch.full((int(slots.sum()), head_dim), torch.nan, dtype=dtype) for _ in range(2))
    shape = (2, count, 3, head_dim)  # as a projection leaves them
    new = (torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for _ in range(2))
    append_tokens(key, value, *new, gate, rows, sink_size=SINK, implementation=implementation)
    return key, value, rows.lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 24])
@pytest.mark.parametrize(
    ("lengths", "count"), [([0, 2], 1), ([2, 3], 5), ([12, 13], 1), ([12, 13], 2), ([57, 999], 9)], ids=str
)
def test_the_same_slots_hold_the_same_bits(lengths, count, head_dim, dtype):
    for gate in (GATE, GATE.bool()):
        written = append("triton", lengths, count, head_dim, dtype, gate)
        for actual, expected in zip(written, append("reference", lengths, count, head_dim, dtype, gate)):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_tokens_are_counted():
    assert append("triton", [4, 9], 3, 16, torch.float32, GATE)[2].tolist() == [7, 12]
