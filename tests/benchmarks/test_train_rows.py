"""Rows of training: the pass through both modes learns what routed attention learns."""

import functools

import pytest
import torch
import train
from baselines import DENSE
from numerics import make_qkv

from elastic_kernels import routed_attention
from elastic_kernels.routed_attention import counterfactual


SIZES = {"mode_pair": "FA-SSA", "sink_size": 3, "window_size": 20}


@pytest.mark.parametrize("wanted", ["output", "gradients"])
def test_dual_pass_computes_routed_attention(wanted, monkeypatch):
    monkeypatch.setattr(train, "SIZES", SIZES)
    query, key, value = make_qkv(heads=4, kv_heads=2, length=50, dtype=torch.float32, requires_grad=True)
    gate = torch.tensor([[1.0, 0.0]], requires_grad=True)
    upstream = torch.randn(query.shape, generator=torch.Generator().manual_seed(0))
    attentions = {
        "ours": lambda *qkv: routed_attention(*qkv, gate, **SIZES),
        "dual": lambda *qkv: train.dual_pass(*qkv, gate=gate, dense=DENSE["fa2"]),
    }
    if wanted == "output":
        results = [[attend(query, key, value)] for attend in attentions.values()]
    else:
        leaves = [query, key, value, gate]
        results = [train.forward_and_backward(attend, leaves, upstream)() for attend in attentions.values()]
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fraction", train.FRACTIONS)
def test_a_sample_changes_the_gradient_of_the_decision_alone(fraction, monkeypatch):
    monkeypatch.setattr(counterfactual, "TILE", 4)
    query, key, value = make_qkv(heads=4, kv_heads=2, length=50, dtype=torch.float32, requires_grad=True)
    gate = torch.tensor([[1.0, 0.0]], requires_grad=True)
    grads = []
    for options in ({}, train.sample(gate, 50, fraction)):
        attend = functools.partial(routed_attention, gate=gate, **SIZES, **options)
        grads.append(train.forward_and_backward(attend, [query, key, value, gate], torch.ones_like(query))())
    assert [torch.equal(whole, sampled) for whole, sampled in zip(*grads)] == [True, True, True, False]
