"""The operators as opaque parts of a compiled graph: their schemas, the shapes they promise, and what they return."""

import sys

import pytest
import torch
from numerics import make_qkv
from ops.dense import random_kept_blocks
from torch.library import opcheck

from elastic_kernels import (
    LinearWeights,
    RaggedRows,
    RouterWeights,
    _compiled,
    block_selection,
    routed_attention,
    routed_decode,
    router,
)


QUERY, KEY, VALUE = make_qkv(length=40, dtype=torch.float32)
GATE = torch.tensor([[False, True]])
KEPT = random_kept_blocks(1, 4, 5, 5, 8)
SIZES = {"sink_size": 2, "window_size": 9}
SCORES = {"softcap": None, "sinks": None, "scale": None}
WEIGHTS = RouterWeights(
    *(LinearWeights(torch.randn(s), torch.randn(s[0])) for s in ((8, 4), (4, 8), (8, 4), (4, 8), (2, 4)))
)
RAGGED = RaggedRows(torch.tensor([[0, 40]]), torch.tensor([40]), 17)
# operator -> (function, the same inside a graph, arguments, options)
CALLS = {
    "routed_attention": (
        routed_attention,
        _compiled.routed_attention_op,
        (QUERY, KEY, VALUE, GATE),
        {**SIZES, **SCORES, "mode_pair": "XA-SSA", "kept_blocks": KEPT, "start": None, "cu_seqlens": None},
    ),
    "routed_decode": (
        routed_decode,
        _compiled.routed_decode_op,
        (QUERY[:, :, -3:], KEY[0, 0].repeat(2, 1), VALUE[0, 0].repeat(2, 1), GATE),
        {**SIZES, **SCORES, "storage": RAGGED, "start": None, "length": None},
    ),
    "router": (
        router,
        _compiled.router_op,
        (torch.randn(1, 5, 2, 4), torch.ones(1, 5, dtype=torch.bool), WEIGHTS),
        {"mean": None, "deviation": None, "sparsity_bias": 0.5},
    ),
    "block_selection": (
        block_selection,
        _compiled.block_selection_op,
        (QUERY, KEY),
        {
            "heads": None,
            "block_size": 8,
            "stride": 4,
            "threshold": 0.6,
            "start": None,
            "cu_seqlens": None,
            "scale": None,
        },
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_inside_a_graph_as_outside(name):
    function, inside, arguments, options = CALLS[name]
    more = {"return_lse": True} if name.startswith("routed") else {}
    expected, actual = (
        list(vars(result).values()) if name == "block_selection" else result
        for result in (
            function(*arguments, **options, **more),
            inside(*arguments, **options, **more, implementation=None),
        )
    )
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
def test_promised_results(name, monkeypatch):
    _, inside, arguments, options = CALLS[name]
    operator = getattr(_compiled, f"_{name}")
    calls = []
    monkeypatch.setattr(
        _compiled, f"_{name}", lambda *args, **kwargs: calls.append((args, kwargs)) or operator(*args, **kwargs)
    )
    inside(*arguments, **options, **({"return_lse": True} if name.startswith("routed") else {}), implementation=None)
    opcheck(operator, *calls[0], test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", CALLS)
def test_a_graph_takes_the_operator_whole(name, monkeypatch):
    function, _, arguments, options = CALLS[name]
    # On a CUDA device a graph does so by itself.
    api = sys.modules[function.__module__]
    monkeypatch.setattr(api, "is_opaque", lambda tensors, device: torch.compiler.is_compiling())
    calls = []
    operator = getattr(_compiled, f"_{name}")

    def count_calls(graph, inputs):
        calls.extend(node for node in graph.graph.nodes if node.target is operator._opoverload)
        return graph.forward

    compiled = torch.compile(lambda *given: function(*given, **options), fullgraph=True, backend=count_calls)
    actual, expected = compiled(*arguments), function(*arguments, **options)
    if name == "block_selection":
        actual, expected = actual.to_mask(), expected.to_mask()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert len(calls) == 1, f"{len(calls)} calls of the operator in the graph"
