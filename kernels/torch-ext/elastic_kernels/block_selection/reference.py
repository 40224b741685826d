"""XAttention's block selection in plain torch: the definition that fused kernels are compared with."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._sequences import split_sequences
from .kept_blocks import KeptBlocks


# The group scores of one batch of query blocks hold at most this many elements (128 MiB in float32).
_MAX_SCORES = 2**25


@torch.no_grad()
def block_selection_reference(
    query: Tensor,
    key: Tensor,
    *,
    heads: Tensor | None = None,
    block_size: int,
    stride: int,
    threshold: float,
    start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> KeptBlocks:
    """The kept blocks of every sequence, one sequence at a time.

    Args, Returns, Raises, Numerics:
        As for `elastic_kernels.block_selection`, without its checks of shapes.
    """
    batch, num_heads, query_length, head_dim = query.shape
    _, num_kv_heads, key_length, _ = key.shape
    sequences = split_sequences(batch, query_length, key_length, start=start, cu_seqlens=cu_seqlens)
    scale = head_dim**-0.5 if scale is None else scale
    rows, columns = _ceil_div(query_length, block_size), _ceil_div(key_length, block_size)
    mask = torch.zeros(len(sequences), num_heads, rows, columns, dtype=torch.bool, device=query.device)
    for n, sequence in enumerate(sequences):
        first = sequence.key_count - sequence.query_count
        if first % block_size:
            raise ValueError(
                f"`query` must begin on a block of {block_size} tokens counted from the first valid key, "
                f"got an offset of {first} in row {sequence.row}."
            )
        group = num_heads // num_kv_heads
        for kv_head in range(num_kv_heads) if heads is None else heads[n].nonzero().flatten().tolist():
            own = slice(kv_head * group, (kv_head + 1) * group)
            chosen = _select(
                query[sequence.row, own, sequence.queries],
                key[sequence.row, kv_head : kv_head + 1, sequence.keys],
                block_size=block_size,
                stride=stride,
                threshold=threshold,
                scale=scale,
            )
            mask[n, own, : chosen.shape[1], : chosen.shape[2]] = chosen
    return KeptBlocks.from_mask(mask, block_size)


def _select(query: Tensor, key: Tensor, *, block_size: int, stride: int, threshold: float, scale: float) -> Tensor:
    """Kept blocks `[H, nQ, nK]` of one sequence's query heads `[H, Q, D]` of one key head `[1, K, D]`."""
    heads, length, _ = query.shape
    first_block = (key.shape[1] - length) // block_size
    query_groups, key_groups = _groups(query, stride, reverse=True), _groups(key, stride)
    query_blocks, key_blocks = _ceil_div(length, block_size), _ceil_div(key.shape[1], block_size)
    kept = torch.zeros(heads, query_blocks, key_blocks, dtype=torch.bool, device=query.device)
    per_block = block_size // stride
    step = max(1, _MAX_SCORES // max(1, heads * per_block * key_groups.shape[1]))
    for first in range(0, query_blocks, step):
        diagonal = torch.arange(first, min(first + step, query_blocks), device=query.device) + first_block
        scores = _block_scores(
            query_groups[:, first * per_block : (first + step) * per_block],
            key_groups,
            per_block=per_block,
            first_group=(first_block + first) * per_block,
            factor=scale / stride,
        )
        kept[:, first : first + step] = _fewest_blocks(scores, diagonal, threshold)
    return kept


def _groups(tokens: Tensor, stride: int, reverse: bool = False) -> Tensor:
    """Groups of `stride` tokens `[H, n, stride * D]` of tokens `[H, length, D]`, in reverse order inside a group."""
    tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    tokens = F.pad(tokens, (0, 0, 0, -tokens.shape[1] % stride)).unflatten(1, (-1, stride))
    return (tokens.flip(2) if reverse else tokens).flatten(2)


def _block_scores(
    query_groups: Tensor, key_groups: Tensor, *, per_block: int, first_group: int, factor: float
) -> Tensor:
    """Attention mass `[H, blocks, nK]` that the query groups, the first of them `first_group`, give to key blocks."""
    heads, rows, width = query_groups.shape
    columns = key_groups.shape[1]
    # All heads become rows of one product, so the keys are never repeated.
    with torch.autocast(query_groups.device.type, enabled=False):
        scores = query_groups.reshape(-1, width) @ key_groups[0].T * factor
    scores = scores.view(heads, rows, columns)
    positions = torch.arange(max(columns, first_group + rows), device=scores.device)
    later = positions[:columns] > positions[first_group : first_group + rows, None]
    mass = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
    mass = F.pad(mass, (0, -columns % per_block, 0, -rows % per_block))
    return mass.unflatten(2, (-1, per_block)).sum(3).unflatten(1, (-1, per_block)).sum(2)


def _fewest_blocks(scores: Tensor, diagonal: Tensor, threshold: float) -> Tensor:
    """The first block, the diagonal block, and the fewest others that bring `[Hq, nQ, nK]` scores to the threshold."""
    columns = torch.arange(scores.shape[2], device=scores.device)
    always = (columns == 0) | (columns == diagonal[:, None])
    causal = columns <= diagonal[:, None]
    rank = scores.masked_fill(always, torch.inf).masked_fill(~causal, -torch.inf)
    order = rank.sort(dim=-1, descending=True, stable=True).indices
    mass = scores.gather(-1, order)
    mass_before = F.pad(mass.cumsum(-1), (1, -1))
    needed = mass_before < threshold * scores.sum(-1, keepdim=True)
    return (torch.zeros_like(causal.expand_as(scores)).scatter(-1, order, needed) | always) & causal


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
