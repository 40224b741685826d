"""Compiles what the launchers would launch, for GPUs that need not be there; prints shared memory as JSON."""

import json
import sys
from contextlib import ExitStack
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import mangle_type

from elastic_kernels import KeptBlocks, LinearWeights, RouterWeights
from elastic_kernels.block_selection import forward as selection
from elastic_kernels.routed_attention import (
    backward,
    backward_delta,
    backward_dkv,
    backward_dq,
    forward,
    forward_hopper,
)
from elastic_kernels.routed_attention.counterfactual import SampledTiles
from elastic_kernels.routed_decode import forward as decode
from elastic_kernels.router import forward as router


class Recorder:
    """Stands in for a kernel and keeps the arguments of its launch."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.record

    def record(self, *args, num_warps=4, num_stages=3, maxnreg=None, enable_fp_fusion=True, **kwargs):
        values = dict(zip(self.kernel.arg_names, args)) | kwargs
        constants = {p.name for p in self.kernel.params if p.is_constexpr}
        constants |= {name for name, value in values.items() if value is None or (type(value) is int and value == 1)}
        self.signature = {n: "constexpr" if n in constants else mangle_type(values[n]) for n in self.kernel.arg_names}
        self.constants = {name: values[name] for name in constants}
        self.options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
        # As the launcher finds: only then are copies 16 bytes wide.
        aligned = [
            place
            for place, name in enumerate(self.kernel.arg_names)
            if name not in constants and (isinstance(values[name], torch.Tensor) or is_multiple(values[name]))
        ]
        self.attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}

    def shared_memory(self, capability):
        source = GluonASTSource if isinstance(self.kernel, GluonJITFunction) else ASTSource
        source = source(self.kernel, self.signature, self.constants, self.attributes)
        return triton.compile(source, GPUTarget("cuda", capability, 32), self.options).metadata.shared


def is_multiple(value):
    return type(value) is int and value % 16 == 0


def compile_call(capability, kernels, call):
    """Shared memory in bytes of each of `kernels`, (module, name), when `call` launches them."""
    recorders = [Recorder(getattr(module, name)) for module, name in kernels]
    with ExitStack() as stack:
        for (module, name), recorder in zip(kernels, recorders):
            stack.enter_context(mock.patch.object(module, name, recorder))
        for module in (forward, forward_hopper, backward, selection, decode):
            stack.enter_context(mock.patch.object(module, "compute_capability", return_value=capability))
        stack.enter_context(mock.patch.object(selection, "multiprocessors", return_value=132))
        stack.enter_context(mock.patch.object(decode, "multiprocessors", return_value=132))
        stack.enter_context(mock.patch.object(backward_dkv, "query_lists", lambda kept: (kept.indices, kept.counts)))
        call()
    return [recorder.shared_memory(capability) for recorder in recorders]


def attention(dtype, head_dim, launch, *, xa_block=0, **options):
    """A call of a prefill launcher, or of the backward."""
    query, key = (torch.empty(2, 320, heads, head_dim, dtype=dtype).transpose(1, 2) for heads in (8, 2))
    if xa_block:
        blocks = -(-320 // xa_block)
        options["kept_blocks"] = KeptBlocks.from_mask(torch.ones(2, 8, blocks, blocks, dtype=torch.bool), xa_block)
    sizes = {"mode_pair": "FA-XA" if xa_block else "FA-SSA", "sink_size": 128, "window_size": 2048, "scale": 0.1}
    inputs = (query, key, key, torch.zeros(2, 2))
    if launch is not backward.routed_attention_backward:
        return lambda: launch(*inputs, **sizes, **options)
    results = query, torch.empty(2, 8, 320)
    options = {"start": None, "cu_seqlens": None, **options}
    other = lambda *args, **kwargs: (query, None)  # noqa: E731
    return lambda: launch(query, (*inputs, None), results, (True,) * 4 + (False,), other, **sizes, **options)


def choose_blocks(dtype, head_dim):
    query, key = (torch.empty(1, 4096, heads, head_dim, dtype=dtype).transpose(1, 2) for heads in (8, 2))
    return lambda: selection.block_selection_forward(query, key, block_size=128, stride=16, threshold=0.9)


def decode_tokens(dtype, head_dim, queries):
    query, key = (torch.empty(2, h, n, head_dim, dtype=dtype) for h, n in ((8, queries), (2, 4096)))
    gate = torch.zeros(2, 2, dtype=torch.bool)
    return lambda: decode.routed_decode_forward(query, key, key, gate, sink_size=128, window_size=2048, scale=0.1)


def route(head_dim):
    shapes = ((4 * head_dim, head_dim), (head_dim, 4 * head_dim)) * 2 + ((2, head_dim),)
    weights = RouterWeights(*(LinearWeights(torch.empty(shape), torch.empty(shape[0])) for shape in shapes))
    keys = torch.empty(1, 200, 8, head_dim, dtype=torch.bfloat16)
    return lambda: router.router_forward(keys, torch.ones(1, 200, dtype=torch.bool), weights)


PORTABLE = [(forward, "_routed_attention_fwd_kernel")]
HOPPER = [(forward_hopper, "_routed_attention_fwd_hopper_kernel")]
BACKWARD = [
    (backward_delta, "_routed_attention_bwd_delta_kernel"),
    (backward_delta, "_routed_attention_bwd_gate_kernel"),
    (backward_dq, "_routed_attention_bwd_dq_kernel"),
    (backward_dkv, "_routed_attention_bwd_dkv_kernel"),
]
SELECTION = [(selection, "_block_selection_kernel")]
DECODE = [(decode, "_routed_decode_fwd_kernel"), (decode, "_routed_decode_combine_kernel")]
ROUTER = [(router, "_task_mlp_kernel"), (router, "_router_mlp_kernel")]
START = torch.zeros(2, dtype=torch.int64)
SAMPLED = SampledTiles(torch.zeros(2, 2, 4, dtype=torch.bool), 4)
LAUNCHES = [
    (PORTABLE, attention(torch.bfloat16, 128, forward.routed_attention_forward, xa_block=128)),
    (BACKWARD, attention(torch.bfloat16, 128, backward.routed_attention_backward, xa_block=128)),
    (SELECTION, choose_blocks(torch.bfloat16, 128)),
    (DECODE, decode_tokens(torch.bfloat16, 128, 1)),
    (ROUTER, route(128)),
]
FURTHER = {
    80: [
        (PORTABLE, attention(torch.float32, 128, forward.routed_attention_forward, start=START)),
        (PORTABLE, attention(torch.float16, 256, forward.routed_attention_forward, softcap=50.0)),
        (BACKWARD, attention(torch.float16, 64, backward.routed_attention_backward, softcap=50.0)),
        (PORTABLE, attention(torch.bfloat16, 64, forward.routed_attention_forward, sampled=SAMPLED)),
        (BACKWARD, attention(torch.bfloat16, 128, backward.routed_attention_backward, sampled=SAMPLED)),
    ],
    89: [(BACKWARD, attention(torch.float32, 256, backward.routed_attention_backward))],
    90: [
        (HOPPER, attention(torch.bfloat16, 128, forward_hopper.routed_attention_forward_hopper)),
        (
            HOPPER,
            attention(
                torch.bfloat16, 128, forward_hopper.routed_attention_forward_hopper, xa_block=128, sampled=SAMPLED
            ),
        ),
        (
            HOPPER,
            attention(torch.float16, 64, forward_hopper.routed_attention_forward_hopper, xa_block=128, start=START),
        ),
        (DECODE, decode_tokens(torch.float16, 64, 8)),
    ],
}

if __name__ == "__main__":
    target = int(sys.argv[1])
    launches = LAUNCHES + FURTHER[target]
    print(json.dumps([size for kernels, call in launches for size in compile_call(target, kernels, call)]))
