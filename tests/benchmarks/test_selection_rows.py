"""The row of block selection: its inputs have blocks to be found."""

import torch
from selection import planted_inputs

from elastic_kernels import block_selection


def test_planted_blocks_are_found():
    query, key, _ = planted_inputs(4096, heads=2, kv_heads=1, device="cpu")
    density = block_selection(query, key).computed_share(torch.tensor([4096])).mean().item()
    # One block in ten, the first and the diagonal one of 32.
    assert 0.08 < density < 0.25
