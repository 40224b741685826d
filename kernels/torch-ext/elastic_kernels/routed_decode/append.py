"""Writes new tokens into ragged storage.

A token of position p goes to slot `p` of a full entry, and of a streaming entry to slot `sink_size + (p - sink_size) %
ring_size` from the sink on; see `storage`. One program copies the key and the value of one token of one entry.

Grid (sequences, key-value heads, new tokens). Any dtype, head_dim 1-256; offsets are int64.
"""

import triton
import triton.language as tl

from .._launch import on_device


@triton.jit
def _append_kernel(
    k_ptr, v_ptr, new_k_ptr, new_v_ptr, gate_ptr, offsets_ptr, lengths_ptr,
    stride_kt, stride_vt, stride_nkb, stride_nkh, stride_nkq, stride_nvb, stride_nvh, stride_nvq,
    stride_gb, stride_gh, stride_ob, stride_oh, stride_l, sink_size, ring_size,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(2).to(tl.int64)
    position = tl.load(lengths_ptr + row * stride_l).to(tl.int64) + token
    ringed = (tl.load(gate_ptr + row * stride_gb + head * stride_gh) != 0) & (position >= sink_size)
    slot = tl.where(ringed, sink_size + (position - sink_size) % ring_size, position)
    slot += tl.load(offsets_ptr + row * stride_ob + head * stride_oh)
    offs_d = tl.arange(0, BLOCK_D)
    in_head = offs_d < HEAD_DIM
    new_k = new_k_ptr + row * stride_nkb + head * stride_nkh + token * stride_nkq + offs_d
    new_v = new_v_ptr + row * stride_nvb + head * stride_nvh + token * stride_nvq + offs_d
    k = tl.load(new_k, mask=in_head, other=0.0)  # [BLOCK_D]
    v = tl.load(new_v, mask=in_head, other=0.0)  # [BLOCK_D]
    tl.store(k_ptr + slot * stride_kt + offs_d, k, mask=in_head)
    tl.store(v_ptr + slot * stride_vt + offs_d, v, mask=in_head)


def append_forward(key, value, new_key, new_value, gate, offsets, lengths, *, sink_size, ring_size):
    """Launches the kernel; arguments as `append_tokens`, the storage's rows by their tensors."""
    batch, heads, count, head_dim = new_key.shape
    new_key, new_value = (x if x.stride(-1) == 1 else x.contiguous() for x in (new_key, new_value))
    with on_device(key):
        _append_kernel[(batch, heads, count)](
            key, value, new_key, new_value, gate, offsets, lengths,
            key.stride(0), value.stride(0), *new_key.stride()[:3], *new_value.stride()[:3],
            *gate.stride(), *offsets.stride(), lengths.stride(0), sink_size, ring_size,
            HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), num_warps=1,
        )  # fmt: skip
