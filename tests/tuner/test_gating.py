"""Gumbel-softmax with a straight-through estimator, and its temperature."""

from __future__ import annotations

import math

import pytest
import torch

from elastic_peft.gating import example_seed, straight_through_gate, temperature, uniform_noise


@pytest.mark.parametrize("tau", [0.3, 1.0, 1.5])
def test_straight_through_is_exactly_hard_forward_and_soft_backward(tau):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 3, 2, generator=generator, requires_grad=True)
    uniform = torch.rand(500, 3, 2, generator=generator)
    gate = straight_through_gate(logits, uniform, tau)
    assert set(gate.unique().tolist()) == {0.0, 1.0}

    gumbel = -torch.log(-torch.log(uniform + 1e-10) + 1e-10)
    soft = torch.softmax((logits + gumbel) / tau, dim=-1)[..., 1]
    assert torch.equal(gate.bool(), soft > 0.5)
    (expected,) = torch.autograd.grad(soft.sum(), logits)
    (actual,) = torch.autograd.grad(gate.sum(), logits)
    torch.testing.assert_close(actual, expected)


def test_sampling_follows_the_softmax_of_the_logits():
    logits = torch.tensor([0.0, 1.0]).expand(1, 40_000, 2)
    (uniform,) = uniform_noise([7], [40_000])
    share = straight_through_gate(logits, uniform, 1.0).mean()
    assert share == pytest.approx(1 / (1 + math.exp(-1)), abs=0.01)


def test_given_decision_is_repeated_with_the_same_gradient():
    logits = torch.zeros(1, 2, 2, requires_grad=True)
    uniform = torch.tensor([[[0.9, 0.1], [0.1, 0.9]]])
    flipped = straight_through_gate(logits, uniform, 1.0, torch.tensor([[True, False]]))
    assert flipped.tolist() == [[1.0, 0.0]]
    assert torch.autograd.grad(flipped.sum(), logits)[0].abs().sum() > 0


def test_noise_of_an_example_does_not_depend_on_its_batch():
    together = uniform_noise([11, 22, 33], [2, 4])
    alone = uniform_noise([22], [2, 4])
    for left, right in zip(together, alone):
        assert torch.equal(left[1:2], right)
    assert not torch.equal(together[0][0], together[0][1])


def test_seed_depends_on_run_step_and_example():
    seeds = {example_seed(seed, step, example) for seed in range(3) for step in range(3) for example in range(3)}
    assert len(seeds) == 27
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert example_seed(42, 1, 2) == example_seed(42, 1, 2)


@pytest.mark.parametrize(
    ("schedule", "progress", "expected"),
    [
        ("exponential", 0.0, 1.5),
        ("exponential", 0.1, 1.5 * math.exp(-0.6)),
        ("exponential", 1.0, 0.3),
        ("cosine", 0.0, 1.5),
        ("cosine", 0.3, 0.9),
        ("cosine", 0.6, 0.3),
        ("cosine", 1.0, 0.3),
    ],
)
def test_temperature_schedule(schedule, progress, expected):
    assert temperature(schedule, progress, start=1.5, end=0.3) == pytest.approx(expected)


def test_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="`schedule` must be one of 'exponential', 'cosine', got 'linear'"):
        temperature("linear", 0.5, 1.5, 0.3)
