"""Attention router at inference, in two launches.

`x = (mean over valid keys - mean) / deviation`; `y = task_down(silu(task_up(x)))`;
`logits = router_out(silu(router_down(silu(router_up(y)))))`; `gate = logits[1] + sparsity_bias > logits[0]`.

Both MLPs are split over their hidden width, because one multiprocessor alone would take longer to read the weights
(1 MB in float32 at head_dim 128) than many together take for everything. One program computes what `BLOCK_F` hidden
units add to one head's result, and leaves this share in memory for whoever needs the sum:

- task kernel: pools the head's keys, each program for itself, and computes its share of `y`;
- router kernel: sums the shares of `y` and computes its share of the Router MLP; the program of a head that comes
  last sums these in a fixed order and decides.

Grid of both: (sequence, head) x slices of hidden units. The order of every sum is fixed, whatever the batch, so
results repeat to the last bit.

Sizes: head_dim 1-256, any hidden width. Any number of tokens, but each slice reads them: meant for a few hundred. Keys
and weights fp16, bf16 or fp32; arithmetic float32 without tensor cores. Offsets into keys are int64.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .._launch import on_device
from .reference import RouterOutput


class RouterConfig(NamedTuple):
    """Hidden units per program, elements of a tile of keys, warps per program."""

    block_f: int
    tile_size: int
    num_warps: int


CONFIG = RouterConfig(32, 16384, 8)


@triton.jit
def _load_slice(up_ptr, down_ptr, offs_f, offs_d, hidden, HEAD_DIM: tl.constexpr):
    """The rows of a `[hidden, HEAD_DIM]` weight and the columns of a `[HEAD_DIM, hidden]` one for hidden units."""
    in_f, in_d = offs_f < hidden, offs_d < HEAD_DIM
    up = up_ptr + offs_f[:, None] * HEAD_DIM + offs_d[None, :]
    down = down_ptr + offs_d[:, None] * hidden + offs_f[None, :]
    up = tl.load(up, mask=in_f[:, None] & in_d[None, :], other=0.0)  # [BLOCK_F, BLOCK_D]
    down = tl.load(down, mask=in_d[:, None] & in_f[None, :], other=0.0)  # [BLOCK_D, BLOCK_F]
    return up.to(tl.float32), down.to(tl.float32)


@triton.jit
def _mlp_share(x, up, up_bias, down):
    """What hidden units add to `down(silu(up(x)))`, float32 `[BLOCK_D]`."""
    h = tl.sum(up * x[None, :], 1) + up_bias.to(tl.float32)
    return tl.sum(down * (h * tl.sigmoid(h))[None, :], 1)


@triton.jit
def _sum_shares(shares_ptr, num_slices, offs_d, HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr):
    """Sum of one head's shares, float32 `[BLOCK_D]`."""
    offs_s = tl.arange(0, BLOCK_S)
    acc = tl.zeros([BLOCK_S, offs_d.shape[0]], tl.float32)
    for first in range(0, num_slices, BLOCK_S):
        share = shares_ptr + (first + offs_s)[:, None] * HEAD_DIM + offs_d[None, :]
        present = (first + offs_s < num_slices)[:, None] & (offs_d < HEAD_DIM)[None, :]
        acc += tl.load(share, mask=present, other=0.0)  # [BLOCK_S, BLOCK_D]
    return tl.sum(acc, 0)


@triton.jit(do_not_specialize=["num_tokens"])
def _task_mlp_kernel(
    keys_ptr, valid_ptr, mean_ptr, deviation_ptr, up_ptr, up_bias_ptr, down_ptr, pooled_ptr, shares_ptr, arrived_ptr,
    stride_kn, stride_kt, stride_kh, stride_vn, stride_vt, num_tokens, num_heads, hidden,
    HAS_STATISTICS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0), tl.program_id(1)
    sequence, head = row // num_heads, row % num_heads
    offs_t, offs_d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    offs_f = tile * BLOCK_F + tl.arange(0, BLOCK_F)
    in_d = offs_d < HEAD_DIM
    keys_head = keys_ptr + sequence.to(tl.int64) * stride_kn + head.to(tl.int64) * stride_kh
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    count = tl.zeros([BLOCK_T], tl.int32)
    for first in range(0, num_tokens, BLOCK_T):
        token = (first + offs_t).to(tl.int64)
        present = token < num_tokens
        valid = tl.load(valid_ptr + sequence.to(tl.int64) * stride_vn + token * stride_vt, mask=present, other=0) != 0
        keys = keys_head + token[:, None] * stride_kt + offs_d[None, :]
        keys = tl.load(keys, mask=present[:, None] & in_d[None, :], other=0.0)  # [BLOCK_T, BLOCK_D]
        # Selected after the load, which then need not wait for `valid`.
        acc += tl.where(valid[:, None], keys.to(tl.float32), 0.0)
        count += valid.to(tl.int32)
    pooled = tl.sum(acc, 0) / tl.maximum(tl.sum(count, 0), 1).to(tl.float32)

    up, down = _load_slice(up_ptr, down_ptr, offs_f, offs_d, hidden, HEAD_DIM)
    up_bias = tl.load(up_bias_ptr + offs_f, mask=offs_f < hidden, other=0.0)
    x = pooled
    if HAS_STATISTICS:
        mean = tl.load(mean_ptr + head * HEAD_DIM + offs_d, mask=in_d, other=0.0).to(tl.float32)
        deviation = tl.load(deviation_ptr + head * HEAD_DIM + offs_d, mask=in_d, other=1.0).to(tl.float32)
        x = (pooled - mean) / deviation
    share = _mlp_share(x, up, up_bias, down)
    tl.store(shares_ptr + (row * tl.num_programs(1) + tile).to(tl.int64) * HEAD_DIM + offs_d, share, mask=in_d)
    if tile == 0:
        tl.store(pooled_ptr + row * HEAD_DIM + offs_d, pooled, mask=in_d)
        tl.store(arrived_ptr + row, 0)


@triton.jit
def _router_mlp_kernel(
    task_shares_ptr, task_bias_ptr, up_ptr, up_bias_ptr, down_ptr, down_bias_ptr, out_ptr, out_bias_ptr,
    shares_ptr, arrived_ptr, logits_ptr, gate_ptr, hidden, sparsity_bias,
    HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, tile, num_slices = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    offs_d = tl.arange(0, BLOCK_D)
    offs_f = tile * BLOCK_F + tl.arange(0, BLOCK_F)
    in_d = offs_d < HEAD_DIM
    shares_head = (row * num_slices).to(tl.int64) * HEAD_DIM
    up, down = _load_slice(up_ptr, down_ptr, offs_f, offs_d, hidden, HEAD_DIM)
    up_bias = tl.load(up_bias_ptr + offs_f, mask=offs_f < hidden, other=0.0)
    task_bias = tl.load(task_bias_ptr + offs_d, mask=in_d, other=0.0).to(tl.float32)
    task = _sum_shares(task_shares_ptr + shares_head, num_slices, offs_d, HEAD_DIM, BLOCK_S) + task_bias
    share = _mlp_share(task, up, up_bias, down)
    tl.store(shares_ptr + shares_head + tile * HEAD_DIM + offs_d, share, mask=in_d)

    # All threads' stores come before the count that announces them.
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel", scope="gpu") == num_slices - 1:
        bias = tl.load(down_bias_ptr + offs_d, mask=in_d, other=0.0).to(tl.float32)
        z = _sum_shares(shares_ptr + shares_head, num_slices, offs_d, HEAD_DIM, BLOCK_S) + bias
        z = z * tl.sigmoid(z)
        to_retrieval = tl.load(out_ptr + offs_d, mask=in_d, other=0.0).to(tl.float32)
        to_sparse = tl.load(out_ptr + HEAD_DIM + offs_d, mask=in_d, other=0.0).to(tl.float32)
        retrieval = tl.sum(z * to_retrieval, 0) + tl.load(out_bias_ptr).to(tl.float32)
        sparse = tl.sum(z * to_sparse, 0) + tl.load(out_bias_ptr + 1).to(tl.float32)
        tl.store(logits_ptr + 2 * row, retrieval)
        tl.store(logits_ptr + 2 * row + 1, sparse)
        tl.store(gate_ptr + row, sparse + sparsity_bias > retrieval)


def router_forward(keys, valid, weights, *, mean=None, deviation=None, sparsity_bias=0.0):
    """Launches the kernels; arguments as `router`, which validates them.

    Returns:
        `RouterOutput`.
    """
    sequences, num_tokens, num_heads, head_dim = keys.shape
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    task_up, task_down, router_up, router_down, router_out = (
        [tensor.contiguous() for tensor in layer] for layer in weights
    )
    statistics = [None if tensor is None else tensor.contiguous() for tensor in (mean, deviation)]
    hidden = task_up[0].shape[0]
    rows, slices = sequences * num_heads, triton.cdiv(hidden, CONFIG.block_f)
    block_d = triton.next_power_of_2(head_dim)
    sizes = {"HEAD_DIM": head_dim, "BLOCK_F": CONFIG.block_f, "BLOCK_D": block_d, "num_warps": CONFIG.num_warps}

    pooled = keys.new_empty((sequences, num_heads, head_dim), dtype=torch.float32)
    logits = keys.new_empty((sequences, num_heads, 2), dtype=torch.float32)
    gate = keys.new_empty((sequences, num_heads), dtype=torch.bool)
    task_shares, router_shares = (keys.new_empty((rows, slices, head_dim), dtype=torch.float32) for _ in range(2))
    arrived = keys.new_empty(rows, dtype=torch.int32)
    with on_device(keys):
        _task_mlp_kernel[(rows, slices)](
            keys, valid, *statistics, *task_up, task_down[0], pooled, task_shares, arrived,
            *keys.stride()[:3], *valid.stride(), num_tokens, num_heads, hidden,
            HAS_STATISTICS=mean is not None, BLOCK_T=min(CONFIG.tile_size // block_d, 256), **sizes,
        )  # fmt: skip
        _router_mlp_kernel[(rows, slices)](
            task_shares, task_down[1], *router_up, *router_down, *router_out, router_shares, arrived, logits, gate,
            hidden, sparsity_bias, BLOCK_S=16, **sizes,
        )  # fmt: skip
    return RouterOutput(logits, gate, pooled)
