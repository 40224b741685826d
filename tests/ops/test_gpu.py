"""What only a GPU shows of all kernels alike: memory safety, capture into graphs, compilation around them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from numerics import make_qkv

from elastic_kernels import routed_attention


SIZES = {"mode_pair": "FA-SSA", "sink_size": 100, "window_size": 300}
TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.gpu


def inputs(length=1500):
    qkv = make_qkv(heads=8, kv_heads=2, length=length, head_dim=128, dtype=torch.bfloat16)
    return [x.cuda() for x in qkv], torch.tensor([[False, True]], device="cuda")


# racecheck does not know what TMA completes, by which the Hopper kernel's warps wait for each other.
@pytest.mark.parametrize(
    ("tool", "implementations"),
    [("memcheck", ("triton", "hopper")), ("synccheck", ("triton", "hopper")), ("racecheck", ("triton",))],
    ids=["memcheck", "synccheck", "racecheck"],
)
def test_compute_sanitizer_finds_nothing(tool, implementations):
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("compute-sanitizer is not installed")
    # Every allocation of its own, so that an access beyond one is an access beyond memory.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": f"{TESTS}:{':'.join(sys.path)}"}
    command = [sanitizer, "--tool", tool, "--error-exitcode", "1", sys.executable]
    command += [TESTS / "ops" / "small_calls.py", *implementations]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, (result.stdout + result.stderr)[-2000:]


@pytest.mark.parametrize("implementation", ["triton", "hopper"])
def test_a_graph_follows_the_gate(implementation):
    qkv, gate = inputs()
    options = SIZES | {"implementation": implementation}
    routed_attention(*qkv, gate, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = routed_attention(*qkv, gate, **options)
    for decisions in ([[False, True]], [[True, False]], [[True, True]]):
        gate.copy_(torch.tensor(decisions))
        graph.replay()
        assert output.equal(routed_attention(*qkv, gate, **options)), f"the replay ignores {decisions}"


def test_attention_waits_for_nothing():
    qkv, gate = inputs()
    routed_attention(*qkv, gate, **SIZES)
    torch.cuda.set_sync_debug_mode("error")
    try:
        routed_attention(*qkv, gate, **SIZES)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_as_one_graph():
    qkv, gate = inputs()

    def attend(query, key, value, gate):
        return routed_attention(query * 2, key, value, gate, **SIZES) + 1

    compiled = torch.compile(attend, fullgraph=True)
    torch.testing.assert_close(compiled(*qkv, gate), attend(*qkv, gate), rtol=0.02, atol=0.02)
