"""Compiles what the prefill launchers would launch, for GPUs that need not be there; prints shared memory as JSON."""

import json
import sys
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import mangle_type

from elastic_kernels import KeptBlocks
from elastic_kernels.routed_attention import forward, forward_hopper


class Recorder:
    """Stands in for a kernel and keeps the arguments of its launch."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.record

    def record(self, *args, num_warps, num_stages=3, maxnreg=None, enable_fp_fusion=True, **kwargs):
        values = dict(zip(self.kernel.arg_names, args)) | kwargs
        constants = {p.name for p in self.kernel.params if p.is_constexpr}
        constants |= {name for name, value in values.items() if value is None or (type(value) is int and value == 1)}
        self.signature = {n: "constexpr" if n in constants else mangle_type(values[n]) for n in self.kernel.arg_names}
        self.constants = {name: values[name] for name in constants}
        self.options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}


def compile_launch(module, name, capability, dtype, head_dim, *, xa_block=0, **options):
    """Shared memory in bytes of the kernel `name` that `module`'s launcher starts for such inputs."""
    recorder = Recorder(getattr(module, name))
    query, key = (torch.empty(2, 300, heads, head_dim, dtype=dtype).transpose(1, 2) for heads in (8, 2))
    patches = {name: recorder, "compute_capability": lambda index: capability}
    if xa_block:
        blocks = -(-300 // xa_block)
        options["kept_blocks"] = KeptBlocks.from_mask(torch.ones(2, 8, blocks, blocks, dtype=torch.bool), xa_block)
    launch = module.routed_attention_forward if module is forward else module.routed_attention_forward_hopper
    with mock.patch.multiple(module, **patches):
        launch(
            query, key, key, torch.zeros(2, 2, dtype=torch.bool), mode_pair="FA-XA" if xa_block else "FA-SSA",
            sink_size=128, window_size=2048, scale=0.1, **options,
        )  # fmt: skip
    source = ASTSource if module is forward else GluonASTSource
    source = source(recorder.kernel, recorder.signature, recorder.constants)
    return triton.compile(source, GPUTarget("cuda", capability, 32), recorder.options).metadata.shared


PORTABLE, HOPPER = (
    SimpleNamespace(module=forward, name="_routed_attention_fwd_kernel"),
    SimpleNamespace(module=forward_hopper, name="_routed_attention_fwd_hopper_kernel"),
)
LAUNCHES = {
    "sm80": [
        (PORTABLE, torch.bfloat16, 128, {"xa_block": 128}),
        (PORTABLE, torch.float32, 128, {"start": torch.zeros(2, dtype=torch.int64)}),
        (PORTABLE, torch.float16, 256, {"softcap": 50.0}),
    ],
    "sm89": [(PORTABLE, torch.bfloat16, 128, {"xa_block": 128})],
    "sm90": [
        (PORTABLE, torch.bfloat16, 128, {"xa_block": 128}),
        (HOPPER, torch.bfloat16, 128, {}),
        (HOPPER, torch.float16, 64, {"xa_block": 128, "start": torch.zeros(2, dtype=torch.int64)}),
    ],
}

if __name__ == "__main__":
    target = sys.argv[1]
    launches = LAUNCHES[target]
    print(json.dumps([compile_launch(k.module, k.name, int(target[2:]), d, h, **o) for k, d, h, o in launches]))
