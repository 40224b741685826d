"""Rows of whole training steps: the noise samples the decisions that are meant."""

import pytest
import torch
import train_step
from whole_model import KV_HEADS, LAYERS, make_decisions

from elastic_peft.gating import straight_through_gate


@pytest.mark.parametrize("temperature", [0.3, 1.5])
def test_noise_forces_the_decisions(temperature):
    noise = train_step.forcing_noise([7], [KV_HEADS] * LAYERS)
    logits = torch.randn(1, KV_HEADS, 2, generator=torch.Generator().manual_seed(0))
    sampled = [straight_through_gate(logits, uniform, temperature) for uniform in noise]
    assert torch.equal(torch.cat(sampled).bool(), make_decisions())
