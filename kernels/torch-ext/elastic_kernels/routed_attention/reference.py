"""The attention modes and their mix in plain torch: the definition that fused kernels are compared with.

Every mode works sequence by sequence and, inside a sequence, on chunks of queries, so the score matrix of a long
sequence never exists as a whole; its backward recomputes each chunk's scores.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._sequences import split_sequences
from ..block_selection.kept_blocks import KeptBlocks
from .counterfactual import SampledTiles, token_weights
from .mix import mix_by_gate


# Scores held at a time have at most this many elements (128 MiB in float32), and a chunk at most this many queries.
_MAX_SCORES = 2**25
_MAX_CHUNK = 1024
# A chunk much longer than the window would score mostly pairs that the window leaves out.
_MIN_STREAMING_CHUNK = 128

# (first, stop) of a chunk's query positions -> the ranges of key positions that the chunk can see.
_Ranges = Callable[[int, int], list[slice]]
# (query positions [C], key positions [M]) -> bool, broadcastable to [B, Hq, C, M].
_Allowed = Callable[[Tensor, Tensor], Tensor]


def full_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal softmax attention: query i attends every key j <= i of its sequence.

    Args:
        query: `[B, Hq, Q, D]`; with Q < K the queries sit at the end of the keys.
        key: `[B, Hkv, K, D]`; query head h reads key-value head `h // (Hq // Hkv)`.
        value: `[B, Hkv, K, D]`.
        start: int `[B]`, first valid key of each row (left padding).
        cu_seqlens: int `[N + 1]`, bounds of packed segments in the flattened `B * K` tokens; needs Q == K.
        softcap: scores become `softcap * tanh(scores / softcap)` before masking.
        sinks: `[Hq]`, a logit per head that joins the softmax's denominator and has no value.
        scale: factor of the scores, `D ** -0.5` by default.

    Returns:
        The output `[B, Hq, Q, D]` in query's dtype, zero for padded queries, and the log of the softmax's denominator
        `[B, Hq, Q]`, the sink's term included, -inf for padded queries.

    Raises:
        ValueError: `start` or `cu_seqlens` does not fit the batch.

    Numerics:
        Scores, softmax and sums in float32 (float64 for float64 inputs), also under autocast.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, _: slice) -> tuple[Tensor, Tensor]:
        return _attend(query, key, value, _all_before, _causal, _MAX_CHUNK, softcap=softcap, sinks=sinks, scale=scale)

    return _by_sequence(attend, query, key, value, start, cu_seqlens)


def streaming_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sink_size: int,
    window_size: int,
    start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Sink and local window: query i attends key j <= i if `j < sink_size` or `i - j < window_size`.

    Positions count from the first valid token of the sequence, and the rule holds token by token.

    Args:
        sink_size: tokens at the beginning of the sequence that every query attends, at least 0.
        window_size: tokens before and including the query itself that it attends, at least 1.
        query, key, value, start, cu_seqlens, softcap, sinks, scale: as for `full_attention`.

    Returns, Raises, Numerics:
        As for `full_attention`.

    Source:
        Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453.
    """

    def ranges(first: int, stop: int) -> list[slice]:
        window_start = max(0, first - window_size + 1)
        return [slice(0, min(sink_size, window_start)), slice(window_start, stop)]

    def allowed(query_positions: Tensor, key_positions: Tensor) -> Tensor:
        near = query_positions[:, None] - key_positions < window_size
        return _causal(query_positions, key_positions) & (near | (key_positions < sink_size))

    def attend(query: Tensor, key: Tensor, value: Tensor, _: slice) -> tuple[Tensor, Tensor]:
        chunk = min(_MAX_CHUNK, max(_MIN_STREAMING_CHUNK, window_size))
        return _attend(query, key, value, ranges, allowed, chunk, softcap=softcap, sinks=sinks, scale=scale)

    return _by_sequence(attend, query, key, value, start, cu_seqlens)


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kept_blocks: KeptBlocks,
    start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over kept blocks: query i attends key j <= i if its head keeps the block pair that holds (i, j).

    The diagonal block is attended whether it is listed or not, so that no query is left without a key.

    Args:
        kept_blocks: what `block_selection` returned for this query and key.
        query, key, value, start, cu_seqlens, softcap, sinks, scale: as for `full_attention`.

    Returns, Numerics:
        As for `full_attention`.

    Raises:
        ValueError: as for `full_attention`, and when `kept_blocks` does not cover a sequence.

    Source:
        Xu et al., XAttention: Block Sparse Attention with Antidiagonal Scoring, arXiv 2503.16428.
    """
    size = kept_blocks.block_size
    masks = kept_blocks.to_mask()

    def attend(query: Tensor, key: Tensor, value: Tensor, sequences: slice) -> tuple[Tensor, Tensor]:
        mask = masks[sequences]
        first_row = (key.shape[2] - query.shape[2]) // size
        needed = (-(-key.shape[2] // size) - first_row, -(-key.shape[2] // size))
        if mask.shape[2] < needed[0] or mask.shape[3] < needed[1]:
            raise ValueError(f"`kept_blocks` must cover {needed} blocks, got {tuple(mask.shape[2:])}.")

        def allowed(query_positions: Tensor, key_positions: Tensor) -> Tensor:
            query_blocks, key_blocks = (query_positions // size)[:, None], key_positions // size
            kept = mask[:, :, query_blocks - first_row, key_blocks] | (query_blocks == key_blocks)
            return _causal(query_positions, key_positions) & kept

        return _attend(query, key, value, _all_before, allowed, _MAX_CHUNK, softcap=softcap, sinks=sinks, scale=scale)

    return _by_sequence(attend, query, key, value, start, cu_seqlens)


def routed_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    *,
    mode_pair: str,
    sink_size: int,
    window_size: int,
    start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    kept_blocks: KeptBlocks | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    sampled: SampledTiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Both modes of the pair for every head, and for each head the output that its gate selects.

    Args, Returns, Numerics:
        As for `elastic_kernels.routed_attention`, without its checks; the second result is the selected mode's
        log-denominator, without gradient.
    """
    common = {"start": start, "cu_seqlens": cu_seqlens, "softcap": softcap, "sinks": sinks, "scale": scale}
    modes: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], dict[str, Any]]] = {
        "FA": (full_attention, {}),
        "SSA": (streaming_attention, {"sink_size": sink_size, "window_size": window_size}),
        "XA": (block_sparse_attention, {"kept_blocks": kept_blocks}),
    }
    attentions = (modes[name] for name in mode_pair.split("-"))
    (retrieval, retrieval_lse), (sparse, sparse_lse) = (
        attend(query, key, value, **own, **common) for attend, own in attentions
    )
    weights = None if sampled is None else token_weights(sampled, query, key.shape[2], start, cu_seqlens)
    output = mix_by_gate(gate, retrieval, sparse, cu_seqlens, weights)
    lse = mix_by_gate(gate.bool(), retrieval_lse[..., None], sparse_lse[..., None], cu_seqlens)
    return output, lse.squeeze(-1).detach()


def _by_sequence(
    attend: Callable[[Tensor, Tensor, Tensor, slice], tuple[Tensor, Tensor]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run `attend` on each sequence without its padding, and put the results back where the sequences lie."""
    if start is None and cu_seqlens is None:
        return attend(query, key, value, slice(None))
    batch, _, length, _ = query.shape
    rows: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(batch)]
    sequences = split_sequences(batch, length, key.shape[2], start=start, cu_seqlens=cu_seqlens)
    for index, (row, queries, keys) in enumerate(sequences):
        this = slice(row, row + 1)
        output, lse = attend(
            query[this, :, queries], key[this, :, keys], value[this, :, keys], slice(index, index + 1)
        )
        padding = queries.start if cu_seqlens is None else 0
        rows[row].append((F.pad(output, (0, 0, padding, 0)), F.pad(lse, (padding, 0), value=-torch.inf)))
    outputs, lses = ([torch.cat(pieces, dim=2) for pieces in kind] for kind in zip(*(zip(*row) for row in rows)))
    return torch.cat(outputs), torch.cat(lses)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ranges: _Ranges,
    allowed: _Allowed,
    chunk: int,
    *,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Attention of sequences without padding, at most `chunk` queries at a time."""
    batch, heads, length, head_dim = query.shape
    offset = key.shape[2] - length
    precision = torch.promote_types(query.dtype, torch.float32)
    if length == 0:
        return query, query.new_zeros(query.shape[:3], dtype=precision)
    factor = head_dim**-0.5 if scale is None else scale
    longest = ranges(offset + length - min(chunk, length), offset + length)
    scores_per_query = batch * heads * sum(piece.stop - piece.start for piece in longest)
    step = min(chunk, max(16, _MAX_SCORES // scores_per_query))

    def run(first: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        stop = first + query.shape[2]
        visible = ranges(first, stop)
        positions = torch.arange(stop, device=query.device)
        key_positions = torch.cat([positions[piece] for piece in visible])
        key, value = (torch.cat([tensor[:, :, piece] for piece in visible], dim=2) for tensor in (key, value))
        mask = allowed(positions[first:], key_positions)
        query, key, value = (tensor.to(precision) for tensor in (query, key, value))
        with torch.autocast(query.device.type, enabled=False):
            return _masked_attention(query * factor, key, value, mask, softcap, sinks)

    chunks = []
    for first in range(0, length, step):
        inputs = (first + offset, query[:, :, first : first + step], key, value, sinks)
        if torch.is_grad_enabled() and scores_per_query * length > _MAX_SCORES:
            chunks.append(checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False))
        else:
            chunks.append(run(*inputs))
    outputs, lses = zip(*chunks)
    return torch.cat(outputs, dim=2).to(query.dtype), torch.cat(lses, dim=2)


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Softmax attention of scaled query `[B, Hq, C, D]` over key and value `[B, Hkv, M, D]` where `mask` is true."""
    batch, heads, length, head_dim = query.shape
    groups = key.shape[1]
    # The query heads of a group become rows of one product, so key and value are never repeated.
    scores = (query.reshape(batch, groups, -1, head_dim) @ key.transpose(2, 3)).view(batch, heads, length, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    output = (scores.softmax(-1).view(batch, groups, -1, mask.shape[-1]) @ value).view(batch, heads, length, -1)
    if sinks is not None:
        lse_with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        output = output * torch.exp(lse - lse_with_sink)[..., None]
        lse = lse_with_sink
    return output, lse


def _all_before(first: int, stop: int) -> list[slice]:
    return [slice(0, stop)]


def _causal(query_positions: Tensor, key_positions: Tensor) -> Tensor:
    return key_positions <= query_positions[:, None]
