"""What a user would run instead: dense kernels, both modes one after the other, FlexAttention.

Everything takes query `[B, Hq, S, D]`, key and value `[B, Hkv, S, D]`, laid out as a projection leaves them.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from inputs import SINK_SIZE, SIZES, WINDOW_SIZE
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from elastic_kernels import routed_attention


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def sdpa(backend: SDPBackend) -> Attention:
    """Causal SDPA on one backend."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return attend


def flash_attn_4(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal flash-attn-4."""
    from flash_attn.cute import flash_attn_func

    output = flash_attn_func(*(x.transpose(1, 2) for x in (query, key, value)), causal=True)
    return (output[0] if isinstance(output, tuple) else output).transpose(1, 2)


def flash_attn_4_version() -> str | None:
    """Its version, `None` when it cannot be imported."""
    try:
        found = importlib.util.find_spec("flash_attn.cute")
    except ModuleNotFoundError:
        return None
    return importlib.metadata.version("flash-attn-4") if found else None


DENSE: dict[str, Attention] = {
    "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa2": sdpa(SDPBackend.FLASH_ATTENTION),
    "fa4": flash_attn_4,
}


def serial_dispatch(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, dense: Attention) -> Callable[[], Tensor]:
    """The heads of each mode gathered, computed by a launch of their own and scattered back, for one row.

    The streaming heads run `routed_attention` with every head sparse. The heads' indices are made beforehand, which
    spares this baseline the wait for the device that reading a decision costs.
    """
    full, sparse = (torch.nonzero(gate[0] == side)[:, 0] for side in (0, 1))
    group = query.shape[1] // key.shape[1]
    offsets = torch.arange(group, device=query.device)
    full_queries, sparse_queries = ((group * heads[:, None] + offsets).flatten() for heads in (full, sparse))
    rows = [x.transpose(1, 2) for x in (query, key, value)]
    all_sparse = torch.ones(1, len(sparse), dtype=torch.bool, device=query.device)

    def gather(query_heads: Tensor, heads: Tensor) -> list[Tensor]:
        return [x.index_select(2, n).transpose(1, 2) for x, n in zip(rows, (query_heads, heads, heads))]

    def run() -> Tensor:
        output = torch.empty_like(rows[0])
        output.index_copy_(2, full_queries, dense(*gather(full_queries, full)).transpose(1, 2))
        streamed = routed_attention(*gather(sparse_queries, sparse), all_sparse, **SIZES)
        output.index_copy_(2, sparse_queries, streamed.transpose(1, 2))
        return output.transpose(1, 2)

    return run


class FlexAttention:
    """Compiled FlexAttention whose block mask follows a gate, head by head. The mask is built anew for every gate."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, gate: Tensor):
        self.inputs, self.gate = (query, key, value), gate
        self._create_block_mask, self._attend = torch.compile(create_block_mask), torch.compile(flex_attention)

    def mask(self) -> BlockMask:
        query, key, _ = self.inputs
        gate, group = self.gate, query.shape[1] // key.shape[1]

        def visible(batch, head, i, j):
            near = (i - j < WINDOW_SIZE) | (j < SINK_SIZE)
            return (j <= i) & (near | ~gate[batch, head // group])

        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        return self._create_block_mask(visible, *shape, device=query.device)

    def attend(self, mask: BlockMask) -> Tensor:
        return self._attend(*self.inputs, block_mask=mask, enable_gqa=True)
