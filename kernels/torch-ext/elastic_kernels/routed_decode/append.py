"""Writes new tokens into ragged storage and counts them.

A token of position p goes to slot `p` of a full entry, and of a streaming entry to slot `sink_size + (p - sink_size) %
ring_size` from the sink on; see `storage`. One program copies the keys and values of all tokens and heads of one
sequence, a tile of heads at a time: where the tokens go follows from the count that it then raises, so no other
program may read it.

Grid (sequences). Any dtype, head_dim 1-256; offsets are int64.
"""

import triton
import triton.language as tl

from .._launch import on_device


MAX_TILE = 8192


@triton.jit
def _append_kernel(
    k_ptr, v_ptr, new_k_ptr, new_v_ptr, gate_ptr, offsets_ptr, lengths_ptr,
    stride_kt, stride_vt, stride_nkb, stride_nkh, stride_nkq, stride_nvb, stride_nvh, stride_nvq,
    stride_gb, stride_gh, stride_ob, stride_oh, stride_l, sink_size, ring_size, num_heads, num_tokens,
    HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + row * stride_l).to(tl.int64)
    tl.debug_barrier()  # all threads have read the count before one of them raises it
    offs_d = tl.arange(0, BLOCK_D)
    for first_head in range(0, num_heads, BLOCK_H):
        heads = (first_head + tl.arange(0, BLOCK_H)).to(tl.int64)
        in_row = heads < num_heads
        in_tile = in_row[:, None] & (offs_d < HEAD_DIM)[None, :]
        gate = tl.load(gate_ptr + row * stride_gb + heads * stride_gh, mask=in_row, other=0)
        offset = tl.load(offsets_ptr + row * stride_ob + heads * stride_oh, mask=in_row, other=0)
        new_k = (new_k_ptr + row * stride_nkb + heads * stride_nkh)[:, None] + offs_d[None, :]
        new_v = (new_v_ptr + row * stride_nvb + heads * stride_nvh)[:, None] + offs_d[None, :]
        for token in range(num_tokens):
            position = length + token
            ringed = (gate != 0) & (position >= sink_size)
            slot = offset + tl.where(ringed, sink_size + (position - sink_size) % ring_size, position)
            k = tl.load(new_k, mask=in_tile, other=0.0)  # [BLOCK_H, BLOCK_D]
            v = tl.load(new_v, mask=in_tile, other=0.0)  # [BLOCK_H, BLOCK_D]
            tl.store(k_ptr + (slot * stride_kt)[:, None] + offs_d[None, :], k, mask=in_tile)
            tl.store(v_ptr + (slot * stride_vt)[:, None] + offs_d[None, :], v, mask=in_tile)
            new_k += stride_nkq
            new_v += stride_nvq
    tl.store(lengths_ptr + row * stride_l, (length + num_tokens).to(lengths_ptr.dtype.element_ty))


def append_forward(key, value, new_key, new_value, gate, offsets, lengths, *, sink_size, ring_size):
    """Launches the kernel; arguments as `append_tokens`, the storage's rows by their tensors."""
    batch, heads, count, head_dim = new_key.shape
    new_key, new_value = (x if x.stride(-1) == 1 else x.contiguous() for x in (new_key, new_value))
    block_d = triton.next_power_of_2(head_dim)
    with on_device(key):
        _append_kernel[(batch,)](
            key, value, new_key, new_value, gate, offsets, lengths,
            key.stride(0), value.stride(0), *new_key.stride()[:3], *new_value.stride()[:3],
            *gate.stride(), *offsets.stride(), lengths.stride(0), sink_size, ring_size, heads, count,
            HEAD_DIM=head_dim, BLOCK_H=min(triton.next_power_of_2(heads), MAX_TILE // block_d), BLOCK_D=block_d,
            num_warps=4,
        )  # fmt: skip
