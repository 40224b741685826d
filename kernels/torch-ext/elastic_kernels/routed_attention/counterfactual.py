"""The share of queries that the mode a head does not run is computed for; only the gate's gradient needs its output.

The queries of a sequence are cut into tiles of `TILE`, `n` tiles in a row are a stratum, and one tile of each stratum
is sampled: tile `floor(n * u)` for uniform `u`. Every tile is sampled with probability `1 / n`, also in a last stratum
that is cut short, so `n` times the sum over the sampled tiles is an unbiased estimate of the sum over all.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._sequences import segment_ids
from .._validation import check_device


TILE = 128
_MAX_STRATUM = 1024


class SampledTiles(NamedTuple):
    """bool `[N, Hkv, T]`, whether each tile of queries is sampled, and how many tiles each sampled one stands for."""

    mask: Tensor
    weight: int


def tiles_per_stratum(fraction: float) -> int:
    """The `n` of which `fraction` is the inverse.

    Args:
        fraction: as `counterfactual_fraction` in `routed_attention`.

    Returns:
        `n`, from 1 to 1024.

    Raises:
        ValueError: there is none.
    """
    for count in range(1, _MAX_STRATUM + 1):
        if fraction == 1 / count:
            return count
    raise ValueError(
        f"`counterfactual_fraction` must be 1 / n for an integer n from 1 to {_MAX_STRATUM} (1, 1/2, 1/3, 1/4, ...), "
        f"got {fraction}."
    )


def num_strata(length: int, fraction: float) -> int:
    """Strata that hold `length` queries."""
    return -(-length // (TILE * tiles_per_stratum(fraction)))


def sample_tiles(fraction: float, noise: Tensor | None, gate: Tensor, query_length: int) -> SampledTiles | None:
    """The tiles that `noise` samples; `None` at a fraction of 1, where all count.

    Args:
        fraction: as `counterfactual_fraction` in `routed_attention`.
        noise: as `counterfactual_noise` there.
        gate: `[N, Hkv]`.
        query_length: queries a row.

    Returns:
        One sampled tile of each stratum for every sequence and key-value head.

    Raises:
        ValueError: an argument that breaks a rule of `routed_attention`.
    """
    count = tiles_per_stratum(fraction)
    if count == 1:
        if noise is not None:
            raise ValueError("`counterfactual_noise` must be None at a `counterfactual_fraction` of 1, got a tensor.")
        return None
    if noise is None:
        raise ValueError(
            f"`counterfactual_noise` must be given at a `counterfactual_fraction` of {fraction}, got None."
        )
    check_device("counterfactual_noise", noise, gate, "the gate's")
    strata = num_strata(query_length, fraction)
    if noise.dim() != 3 or noise.shape[:2] != gate.shape or noise.shape[2] < strata or noise.dtype != torch.float32:
        raise ValueError(
            f"`counterfactual_noise` must be float32 of shape [sequences, key-value heads, strata] = "
            f"{(*gate.shape, strata)} or more strata, got {noise.dtype} {tuple(noise.shape)}."
        )
    # Rounding may take a product to `count` itself.
    chosen = (noise * count).to(torch.int32).clamp(max=count - 1)
    mask = chosen[..., None] == torch.arange(count, dtype=torch.int32, device=noise.device)
    return SampledTiles(mask.flatten(2), count)


def launch_arguments(sampled: SampledTiles | None) -> tuple[Tensor | None, int, int]:
    """What kernels take: the mask, its tiles of each head, and the queries of a tile; 0 where nothing is sampled."""
    return (None, 0, 0) if sampled is None else (sampled.mask, sampled.mask.shape[2], TILE)


def token_weights(
    sampled: SampledTiles, query: Tensor, key_length: int, start: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """What each query of a batch counts in the gate's gradient: `weight` in a sampled tile, else 0.

    Args:
        sampled: the tiles of each sequence.
        query: `[B, Hq, Q, D]`.
        key_length: tokens a row of the key.
        start: int `[B]`, first valid key of each row.
        cu_seqlens: int `[N + 1]`, bounds of packed segments.

    Returns:
        int64 `[B, Hkv, Q]`.
    """
    batch, _, length, _ = query.shape
    if cu_seqlens is None:
        sequences = torch.arange(batch, device=query.device)[:, None]
        positions = torch.arange(length, device=query.device).expand(batch, -1)
        if start is not None:
            queries = (key_length - start).clamp(max=length)
            positions = (positions - (length - queries)[:, None]).clamp(min=0)
    else:
        sequences = segment_ids(cu_seqlens, batch * length)
        positions = torch.arange(batch * length, device=query.device) - cu_seqlens[sequences]
        sequences, positions = (x.view(batch, length) for x in (sequences, positions))
    return sampled.weight * sampled.mask[sequences, :, positions // TILE].transpose(1, 2)
