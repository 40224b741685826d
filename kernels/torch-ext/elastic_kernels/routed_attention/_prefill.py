"""What the prefill launchers hand to their kernels alike."""

from typing import Any, NamedTuple

import torch
import triton

from .._launch import MAX_INT32, empty_outputs, pair_modes
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
    _, num_kv_heads, k_length, _ = key.shape
    packed = cu_seqlens is not None
    sequences = cu_seqlens.numel() - 1 if packed else batch
    # Packed rows: an upper bound of the tile count, without a look at their bounds.
    tiles = batch * q_length // block_m + sequences if packed else batch * triton.cdiv(q_length, block_m)
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
        grid=(tiles * num_heads,),
        pointers=(gate, start, cu_seqlens, indices, counts, sinks, mask, out, out if lse is None else lse),
        strides=(*gate.stride(), *out.stride()[:3], num_heads * q_length, q_length),
        sizes=(
            sequences, num_kv_heads, q_length, k_length, list_rows, list_columns, sample_tiles,
            min(sink_size, MAX_INT32), min(window_size, MAX_INT32), scale,
        ),
        constants={
            "RETRIEVAL_MODE": retrieval_mode,
            "SPARSE_MODE": sparse_mode,
            "GROUP": num_heads // num_kv_heads,
            "HAS_START": start is not None,
            "HAS_CU_SEQLENS": packed,
            "HAS_SINKS": sinks is not None,
            "STORE_LSE": with_lse,
            "XA_BLOCK": xa_block,
            "SAMPLE_TILE": tile,
            "BLOCK_G": triton.next_power_of_2(sequences if packed else sequences * num_kv_heads),
        },
    )  # fmt: skip
