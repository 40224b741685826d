"""Decode attention, over a plain cache and over ragged storage, against dense float64 attention."""

import pytest
import torch
from numerics import assert_as_accurate_as, assert_equal_in_float64, make_qkv
from ops.dense import dense_attention

from elastic_kernels.routed_decode import RaggedRows, routed_decode


ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are either interpreted or compiled")
SIZES = {"sink_size": 3, "window_size": 20}
# Under the interpreter a tile has 16 keys and a launch 3 programs.
PLAIN = {
    "one-token": {"length": 1},
    "two-tokens": {"length": 2, "queries": 2},
    "below-a-tile": {"length": 15},
    "one-tile": {"length": 16, "queries": 3},
    "above-a-tile": {"length": 17, "queries": 5},
    "below-sink-and-window": {"length": 22},
    "sink-and-window": {"length": 23},
    "above-sink-and-window": {"length": 24},
    "queries-4": {"length": 61, "queries": 4},
    "queries-6": {"length": 50, "queries": 6},
    "queries-7": {"length": 33, "queries": 7},
    "queries-8": {"length": 70, "queries": 8},
    "nothing-but-queries": {"length": 8, "queries": 8},
    "no-sink": {"length": 70, "sink_size": 0, "queries": 2},
    "window-of-one": {"length": 70, "window_size": 1, "queries": 3},
    "window-of-one-without-sink": {"length": 40, "sink_size": 0, "window_size": 1},
    "sink-beyond-window": {"length": 70, "sink_size": 40, "window_size": 5},
    "window-beyond-length": {"length": 40, "window_size": 2**40},
    "groups-12-to-2": {"length": 40, "heads": 12, "queries": 2},
    "groups-9-to-3": {"length": 40, "heads": 9, "kv_heads": 3},
    "groups-8-to-2": {"length": 40, "heads": 8, "queries": 2},
    "groups-2-to-2": {"length": 40, "heads": 2, "queries": 2},
    "more-rows-than-a-tile": {"length": 40, "heads": 5, "kv_heads": 1, "queries": 4},
    "head-dim-20": {"length": 40, "head_dim": 20},
    "padded": {"length": 60, "batch": 2, "start": [0, 31]},
    "padding-among-the-queries": {"length": 20, "batch": 2, "start": [17, 0], "queries": 5},
    "nothing-but-padding": {"length": 20, "batch": 2, "start": [20, 3]},
    "held": {"length": 60, "held": 37, "queries": 2},
    "held-by-row": {"length": 60, "batch": 2, "held": [0, 41]},
    "held-and-padded": {"length": 60, "batch": 2, "held": [48, 30], "start": [40, 2], "queries": 3},
    "softcap": {"length": 40, "softcap": 2.0},
    "sinks": {"length": 40, "sinks": True, "batch": 2, "start": [40, 0]},
}
# (tokens of each row, slots of the rings); the window of 20 and 8 queries need 27.
RAGGED = {
    "below-the-sink": {"tokens": [2], "ring": 27},
    "ring-partly-filled": {"tokens": [25], "ring": 27, "queries": 3},
    "ring-full": {"tokens": [30], "ring": 27, "queries": 8},
    "ring-wrapped-once": {"tokens": [31], "ring": 27, "queries": 8},
    "ring-wrapped-often": {"tokens": [100], "ring": 27, "queries": 8},
    "ring-of-the-window": {"tokens": [90], "ring": 20},
    "ring-longer-than-needed": {"tokens": [75], "ring": 40, "queries": 2},
    "no-sink": {"tokens": [64], "ring": 27, "sink_size": 0, "queries": 2},
    "window-of-one": {"tokens": [40], "ring": 1, "window_size": 1},
    "window-beyond-length": {"tokens": [40], "ring": 2**41, "window_size": 2**40},
    "rows": {"tokens": [0, 47], "ring": 27, "queries": 2, "sinks": True},
}


def attended(gate, queries, begins, ends, slots, sink_size, window_size):
    """bool `[B, Hkv, Q, slots]`: key slots that each query attends, tokens lying in slots `begins .. ends`."""
    j = torch.arange(slots) - begins[:, None]
    i = ends[:, None] - begins[:, None] - queries + torch.arange(queries)
    seen = (j[:, None] >= 0) & (j[:, None] <= i[..., None])
    near = (j[:, None] < sink_size) | (i[..., None] - j[:, None] < window_size)
    return seen[:, None] & (near[:, None] | (gate[:, :, None, None] == 0))


def make_case(case, dtype):
    """Inputs of `routed_decode` as a plain cache, and the mask of their dense attention."""
    case = {"batch": 1, "heads": 4, "kv_heads": 2, "queries": 1, "head_dim": 16} | SIZES | case
    names = ("batch", "heads", "kv_heads", "length", "head_dim")
    query, key, value = make_qkv(**{n: case[n] for n in names}, query_length=case["queries"], dtype=dtype)
    # Views as a projection leaves them: heads inside tokens.
    key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value))
    batch, kv_heads = case["batch"], case["kv_heads"]
    gate = (torch.arange(batch * kv_heads) % 2 == 1).view(batch, kv_heads)
    options = {name: case[name] for name in (*SIZES, "softcap") if name in case}
    begins, ends = torch.tensor(case.get("start", [0] * batch)), torch.tensor(case.get("held", case["length"]))
    if "start" in case:
        options["start"] = begins
    if "held" in case:
        options["length"] = ends
    if "sinks" in case:
        options["sinks"] = torch.linspace(-1, 1, case["heads"])
    sizes = {name: case[name] for name in SIZES}
    mask = attended(gate, case["queries"], begins, ends.expand(batch), case["length"], **sizes)
    return (query, key, value, gate), options, mask


def make_ragged(case, dtype):
    """The same over ragged storage; every slot that no query needs holds NaN."""
    batch, longest = len(case["tokens"]), max(case["tokens"])
    plain = {name: x for name, x in case.items() if name not in ("tokens", "ring")}
    (query, key, value, gate), options, mask = make_case(
        plain | {"batch": batch, "length": longest, "held": case["tokens"]}, dtype
    )
    tokens = options.pop("length")
    needed = mask.any(2)
    counts = [[int(t) + 3 if g == 0 else options["sink_size"] + min(case["ring"], 200) for g in row]
              for t, row in zip(tokens, gate)]  # fmt: skip
    offsets = torch.tensor(counts).flatten().cumsum(0).view(gate.shape) - torch.tensor(counts) + 5
    flat = [torch.full((int(offsets.max()) + 300, key.shape[3]), torch.nan, dtype=dtype) for _ in range(2)]
    for b in range(batch):
        for h in range(gate.shape[1]):
            for p in range(int(tokens[b])):
                ringed = bool(gate[b, h]) and p >= options["sink_size"]
                slot = options["sink_size"] + (p - options["sink_size"]) % case["ring"] if ringed else p
                for store, source in zip(flat, (key, value)):
                    store[offsets[b, h] + slot] = source[b, h, p] if needed[b, h, p] else torch.nan
    storage = RaggedRows(offsets, tokens, case["ring"])
    return (query, key, value, gate), (query, *flat, gate), options | {"storage": storage}, mask


def compute(inputs, options, plain, mask, implementation="triton"):
    """(output, lse) of `routed_decode`, of float64 attention and of eager attention in the inputs' dtype."""
    actual = routed_decode(*inputs, **options, return_lse=True, implementation=implementation)
    query, key, value = (x.cpu() for x in plain[:3])
    mask = mask.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = {name: options[name] for name in ("softcap",) if name in options}
    scores |= {name: options[name].cpu() for name in ("sinks",) if name in options}
    reference = dense_attention(*(x.double() for x in (query, key, value)), mask, **scores)
    return actual, reference, dense_attention(query, key, value, mask, **scores)


def assert_accurate(actual, reference, eager, **options):
    assert_as_accurate_as(actual[0], reference[0], eager[0], what="output", **options)
    lse = actual[1].double()
    torch.testing.assert_close(lse, reference[1], rtol=1e-4, atol=1e-4, msg=lambda text: f"lse: {text}")


@ON_CPU
@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
def test_plain_in_float32(case):
    inputs, options, mask = make_case(case, torch.float32)
    assert_accurate(*compute(inputs, options, inputs, mask))


@ON_CPU
@pytest.mark.parametrize("name", ["queries-8", "padded", "sinks"])
def test_plain_in_float16(name):
    inputs, options, mask = make_case(PLAIN[name], torch.float16)
    assert_accurate(*compute(inputs, options, inputs, mask))


@ON_CPU
@pytest.mark.parametrize("case", RAGGED.values(), ids=RAGGED)
def test_ragged_in_float32(case):
    plain, inputs, options, mask = make_ragged(case, torch.float32)
    assert_accurate(*compute(inputs, options, plain, mask))


@ON_CPU
def test_ragged_in_float16():
    plain, inputs, options, mask = make_ragged(RAGGED["ring-wrapped-once"], torch.float16)
    assert_accurate(*compute(inputs, options, plain, mask))


@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
def test_reference_on_a_plain_cache(case):
    inputs, options, mask = make_case(case, torch.float64)
    actual, reference, _ = compute(inputs, options, inputs, mask, "reference")
    for what, one, other in zip(("output", "lse"), actual, reference):
        assert_equal_in_float64(one, other, what=what)


@pytest.mark.parametrize("case", RAGGED.values(), ids=RAGGED)
def test_reference_on_ragged_storage(case):
    plain, inputs, options, mask = make_ragged(case, torch.float64)
    inputs = (inputs[0], *(x.nan_to_num(1e3) for x in inputs[1:3]), inputs[3])
    actual, reference, _ = compute(inputs, options, plain, mask, "reference")
    for what, one, other in zip(("output", "lse"), actual, reference):
        assert_equal_in_float64(one, other, what=what)


@ON_CPU
@pytest.mark.parametrize("programs", [1, 2, 5, 40])
def test_any_number_of_programs(programs, monkeypatch):
    from elastic_kernels.routed_decode import forward

    monkeypatch.setattr(forward, "INTERPRETER", forward.INTERPRETER._replace(programs=programs))
    inputs, options, mask = make_case({"length": 90, "batch": 2, "start": [90, 11]}, torch.float32)
    assert_accurate(*compute(inputs, options, inputs, mask))


@ON_CPU
def test_more_entries_than_a_program_sums_up_at_a_time(monkeypatch):
    from elastic_kernels.routed_decode import forward

    monkeypatch.setattr(forward, "MAX_BLOCK_E", 2)
    case = {"length": 50, "batch": 5, "heads": 1, "kv_heads": 1, "start": [9, 50, 0, 50, 33]}
    inputs, options, mask = make_case(case, torch.float32)
    assert_accurate(*compute(inputs, options, inputs, mask))


def on_gpu(slots, batch=1, queries=1, **options):
    """bf16 inputs of `routed_decode` at the size of an 8B model, every other key-value head streaming."""
    generator = torch.Generator("cuda").manual_seed(slots)
    query, key, value = (
        torch.randn(batch, heads, tokens, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
        for heads, tokens in ((32, queries), (8, slots), (8, slots))
    )
    gate = (torch.arange(8, device="cuda") % 2).expand(batch, -1)
    return (query, key, value, gate), {"sink_size": 128, "window_size": 2048} | options


def assert_accurate_on_gpu(inputs, options):
    output, lse = routed_decode(*inputs, **options, return_lse=True, implementation="triton")
    query, key, value, gate = inputs
    begins = options.get("start", torch.zeros(len(query), dtype=torch.int64, device="cuda"))
    ends = options.get("length", torch.tensor(key.shape[2], device="cuda")).expand(len(query))
    for row in range(len(query)):
        this = slice(row, row + 1)
        where = [x[this].cpu() for x in (gate, begins, ends)]
        mask = attended(
            where[0], query.shape[2], *where[1:], key.shape[2], options["sink_size"], options["window_size"]
        )
        mask = mask.repeat_interleave(4, 1).cuda()
        one = [x[this] for x in (query, key, value)]
        expected = dense_attention(*(x.double() for x in one), mask)
        assert_accurate((output[this], lse[this]), expected, dense_attention(*one, mask))


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 8], ids=["one-query", "8-queries"])
@pytest.mark.parametrize(("length", "batch"), [(131_072, 1), (131_072, 8), (509, 3), (2177, 2)], ids=str)
def test_bf16_on_a_gpu(length, batch, queries):
    assert_accurate_on_gpu(*on_gpu(length, batch, queries))


@pytest.mark.gpu
def test_padding_and_length_on_a_gpu():
    where = {name: torch.tensor(rows, device="cuda") for name, rows in {
        "start": [0, 700, 4990, 0], "length": [5000, 4000, 4992, 0]}.items()}  # fmt: skip
    assert_accurate_on_gpu(*on_gpu(5000, batch=4, queries=3, **where))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("heads", [2, 8, 32], ids=lambda heads: f"groups-{heads}-to-2")
def test_shapes_on_a_gpu(heads, head_dim, dtype):
    case = {"heads": heads, "head_dim": head_dim, "length": 700, "queries": 5, "batch": 2, "start": [3, 400]}
    inputs, options, mask = make_case(case | {"sink_size": 30, "window_size": 90}, dtype)
    here = [x.cuda() for x in inputs]
    actual, *expected = compute(here, options | {"start": options["start"].cuda()}, inputs, mask)
    assert_accurate([x.cpu() for x in actual], *expected, units=8 if dtype == torch.float32 else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("case", RAGGED.values(), ids=RAGGED)
def test_ragged_on_a_gpu(case):
    plain, inputs, options, mask = make_ragged(case, torch.bfloat16)
    rows = options["storage"]
    options["storage"] = RaggedRows(rows.offsets.cuda(), rows.lengths.cuda(), rows.ring_size)
    options |= {name: x.cuda() for name, x in options.items() if name == "sinks"}
    actual, *expected = compute([x.cuda() for x in inputs], options, plain, mask)
    assert_accurate([x.cpu() for x in actual], *expected)


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    fused = torch.randn(1, 70_000, 48, 768, device="cuda", dtype=torch.bfloat16)[..., :128].transpose(1, 2)
    gate = torch.tensor([[0, 1] * 4], device="cuda")
    inputs = (fused[:, :32, -2:], fused[:, 32:40], fused[:, 40:], gate)
    assert_accurate_on_gpu(inputs, {"sink_size": 128, "window_size": 2048})


@pytest.mark.gpu
def test_a_graph_follows_the_gate_and_the_length():
    length = torch.tensor(3000, device="cuda")
    inputs, options = on_gpu(9000, batch=2, length=length)
    gate = inputs[3].clone()
    inputs = (*inputs[:3], gate)
    routed_decode(*inputs, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = routed_decode(*inputs, **options)
    for held, flip in ((3000, 0), (8999, 1), (1, 0)):
        length.fill_(held)
        gate.bitwise_xor_(flip)
        graph.replay()
        eager = routed_decode(*inputs, **options)
        assert output.equal(eager), f"replay at length {held} differs by {(output - eager).abs().max():.2e}"
