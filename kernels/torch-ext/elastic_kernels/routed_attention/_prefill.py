"""What the prefill launchers hand to their kernels alike."""

from typing import Any, NamedTuple

import torch

from .._launch import MAX_INT32, count_tiles, empty_outputs, pair_modes, tile_constants
from .counterfactual import launch_arguments


class PrefillLaunch(NamedTuple):
    """Outputs and arguments of one launch; the kernels take `pointers`, `strides` and `sizes` in this order."""

    out: torch.Tensor
    lse: torch.Tensor | None
    grid: tuple[int]
    pointers: tuple[torch.Tensor | None, ...]
    strides: tuple[int, ...]
    sizes: tuple[int | float, ...]
    constants: dict[str, Any]


def prepare_prefill(
    query, key, gate, *, mode_pair, sink_size, window_size, start, cu_seqlens, kept_blocks, sinks, scale, with_lse,
    sampled, block_m,
) -> PrefillLaunch:  # fmt: skip
    """One program for every tile of `block_m` queries of every query head; other arguments as `routed_attention`.

    Of `sampled` tiles only, where they are given, is anything written.
    """
    batch, num_heads, q_length, _ = query.shape
    sequences, num_kv_heads = gate.shape
    k_length = key.shape[2]
    indices = counts = None
    xa_block = list_rows = list_columns = 0
    if kept_blocks is not None:
        indices, counts, xa_block = kept_blocks.indices, kept_blocks.counts, kept_blocks.block_size
        list_rows, list_columns = indices.shape[2:]
    mask, sample_tiles, tile = launch_arguments(sampled)
    out, lse = empty_outputs(query, with_lse)
    retrieval_mode, sparse_mode = pair_modes(mode_pair)
    return PrefillLaunch(
        out,
        lse,
        grid=(count_tiles(batch, q_length, block_m, cu_seqlens) * num_heads,),
        pointers=(gate, start, cu_seqlens, indices, counts, sinks, mask, out, out if lse is None else lse),
        strides=(*gate.stride(), *out.stride()[:3], num_heads * q_length, q_length),
        sizes=(
            sequences, num_kv_heads, q_length, k_length, list_rows, list_columns, sample_tiles,
            min(sink_size, MAX_INT32), min(window_size, MAX_INT32), scale,
        ),
        constants={
            **tile_constants(gate, num_heads, start, cu_seqlens),
            "RETRIEVAL_MODE": retrieval_mode,
            "SPARSE_MODE": sparse_mode,
            "HAS_SINKS": sinks is not None,
            "STORE_LSE": with_lse,
            "XA_BLOCK": xa_block,
            "SAMPLE_TILE": tile,
        },
    )  # fmt: skip
