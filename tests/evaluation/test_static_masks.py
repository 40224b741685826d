"""Static head masks: what is random, what is ranked, and gates that learn without seeing the input."""

import pytest
import torch
from peft import get_peft_model
from transformers import set_seed

from elastic_peft import calibrate_standardization, last_routing
from elastic_peft.evaluation.static_masks import (
    blind_routers,
    loss_scores,
    mask_from_scores,
    random_mask,
    retrieval_scores,
    static_preferences,
)
from elastic_peft.layer import ElasticLayer


LAYERS, HEADS = 2, 2


@pytest.mark.parametrize("num_sparse", [0, 3, 12])
def test_random_masks_have_the_number_of_sparse_heads(num_sparse):
    mask = random_mask(4, 3, num_sparse, seed=0)
    assert mask.dtype == torch.bool
    assert mask.shape == (4, 3)
    assert mask.sum() == num_sparse


def test_random_masks_follow_their_seed():
    first, again, other = (random_mask(8, 8, 32, seed=seed) for seed in (0, 0, 1))
    assert first.equal(again)
    assert not first.equal(other)


def test_the_lowest_scores_are_sparse():
    scores = torch.tensor([[0.3, 0.1], [0.2, 0.4]])
    assert mask_from_scores(scores, 2).tolist() == [[False, True], [True, False]]


def test_of_equal_scores_the_first_are_sparse():
    assert mask_from_scores(torch.zeros(2, 2), 3).tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("num_sparse", [-1, 5])
def test_more_or_fewer_heads_than_there_are_is_refused(num_sparse):
    with pytest.raises(ValueError, match="`num_sparse` must be between 0 and 4"):
        mask_from_scores(torch.zeros(2, 2), num_sparse)


def test_scores_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="`scores` must be numbers"):
        mask_from_scores(torch.tensor([[0.0, float("nan")]]), 1)


def test_a_heads_loss_score_is_what_it_costs_alone():
    costs = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    scores = loss_scores(lambda masks: 7 + (masks * costs).sum(dim=(1, 2)), 2, 3)
    assert scores.tolist() == costs.tolist()


# Retrieval scores


@pytest.fixture
def model(make_base, make_config):
    return get_peft_model(make_base(), make_config()).eval()


PASSAGE = [50, 51, 52]
NEEDLE = torch.tensor([*range(3, 20), *PASSAGE, *range(20, 30), *PASSAGE, 2])
PROMPT = 30


def test_retrieval_scores_are_the_attention_paid_to_the_repeated_passage(model):
    scores = retrieval_scores(model, [(NEEDLE, PROMPT)])
    base = model.unload()
    base.set_attn_implementation("eager")
    weights = base(NEEDLE[None], output_attentions=True).attentions
    for layer, weight in enumerate(weights):
        # Queries before each token of the answer, keys of the passage.
        paid = weight[0, :, PROMPT - 1 : PROMPT + 2, 17:20].sum(dim=-1).mean(dim=-1)
        torch.testing.assert_close(scores[layer], paid.view(HEADS, -1).mean(dim=1))


def test_retrieval_scores_leave_the_model_as_it_was(model, inputs):
    before = model(**inputs).logits
    retrieval_scores(model, [(NEEDLE, PROMPT)])
    assert model.config._attn_implementation == "sdpa"
    assert model(**inputs).logits.equal(before)


def test_an_answer_that_is_not_in_its_prompt_is_refused(model):
    other = NEEDLE.clone()
    other[17] = 60
    with pytest.raises(ValueError, match="`examples` must have answers that their prompts contain"):
        retrieval_scores(model, [(other, PROMPT)])


def test_no_examples_are_refused(model):
    with pytest.raises(ValueError, match="`examples` must hold at least one"):
        retrieval_scores(model, [])


# Static gates


@pytest.fixture
def blind(model):
    """A model whose routers are opinionated but do not see their input."""
    blind_routers(model, seed=0)
    set_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, ElasticLayer):
                module.elastic_router_out["default"].weight.normal_()
    return model


def test_blind_routers_decide_the_same_for_every_input(blind, inputs):
    logits = []
    for ids in (inputs["input_ids"], inputs["input_ids"].flip(1)):
        blind(ids)
        logits.append(last_routing(blind).logits)
    assert logits[0].equal(logits[1])
    assert logits[0][0].equal(logits[0][1])


def test_blind_routers_tell_heads_apart(blind):
    preferences = static_preferences(blind)
    assert len(preferences.unique()) == LAYERS * HEADS


def test_preferences_rank_heads_as_the_routers_decide(blind, inputs):
    blind(**inputs)
    decisions = last_routing(blind).decisions[0]
    assert mask_from_scores(static_preferences(blind), int(decisions.sum())).equal(decisions)


def test_preferences_of_seeing_routers_are_refused(model, inputs):
    calibrate_standardization(model, [inputs])
    with pytest.raises(ValueError, match="`model` must have routers that do not see their input"):
        static_preferences(model)


def test_raw_input_cannot_be_hidden(make_base, make_config):
    model = get_peft_model(make_base(), make_config(standardize_input=False))
    with pytest.raises(ValueError, match="`standardize_input=True`"):
        blind_routers(model, seed=0)
