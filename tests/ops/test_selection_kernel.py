"""The fused block selection: interpreted, or on a GPU in a tier of its own.

Two computations of the scores may fall on different sides of the threshold, so a selection is not compared with
another one, but judged by block scores in float64.
"""

import pytest
import torch
import torch.nn.functional as F
from numerics import make_qkv
from ops.dense import brute_force_kept, sequences_of

from elastic_kernels import block_selection


ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are either interpreted or compiled")
SIZES = {"block_size": 8, "stride": 4, "threshold": 0.6}
# Under the interpreter a tile has 16 query groups and 32 key groups.
CASES = {
    "one-token": {"length": 1},
    "below-a-group": {"length": 3},
    "one-block": {"length": 8},
    "above-a-block": {"length": 9},
    "one-tile": {"length": 64},
    "above-a-tile": {"length": 65},
    "several-key-tiles": {"length": 150},
    "low-threshold": {"length": 70, "threshold": 0.05},
    "high-threshold": {"length": 70, "threshold": 0.99},
    "whole-threshold": {"length": 40, "threshold": 1.0},
    "strides-of-one": {"length": 30, "stride": 1},
    "two-strides-a-block": {"length": 70, "stride": 4},
    "blocks-above-a-tile": {"length": 70, "block_size": 32, "stride": 1},
    "groups-9-to-3": {"length": 20, "heads": 9, "kv_heads": 3},
    "head-dim-24": {"length": 40, "head_dim": 24},
    "head-dim-80": {"length": 40, "head_dim": 80},
    "scale": {"length": 70, "scale": 2.0},
    "chunk": {"length": 85, "query_length": 21},
    "padded": {"length": 45, "batch": 4, "start": [0, 3, 44, 45]},
    "padded-chunk": {"length": 45, "query_length": 24, "batch": 2, "start": [5, 29]},
    "packed": {"length": 40, "batch": 2, "cu_seqlens": [0, 23, 24, 40, 40, 80]},
}
GPU_SIZES = {"block_size": 128, "stride": 16, "threshold": 0.9, "heads": 8, "kv_heads": 2, "head_dim": 128}
GPU_CASES = {
    "4K": {"length": 4096},
    "16K": {"length": 16384, "heads": 4, "kv_heads": 1},
    "odd-length": {"length": 5001},
    "below-a-block": {"length": 100},
    "blocks-of-64": {"length": 4096, "block_size": 64},
    "blocks-of-2048": {"length": 8192, "block_size": 2048},
    "stride-8": {"length": 4096, "stride": 8},
    "head-dim-64": {"length": 4096, "head_dim": 64},
    "head-dim-80": {"length": 4096, "head_dim": 80},
    "head-dim-256": {"length": 4096, "head_dim": 256},
    "groups-9-to-3": {"length": 4096, "heads": 9, "kv_heads": 3},
    "chunk": {"length": 6000, "query_length": 1904},
    "padded": {"length": 4096, "batch": 3, "start": [0, 1000, 4096]},
    "packed": {"length": 4096, "batch": 2, "cu_seqlens": [0, 3000, 3001, 4096, 8192]},
}


def block_mass(query, key, *, block_size, stride, scale=None):
    """Attention mass `[Hq, nQ, nK]` of one sequence's query `[Hq, Q, D]` and key `[Hkv, K, D]`, in float64."""
    first_group = (key.shape[1] - query.shape[1]) // stride
    scale = query.shape[2] ** -0.5 if scale is None else scale
    query, key = (F.pad(x.double(), (0, 0, 0, -x.shape[1] % stride)).unflatten(1, (-1, stride)) for x in (query, key))
    key = key.repeat_interleave(len(query) // len(key), 0)
    scores = query.flip(2).flatten(2) @ key.flatten(2).mT * (scale / stride)
    later = torch.ones_like(scores[0], dtype=torch.bool).triu(first_group + 1)
    mass = scores.masked_fill(later, -torch.inf).softmax(-1)
    per_block = block_size // stride
    mass = F.pad(mass, (0, -mass.shape[2] % per_block, 0, -mass.shape[1] % per_block))
    return mass.unflatten(2, (-1, per_block)).sum(3).unflatten(1, (-1, per_block)).sum(2)


def assert_fewest(mask, mass, *, threshold, tolerance):
    """Assert that `mask` keeps of each row of `mass` the fewest blocks that reach the threshold, highest first.

    Scores closer than `tolerance`, a share of the row's total, count as equal.
    """
    rows, columns = mass.shape[1:]
    column = torch.arange(columns, device=mass.device)
    diagonal = torch.arange(columns - rows, columns, device=mass.device)[:, None]
    always, causal = (column == 0) | (column == diagonal), column <= diagonal
    mass = mass / mass.sum(-1, keepdim=True)
    assert (mask | ~always).all(), "a first or diagonal block is missing"
    assert not (mask & ~causal).any(), "a block after the diagonal is kept"
    kept = (mass * mask).sum(-1)
    assert kept.min() >= threshold - tolerance, f"a row keeps {kept.min():.6f} of its mass"
    lowest = mass.masked_fill(~mask | always, torch.inf).amin(-1)
    assert (kept - lowest).max() < threshold + tolerance, f"a row needs no block of {lowest.min():.6f} of its mass"
    left_out = mass.masked_fill(mask | ~causal, 0.0).amax(-1)
    assert (lowest - left_out).min() >= -tolerance, "a block is kept and a heavier one is not"


def check(query, key, *, tolerance, start=None, cu_seqlens=None, heads=None, threshold, **sizes):
    where = {
        name: None if x is None else torch.tensor(x, device=query.device)
        for name, x in {"start": start, "cu_seqlens": cu_seqlens, "heads": heads}.items()
    }
    kept = block_selection(query, key, **where, threshold=threshold, **sizes, implementation="triton")
    mask = kept.to_mask()
    group = query.shape[1] // key.shape[1]
    ahead = key.shape[2] - query.shape[2]
    for n, (row, begin, end) in enumerate(sequences_of(len(query), key.shape[2], where["start"], where["cu_seqlens"])):
        if begin == end:
            assert not mask[n].any(), f"the empty sequence {n} keeps blocks"
            continue
        wanted = torch.ones(key.shape[1], dtype=torch.bool) if heads is None else torch.tensor(heads[n])
        wanted = wanted.repeat_interleave(group).to(mask.device)
        mass = block_mass(query[row, :, max(begin - ahead, 0) : end - ahead], key[row, :, begin:end], **sizes)
        rows, columns = mass.shape[1:]
        if wanted.any():
            own = mask[n, wanted, :rows, :columns]
            assert_fewest(own, mass[wanted], threshold=threshold, tolerance=tolerance)
        assert mask[n].sum() == mask[n, wanted, :rows, :columns].sum(), (
            f"sequence {n} keeps blocks that are not its own"
        )
    return kept


def check_case(case, dtype):
    case = {"batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, **SIZES} | case
    names = ("batch", "heads", "kv_heads", "length", "query_length", "head_dim")
    query, key, _ = make_qkv(**{name: case.pop(name) for name in names if name in case}, dtype=dtype)
    check(query, key, **case, tolerance=1e-5)


def planted(case, *, device="cuda", dtype=torch.bfloat16):
    """Query and key of a case in which every query block looks for two key blocks, and what is left of the case."""
    case = {"batch": 1} | GPU_SIZES | case
    length, size = case.pop("length"), case["block_size"]
    query_length = case.pop("query_length", length)
    batch, heads, kv_heads, head_dim = (case.pop(name) for name in ("batch", "heads", "kv_heads", "head_dim"))
    generator = torch.Generator(device).manual_seed(0)
    blocks = -(-length // size)
    directions = torch.randn(batch, kv_heads, blocks, head_dim, device=device, generator=generator)
    pairs = torch.randint(blocks, (2, blocks), device=device, generator=generator)
    query = directions[:, :, pairs].sum(2).repeat_interleave(heads // kv_heads, 1)
    query, key = (x.repeat_interleave(size, 2)[:, :, :length] for x in (query * (5 / head_dim**0.5), directions))
    query, key = (x + torch.randn(x.shape, device=device, generator=generator) for x in (query, key))
    # Views as a projection leaves them: heads inside tokens.
    query, key = (x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key))
    return query[:, :, length - query_length :], key, case


@pytest.mark.parametrize("change", ["one-more", "one-less", "a-lighter-one"])
def test_the_judge_rejects(change):
    query, key, _ = make_qkv(heads=1, kv_heads=1, length=80)
    mask = brute_force_kept(query[0], key[0], **SIZES)
    mass = block_mass(query[0], key[0], block_size=8, stride=4)
    assert_fewest(mask, mass, threshold=0.6, tolerance=1e-9)
    middle = mass[0, -1, 1:-1]
    kept = mask[0, -1, 1:-1]
    added, removed = (middle.masked_fill(chosen, torch.inf).argmin() for chosen in (kept, ~kept))
    if change != "one-less":
        kept[added] = True
    if change != "one-more":
        kept[removed] = False
    with pytest.raises(AssertionError, match=r"a row|a block is kept"):
        assert_fewest(mask, mass, threshold=0.6, tolerance=1e-9)


@ON_CPU
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_float32(case):
    check_case(case, torch.float32)


@ON_CPU
@pytest.mark.parametrize("name", ["several-key-tiles", "padded", "head-dim-80"])
def test_float16(name):
    check_case(CASES[name], torch.float16)


@ON_CPU
def test_heads_that_nobody_asked_for_keep_nothing():
    query, key, _ = make_qkv(batch=3, heads=4, length=30, dtype=torch.float32)
    check(query, key, heads=[[True, False], [False, False], [False, True]], **SIZES, tolerance=1e-5)


@ON_CPU
def test_padding_content_is_never_read():
    query, key, _ = make_qkv(heads=1, kv_heads=1, length=45, dtype=torch.float32)
    query[:, :, :11] = torch.nan
    key[:, :, :11] = torch.nan
    check(query, key, start=[11], **SIZES, tolerance=1e-5)


@ON_CPU
def test_channels_need_not_be_adjacent():
    query, key, _ = make_qkv(heads=1, kv_heads=1, length=30, dtype=torch.float32)
    check(query.mT.contiguous().mT, key.mT.contiguous().mT, **SIZES, tolerance=1e-5)


@ON_CPU
def test_ties_go_to_the_lower_block():
    query, key, _ = make_qkv(heads=1, kv_heads=1, length=80, dtype=torch.float32)
    sizes = {"block_size": 8, "stride": 4, "threshold": 0.5, "implementation": "triton"}
    mask = block_selection(query, torch.zeros_like(key), **sizes).to_mask()
    # Ten blocks of equal mass but for the diagonal one's, which is lower: four others reach one half.
    assert mask[0, 0, -1].tolist() == [True] * 5 + [False] * 4 + [True]


@ON_CPU
def test_without_a_name_the_reference_runs_on_a_cpu():
    query, key, _ = make_qkv(length=20, query_length=12, dtype=torch.float32)
    start = torch.tensor([3])
    with pytest.raises(ValueError, match="got an offset of 5 in row 0"):  # only the reference reads `start`
        block_selection(query, key, start=start, block_size=8, stride=4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "it takes fp16, bf16 and fp32, not torch.float64"),
        ({"block_size": 12}, "powers of two"),
        ({"block_size": 256, "stride": 1}, "2 to 128 strides a block"),
        ({"block_size": 8, "stride": 8}, "2 to 128 strides a block"),
        ({"implementation": "cuda"}, "`implementation` must be None or one of"),
    ],
    ids=["float64", "block-of-12", "256-strides-a-block", "one-stride-a-block", "unknown"],
)
def test_a_named_kernel_never_gives_way(changes, reason):
    options = {"implementation": "triton", "block_size": 8, "stride": 4} | changes
    query, key, _ = make_qkv(length=20, dtype=options.pop("dtype", torch.float32))
    with pytest.raises(ValueError, match=reason):
        block_selection(query, key, **options)


# Products of bfloat16 are exact; their sums are in float32, and 2,048 of them make a score.
@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES)
def test_on_a_gpu(case):
    query, key, case = planted(case)
    check(query, key, **case, tolerance=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [32, 64, 128, 1024])
def test_float16_on_a_gpu(block_size):
    query, key, case = planted({"length": 2048, "block_size": block_size}, dtype=torch.float16)
    check(query, key, **case, tolerance=1e-4)


@pytest.mark.gpu
def test_float32_runs_the_reference_on_a_gpu():
    query, key, case = planted({"length": 2048}, dtype=torch.float32)
    reference = block_selection(query, key, **case, implementation="reference")
    assert torch.equal(block_selection(query, key, **case).to_mask(), reference.to_mask())
    with pytest.raises(ValueError, match="it takes fp16 and bf16 on a GPU"):
        block_selection(query, key, **case, implementation="triton")


@pytest.mark.gpu
def test_a_graph_replays_without_a_host_sync():
    query, key, case = planted({"length": 2048})
    where = {"start": torch.tensor([100], device="cuda"), "heads": torch.tensor([[True, False]], device="cuda")}
    first = block_selection(query, key, **case, **where, implementation="triton").to_mask()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = block_selection(query, key, **case, **where, implementation="triton")
    for replay in range(2):
        kept.counts.fill_(1)
        graph.replay()
        assert torch.equal(kept.to_mask(), first), f"replay {replay} keeps other blocks"


@pytest.mark.gpu
def test_memory_on_a_gpu():
    query, key, case = planted({"length": 32768, "heads": 8, "kv_heads": 2})
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = block_selection(query, key, **case, implementation="triton")
    lists = kept.indices.nbytes + kept.counts.nbytes
    scratch = torch.cuda.max_memory_allocated() - before - lists
    # One matrix over all groups has 8 x 2048 x 2048 scores: 134 MB. A program keeps 144 rows of 256.
    assert scratch < 32e6, f"{scratch / 1e6:.0f} MB besides the lists"


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    fused = torch.randn(1, 70_000, 48, 768, device="cuda", dtype=torch.bfloat16)[..., :128].transpose(1, 2)
    query, key = fused[:, :1, -368:], fused[:, 32:33]
    check(query, key, **{name: GPU_SIZES[name] for name in ("block_size", "stride", "threshold")}, tolerance=1e-4)
