"""The fused prefill kernels against dense float64 attention: interpreted, or on a GPU in a tier of their own."""

import pytest
import torch
from numerics import assert_as_accurate_as, make_qkv
from ops import cases
from ops.dense import dense_attention, mode_mask, random_kept_blocks

from elastic_kernels import KeptBlocks, routed_attention


SIZES = {"sink_size": 3, "window_size": 20}
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are either interpreted or compiled")
# Under the interpreter a tile has 32 queries and 16 keys.
CASES = {
    "one-token": {"length": 1},
    "two-tokens": {"length": 2},
    "below-a-tile": {"length": 31},
    "one-tile": {"length": 32},
    "above-a-tile": {"length": 33},
    "several-tiles": {"length": 97},
    "groups-12-to-2": {"heads": 12, "kv_heads": 2, "length": 33},
    "groups-9-to-3": {"heads": 9, "kv_heads": 3, "length": 33},
    "head-dim-80": {"length": 40, "head_dim": 80},
    "no-sink": {"length": 70, "sink_size": 0},
    "window-of-one": {"length": 70, "window_size": 1},
    "sink-beyond-window": {"length": 70, "sink_size": 40, "window_size": 5},
    "window-beyond-length": {"length": 40, "window_size": 2**40},
    "chunk": {"length": 90, "query_length": 23},
    "one-query": {"length": 70, "query_length": 1},
    "padded": {"length": 50, "batch": 3, "start": [0, 29, 49]},
    "nothing-but-padding": {"length": 20, "batch": 2, "start": [20, 0]},
    "padded-chunk": {"length": 70, "query_length": 37, "batch": 2, "start": [55, 10]},
    "packed": {"length": 40, "batch": 2, "cu_seqlens": [0, 3, 36, 40, 41, 80]},
    "softcap": {"length": 40, "softcap": 2.0},
    "sinks": {"length": 40, "sinks": True},
    "XA-blocks-below-a-tile": {"length": 70, "mode_pair": "XA-SSA", "block_size": 16},
    **cases.XA_CASES,
}
GPU_CASES = {
    "1025": {"length": 1025},
    "127": {"length": 127},
    "129": {"length": 129, "batch": 2},
    "groups-12-to-2": {"heads": 12, "length": 507},
    "groups-8-to-2": {"heads": 8, "length": 400},
    "padded-chunk": {"length": 700, "query_length": 129, "batch": 2, "start": [300, 650]},
    **cases.GPU_CASES,
}


def compute(case, dtype, *, device="cpu", implementation="triton", head_dim=16):
    """(output, lse) of the kernel, of float64 attention and of eager attention in `dtype`."""
    case = {
        "batch": 1,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": head_dim,
        "mode_pair": "FA-SSA",
        "block_size": 32,
    } | case
    tensors = ("start", "cu_seqlens")
    where = {name: torch.tensor(case[name], device=device) for name in tensors if name in case}
    names = ("batch", "heads", "kv_heads", "length", "query_length", "head_dim")
    qkv = make_qkv(**{name: case[name] for name in names if name in case}, dtype=dtype)
    # Views as a projection leaves them: heads inside tokens.
    query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2).to(device) for x in qkv)
    sequences = len(case["cu_seqlens"]) - 1 if "cu_seqlens" in case else case["batch"]
    gate = (torch.arange(sequences * case["kv_heads"], device=device) % 2 == 1).view(sequences, -1)
    options = {name: case[name] for name in ("softcap",) if name in case}
    if "sinks" in case:
        options["sinks"] = torch.linspace(-1, 1, case["heads"], device=device)
    sizes = {name: case.get(name, size) for name, size in SIZES.items()}
    kept = None
    if "XA" in case["mode_pair"]:
        blocks = [-(-x.shape[2] // case["block_size"]) for x in (query, key)]
        kept = random_kept_blocks(sequences, case["heads"], *blocks, case["block_size"])
        kept = KeptBlocks(kept.indices.to(device), kept.counts.to(device), kept.block_size)
    actual = routed_attention(
        query, key, value, gate, mode_pair=case["mode_pair"], **sizes, **where, kept_blocks=kept, **options,
        return_lse=True, implementation=implementation,
    )  # fmt: skip

    cpu = [x.cpu() for x in (query, key, value)]
    dense_kept = kept and KeptBlocks(kept.indices.cpu(), kept.counts.cpu(), kept.block_size)
    cpu_where = {name: x.cpu() for name, x in where.items()}
    masks = [
        mode_mask(m, *cpu[:2], **sizes, kept_blocks=dense_kept, **cpu_where) for m in case["mode_pair"].split("-")
    ]
    sparse = gate.cpu()[:, :, None]
    if "cu_seqlens" in case:
        counts = cpu_where["cu_seqlens"].diff()
        sparse = gate.cpu().repeat_interleave(counts, 0).view(case["batch"], -1, case["kv_heads"]).transpose(1, 2)
    sparse = sparse.repeat_interleave(case["heads"] // case["kv_heads"], 1)[..., None]
    mask = torch.where(sparse, masks[1], masks[0])
    options = {name: x.cpu() if name == "sinks" else x for name, x in options.items()}
    reference = dense_attention(*(x.double() for x in cpu), mask, **options)
    return [x.cpu() for x in actual], reference, dense_attention(*cpu, mask, **options)


def assert_accurate(actual, reference, eager):
    assert_as_accurate_as(actual[0], reference[0], eager[0], what="output")
    lse, expected = actual[1].double(), reference[1]
    torch.testing.assert_close(lse, expected, rtol=1e-4, atol=1e-4, msg=lambda text: f"lse: {text}")


@ON_CPU
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_triton_in_float32(case):
    assert_accurate(*compute(case, torch.float32))


@ON_CPU
@pytest.mark.parametrize("name", ["several-tiles", "padded", "XA-SSA"])
def test_triton_in_float16(name):
    assert_accurate(*compute(CASES[name], torch.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "hopper"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES)
def test_on_a_gpu(case, dtype, head_dim, implementation):
    options = {"device": "cuda", "implementation": implementation, "head_dim": head_dim}
    assert_accurate(*compute({"sink_size": 100, "window_size": 200} | case, dtype, **options))


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    fused = torch.randn(1, 70_000, 48, 768, device="cuda", dtype=torch.bfloat16)[..., :128].transpose(1, 2)
    query, key, value = fused[:, :32], fused[:, 32:40], fused[:, 40:]
    gate = torch.tensor([[0, 1] * 4], device="cuda")
    arguments = {"mode_pair": "FA-SSA", "sink_size": 128, "window_size": 2048}
    one, other = (
        routed_attention(query[:, :, -256:], key, value, gate, **arguments, implementation=name)
        for name in ("triton", "hopper")
    )
    torch.testing.assert_close(one, other, rtol=0.02, atol=0.002)


@ON_CPU
@pytest.mark.parametrize("name", ["start", "cu_seqlens", "sinks"])
def test_vectors_may_have_any_stride(name):
    query, key, value = make_qkv(batch=3, dtype=torch.float32)
    vectors = {"start": [5, 20, 0], "cu_seqlens": [0, 40, 80, 120], "sinks": [0.5, -1.0, 2.0, 0.0]}
    vector = torch.tensor(vectors[name])
    strided = torch.stack([vector, torch.ones_like(vector)], dim=1)[:, 0]
    gate = torch.tensor([[0, 1], [1, 0], [1, 1]])
    outputs = [
        routed_attention(
            query, key, value, gate, mode_pair="FA-SSA", implementation="triton", **SIZES, **{name: given}
        )
        for given in (vector, strided)
    ]
    assert torch.equal(*outputs)


@ON_CPU
def test_kept_blocks_may_have_any_stride():
    query, key, value = make_qkv(length=70, dtype=torch.float32)
    kept = KeptBlocks.from_mask(
        (torch.rand(1, 8, 3, 3, generator=torch.Generator().manual_seed(0)) < 0.5).tril()
        | torch.eye(3, dtype=torch.bool),
        32,
    )
    every_other = KeptBlocks(kept.indices[:, ::2], kept.counts[:, ::2], 32)
    dense = KeptBlocks(every_other.indices.contiguous(), every_other.counts.contiguous(), 32)
    gate = torch.ones(1, 2, dtype=torch.bool)
    outputs = [
        routed_attention(
            query, key, value, gate, mode_pair="FA-XA", kept_blocks=blocks, implementation="triton", **SIZES
        )
        for blocks in (every_other, dense)
    ]
    assert torch.equal(*outputs)
