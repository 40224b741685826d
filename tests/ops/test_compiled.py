"""The operators as opaque parts of a compiled graph: their schemas, the shapes they promise, and what they return."""

import pytest
import torch
from ops.operator_calls import CALLS
from torch.library import opcheck

import elastic_kernels
from elastic_kernels import _compiled


@pytest.mark.parametrize("name", CALLS)
def test_inside_a_graph_as_outside(name):
    function, inside = getattr(elastic_kernels, name), getattr(_compiled, f"{name}_op")
    arguments, options = CALLS[name]
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
    operator, inside = getattr(_compiled, f"_{name}"), getattr(_compiled, f"{name}_op")
    arguments, options = CALLS[name]
    calls = []
    monkeypatch.setattr(
        _compiled, f"_{name}", lambda *args, **kwargs: calls.append((args, kwargs)) or operator(*args, **kwargs)
    )
    inside(*arguments, **options, **({"return_lse": True} if name.startswith("routed") else {}), implementation=None)
    opcheck(operator, *calls[0], test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", CALLS)
def test_a_graph_takes_the_operator_whole(name):
    function = getattr(elastic_kernels, name)
    arguments, options = CALLS[name]
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
