"""One small call of every fused kernel, for compute-sanitizer: odd lengths, padding, packing, chunks, gradients."""

import sys

import torch
from numerics import make_qkv
from ops.dense import random_kept_blocks

from elastic_kernels import (
    KeptBlocks,
    LinearWeights,
    RouterWeights,
    block_selection,
    routed_attention,
    routed_decode,
    router,
)


SIZES = {"sink_size": 5, "window_size": 60}
LENGTH, BLOCK = 317, 128


def cuda_qkv(**shape):
    qkv = make_qkv(**{"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16} | shape)
    return [x.cuda().requires_grad_(shape.get("requires_grad", False)) for x in qkv]


def main(implementations):
    gate = torch.tensor([[0, 1]], device="cuda")
    padded = {"start": torch.tensor([0, 211], device="cuda")}
    packed = {"cu_seqlens": torch.tensor([0, 100, 101, 317], device="cuda")}
    blocks = -(-LENGTH // BLOCK)
    kept = random_kept_blocks(1, 4, blocks, blocks, BLOCK)
    kept = KeptBlocks(kept.indices.cuda(), kept.counts.cuda(), BLOCK)
    for name in implementations:
        options = {**SIZES, "implementation": name, "mode_pair": "FA-SSA"}
        routed_attention(*cuda_qkv(length=LENGTH), gate, **options, return_lse=True)
        routed_attention(*cuda_qkv(length=LENGTH, query_length=9), gate, **options)
        routed_attention(*cuda_qkv(length=LENGTH, batch=2), gate.expand(2, -1), **padded, **options)
        routed_attention(*cuda_qkv(length=LENGTH), gate.expand(3, -1), **packed, **options)
        routed_attention(*cuda_qkv(length=LENGTH), gate, **options | {"mode_pair": "XA-SSA"}, kept_blocks=kept)
        sample = {"counterfactual_fraction": 0.5, "counterfactual_noise": torch.rand(1, 2, 2, device="cuda")}
        for pair, more in (("FA-SSA", {}), ("FA-SSA", sample), ("FA-XA", {"kept_blocks": kept})):
            learned = gate.float().requires_grad_()
            inputs = cuda_qkv(length=LENGTH, requires_grad=True)
            out = routed_attention(*inputs, learned, **options | {"mode_pair": pair}, **more)
            torch.autograd.grad(out.float().square().sum(), [*inputs, learned])
    query, key, _ = cuda_qkv(length=LENGTH)
    block_selection(query, key, implementation="triton")
    block_selection(*cuda_qkv(length=LENGTH, batch=2)[:2], **padded, implementation="triton")
    block_selection(query, key, **packed, heads=gate.expand(3, -1) > 0, implementation="triton")
    for queries in (1, 7):
        inputs = cuda_qkv(length=LENGTH, query_length=queries, batch=2)
        routed_decode(*inputs, gate.expand(2, -1), **SIZES, **padded, implementation="triton")
    shapes = [(256, 64), (64, 256), (256, 64), (64, 256), (2, 64)]
    weights = RouterWeights(*(LinearWeights(torch.randn(s).cuda(), torch.randn(s[0]).cuda()) for s in shapes))
    router(torch.randn(2, 37, 2, 64).cuda(), torch.ones(2, 37, dtype=torch.bool).cuda(), weights)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
