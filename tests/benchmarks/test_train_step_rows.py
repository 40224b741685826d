"""Rows of whole training steps: the noise samples the decisions that are meant."""

import pytest
import torch
import train_step
from whole_model import KV_HEADS, LAYERS, make_decisions

from elastic_peft import last_routing, operators
from elastic_peft.gating import straight_through_gate


@pytest.mark.parametrize("temperature", [0.3, 1.5])
def test_noise_forces_the_decisions(temperature):
    noise = train_step.forcing_noise([7], [KV_HEADS] * LAYERS)
    logits = torch.randn(1, KV_HEADS, 2, generator=torch.Generator().manual_seed(0))
    sampled = [straight_through_gate(logits, uniform, temperature) for uniform in noise]
    assert torch.equal(torch.cat(sampled).bool(), make_decisions())


def test_a_step_runs_the_decisions_and_trains_the_routers(make_routed, monkeypatch):
    monkeypatch.setattr(train_step, "ANSWER", 8)
    model = make_routed().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    trained = []
    monkeypatch.setattr(model, "zero_grad", lambda **_: trained.extend(p.grad for p in model.parameters()))
    train_step.make_step(model, 64, None)()
    decisions = last_routing(model).decisions[0]
    assert torch.equal(decisions, make_decisions()[: decisions.shape[0], : decisions.shape[1]])
    assert any(grad is not None and grad.abs().sum() > 0 for grad in trained)


def test_the_baseline_runs_both_modes_in_the_place_of_routed_attention(make_routed, monkeypatch):
    monkeypatch.setattr(train_step, "ANSWER", 8)
    seen = []
    monkeypatch.setattr(train_step, "both_modes", lambda *args, **options: seen.append(options["dense"]))
    model = make_routed().train()
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *a, **k: (operators.routed_attention(), forward(*a, **k))[1])
    train_step.make_step(model, 64, "fa2")()
    assert seen == ["fa2"]
