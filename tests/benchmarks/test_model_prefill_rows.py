"""Rows of a whole model's prefill: decisions, and blocks in place of those that random weights would select."""

import model_prefill
import torch
from whole_model import make_decisions


def test_model_decisions_have_the_mean_ratio():
    assert abs(make_decisions().float().mean() - 0.7) < 0.01


def test_kept_blocks_have_the_density():
    kept = model_prefill.random_kept_blocks(2, 256, device="cpu")
    mask = kept.to_mask()
    assert not mask.triu(1).any()
    assert mask[..., 0].all()
    assert mask.diagonal(dim1=2, dim2=3).all()
    assert abs(mask.sum() / (2 * 256 * 257 / 2) - model_prefill.DENSITY) < 0.01


def test_kept_blocks_take_the_place_of_the_selection(make_routed, inputs):
    model = make_routed(mode_pair="XA-SSA", xattn_block_size=16, xattn_stride=4)
    everything = torch.ones(2, 4, 3, 3, dtype=torch.bool).tril()
    diagonal = torch.eye(3, dtype=torch.bool).expand_as(everything)
    kept = [model_prefill.KeptBlocks.from_mask(mask, 16) for mask in (everything, diagonal)]
    outputs = []
    for blocks in kept:
        with torch.no_grad(), model_prefill.keeping(blocks):
            outputs.append(model(**inputs).logits)
    assert not torch.equal(*outputs)
