"""Which sample of queries a sequence draws, and that every implementation of a pair takes the same one."""

import pytest
import torch
from numerics import make_qkv
from ops.dense import random_kept_blocks

from elastic_kernels.routed_attention import backward_delta, counterfactual
from elastic_peft import RoutingTape, mode_pairs
from elastic_peft.counterfactual import counterfactual_noise
from elastic_peft.gating import uniform_noise


def test_noise_of_a_sequence_does_not_depend_on_its_batch():
    together = counterfactual_noise([11, 22, 33], [2, 4], length=2000, fraction=0.5)
    alone = counterfactual_noise([22], [2, 4], length=1000, fraction=0.5)
    assert [noise.shape for noise in alone] == [(1, 2, 4), (1, 4, 4)]
    for left, right in zip(together, alone):
        assert torch.equal(left[1:2, :, :4], right)
    assert not torch.equal(together[0][0], together[0][1])


def test_samples_and_decisions_have_noise_of_their_own():
    (decisions,), (sample,) = uniform_noise([11], [2]), counterfactual_noise([11], [2], length=256, fraction=0.5)
    assert not torch.isin(sample, decisions).any()


def test_a_tape_refuses_other_fractions():
    with pytest.raises(ValueError, match=r"`counterfactual_fraction` must be 1 / n .*got 0\.4"):
        RoutingTape(counterfactual_fraction=0.4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are either interpreted or compiled")
def test_a_sequence_cut_into_segments_samples_alike_on_the_kernels(monkeypatch):
    monkeypatch.setattr(counterfactual, "TILE", 32)  # one of the kernels' here
    monkeypatch.setattr(backward_delta, "_BLOCK_M", 32)
    query, key, value = make_qkv(heads=2, length=80, dtype=torch.float32)
    noise = torch.tensor([[[0.7, 0.2], [0.1, 0.6]]])
    where = {"cu_seqlens": torch.tensor([0, 4, 70, 80]), "kept_blocks": random_kept_blocks(3, 2, 5, 5, 16)}
    upstream = torch.randn(query.shape, generator=torch.Generator().manual_seed(0))
    grads = {}
    for name in ("reference", "triton"):
        monkeypatch.setattr(mode_pairs, "choose_implementation", lambda *_, name=name, **options: name)
        sizes, scores = {"sink_size": 2, "window_size": 6}, {"softcap": None, "sinks": None, "scale": None}
        pair = mode_pairs.PairAttention((query, key, value), lambda: None, sizes, scores, (0.5, noise))
        gate = torch.tensor([[0.0, 1.0]] * 3, requires_grad=True)
        output, ran = pair(("XA", "SSA"), gate, **where)
        assert ran == name
        (grads[name],) = torch.autograd.grad(output, gate, upstream)
    torch.testing.assert_close(grads["triton"], grads["reference"], rtol=1e-4, atol=1e-4)
    assert grads["reference"].count_nonzero() > 1
