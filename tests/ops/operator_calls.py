"""A call of each operator, by its name: arguments and options."""

import torch
from numerics import make_qkv
from ops.dense import random_kept_blocks

from elastic_kernels import LinearWeights, RaggedRows, RouterWeights


QUERY, KEY, VALUE = make_qkv(length=40, dtype=torch.float32)
GATE = torch.tensor([[False, True]])
KEPT = random_kept_blocks(1, 4, 5, 5, 8)
SIZES = {"sink_size": 2, "window_size": 9}
SCORES = {"softcap": None, "sinks": None, "scale": None}
WEIGHTS = RouterWeights(
    *(LinearWeights(torch.randn(s), torch.randn(s[0])) for s in ((8, 4), (4, 8), (8, 4), (4, 8), (2, 4)))
)
RAGGED = RaggedRows(torch.tensor([[0, 40]]), torch.tensor([40]), 17)
CALLS = {
    "routed_attention": (
        (QUERY, KEY, VALUE, GATE),
        {**SIZES, **SCORES, "mode_pair": "XA-SSA", "kept_blocks": KEPT, "start": None, "cu_seqlens": None},
    ),
    "routed_decode": (
        (QUERY[:, :, -3:], KEY[0, 0].repeat(2, 1), VALUE[0, 0].repeat(2, 1), GATE),
        {**SIZES, **SCORES, "storage": RAGGED, "start": None, "length": None},
    ),
    "router": (
        (torch.randn(1, 5, 2, 4), torch.ones(1, 5, dtype=torch.bool), WEIGHTS),
        {"mean": None, "deviation": None, "sparsity_bias": 0.5},
    ),
    "block_selection": (
        (QUERY, KEY),
        {
            "heads": None,
            "block_size": 8,
            "stride": 4,
            "threshold": 0.6,
            "start": None,
            "cu_seqlens": None,
            "scale": None,
        },
    ),
}
