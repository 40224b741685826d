"""The definitions of the modes as dense masks and plain loops, to check the chunked reference against."""

from itertools import pairwise

import torch
from torch import Tensor

from elastic_kernels import KeptBlocks


def sequences_of(
    batch: int, length: int, start: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> list[tuple[int, int, int]]:
    """(row, begin, end) of every sequence in its row's key positions."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        return [(b // length, b % length, b % length + e - b) for b, e in pairwise(bounds)]
    starts = [0] * batch if start is None else start.tolist()
    return [(row, starts[row], length) for row in range(batch)]


def mode_mask(
    mode: str,
    query: Tensor,
    key: Tensor,
    *,
    sink_size: int = 0,
    window_size: int = 1,
    kept_blocks: KeptBlocks | None = None,
    start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """bool `[B, Hq, Q, K]`: the query-key pairs that a mode attends."""
    batch, heads, query_length, _ = query.shape
    length = key.shape[2]
    mask = torch.zeros(batch, heads, length, length, dtype=torch.bool)
    for n, (row, begin, end) in enumerate(sequences_of(batch, length, start, cu_seqlens)):
        i = torch.arange(end - begin)[:, None]
        j = torch.arange(end - begin)[None, :]
        seen = (j <= i).expand(heads, -1, -1)
        if mode == "SSA":
            seen = seen & ((j < sink_size) | (i - j < window_size))
        if mode == "XA":
            size = kept_blocks.block_size
            tokens = kept_blocks.to_mask()[n].repeat_interleave(size, 1).repeat_interleave(size, 2)
            first = max(length - query_length - begin, 0) // size * size
            kept = torch.cat([torch.zeros(heads, first, tokens.shape[2], dtype=torch.bool), tokens], 1)
            kept = kept[:, : end - begin, : end - begin]
            seen = seen & (kept | (i // size == j // size))
        mask[row, :, begin:end, begin:end] = seen
    return mask[:, :, length - query_length :]


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Eager attention with repeated keys and values; queries that attend nothing give zero and -inf."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    empty = ~mask.any(-1, keepdim=True)
    scores = scores.masked_fill(~(mask | empty), -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    lse = scores.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)
    return (weights @ value).masked_fill(empty, 0.0), lse


def random_kept_blocks(
    sequences: int, heads: int, query_blocks: int, key_blocks: int, block_size: int, seed: int = 2
) -> KeptBlocks:
    """Half of the causal block pairs, the first column and the diagonal always among them; one choice a head."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(sequences, heads, query_blocks, key_blocks, generator=generator) < 0.5
    shift = key_blocks - query_blocks
    mask[..., 0] = True
    mask |= torch.eye(query_blocks, key_blocks, dtype=torch.bool).roll(shift, 1)
    return KeptBlocks.from_mask(mask.tril(shift), block_size)


def brute_force_kept(
    query: Tensor, key: Tensor, *, block_size: int, stride: int, threshold: float, scale: float | None = None
) -> Tensor:
    """bool `[Hq, nQ, nK]` of one sequence, token by token: query `[Hq, Q, D]`, key `[Hkv, K, D]`."""
    heads, query_length, head_dim = query.shape
    length = key.shape[1]
    offset = length - query_length
    scale = head_dim**-0.5 if scale is None else scale
    blocks = range(-(-length // block_size))
    kept = torch.zeros(heads, len(blocks) - offset // block_size, len(blocks), dtype=torch.bool)
    for h in range(heads):
        products = (query[h] @ key[h * key.shape[0] // heads].T).tolist()
        mass = [[0.0] * len(blocks) for _ in blocks]
        for a in range(offset // stride, -(-length // stride)):
            scores = []
            for b in range(a + 1):
                pairs = [(a * stride + stride - 1 - s, b * stride + s) for s in range(stride)]
                total = sum(products[i - offset][j] for i, j in pairs if i < length and j < length)
                scores.append(total * scale / stride)
            for b, probability in enumerate(torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()):
                mass[a * stride // block_size][b * stride // block_size] += probability
        for row in blocks[offset // block_size :]:
            chosen = {0, row}
            others = sorted(set(range(row)) - chosen, key=lambda block: (-mass[row][block], block))
            while sum(mass[row][block] for block in chosen) < threshold * sum(mass[row]) and others:
                chosen.add(others.pop(0))
            kept[h, row - offset // block_size, list(chosen)] = True
    return kept
