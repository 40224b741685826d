"""Finding the bias that gives a wanted sparsity, and saving it with the adapter."""

import pytest
import torch
from peft import PeftModel

from elastic_peft import calibrate, forced_routing, last_routing
from elastic_peft.context import routed_decoder
from elastic_peft.hooks import active_routers


@pytest.fixture
def prompts():
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 96, (2, length), generator=generator)} for length in (40, 25, 33, 60)]


def mean_msr(model, prompts):
    ratios = []
    for prompt in prompts:
        with torch.no_grad():
            model(**prompt)
        ratios.append(last_routing(model).msr)
    return torch.cat(ratios).mean().item()


@pytest.mark.parametrize("target", [0.0, 0.3, 0.5, 0.8, 1.0], ids=lambda target: f"msr-{target}")
def test_prompts_reach_the_wanted_sparsity(make_routed, prompts, target):
    model = make_routed()
    reached = calibrate(model, prompts, target, tolerance=0.05)
    assert abs(reached.msr - target) <= 0.05
    assert mean_msr(model, prompts) == pytest.approx(reached.msr)
    assert model.peft_config["default"].sparsity_bias == reached.sparsity_bias


@torch.no_grad()
def test_routers_that_prefer_no_mode_can_be_moved(make_routed, prompts):
    model = make_routed()
    for router in active_routers(routed_decoder(model)):
        for parameter in router.elastic_router_out.parameters():
            parameter.zero_()
    assert calibrate(model, prompts, 1.0).msr == 1


def test_the_nearest_sparsity_is_reported_where_the_wanted_one_does_not_exist(make_routed, prompts):
    model = make_routed()
    reached = calibrate(model, prompts[:1], 0.55, tolerance=0.0)
    assert reached.msr in (0.5, 0.625)  # 2 rows, 2 layers, 2 heads
    assert mean_msr(model, prompts[:1]) == reached.msr


def test_the_bias_is_saved_with_the_adapter(make_routed, make_base, prompts, tmp_path):
    model = make_routed()
    reached = calibrate(model, prompts, 0.8, tolerance=0.05)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_base(), tmp_path)
    assert loaded.peft_config["default"].sparsity_bias == reached.sparsity_bias
    assert mean_msr(loaded, prompts) == pytest.approx(reached.msr)


def test_padding_rows_do_not_count(make_routed, prompts):
    model = make_routed()
    ids = torch.cat([prompts[0]["input_ids"], torch.zeros(1, 40, dtype=torch.long)])
    mask = torch.ones_like(ids)
    mask[2] = 0
    reached = calibrate(model, prompts[:1], 0.75, tolerance=0.05)
    assert calibrate(model, [{"input_ids": ids, "attention_mask": mask}], 0.75, tolerance=0.05) == reached


def test_modes_are_restored(make_routed, prompts):
    model = make_routed().train()
    routed_decoder(model).layers[0].eval()
    modes = [module.training for module in model.modules()]
    calibrate(model, prompts[:1], 0.5, tolerance=0.05)
    assert [module.training for module in model.modules()] == modes


def test_an_interrupted_search_leaves_the_bias_as_it_was(make_routed, prompts):
    model = make_routed(sparsity_bias=0.25)
    seen = []

    def interrupt(*_):
        seen.append(model.peft_config["default"].sparsity_bias)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with model.register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
        calibrate(model, prompts[:1], 1.0, tolerance=0.0)
    assert len(set(seen)) == 3
    assert model.peft_config["default"].sparsity_bias == 0.25


def test_bad_arguments_are_refused(make_routed, prompts):
    model = make_routed()
    with pytest.raises(ValueError, match=r"`target_msr` must be in \[0, 1\], got 70"):
        calibrate(model, prompts, 70)
    with pytest.raises(ValueError, match="`tolerance` must be at least 0, got -1"):
        calibrate(model, prompts, 0.7, tolerance=-1)
    with pytest.raises(ValueError, match="`prompts` must hold at least one prompt, got none"):
        calibrate(model, [], 0.7)
    with pytest.raises(ValueError, match="`prompts` must hold keyword arguments of `model`, got a str"):
        calibrate(model, prompts[0], 0.5)
    with forced_routing(model, "sparse"), pytest.raises(ValueError, match="got a call inside `forced_routing`"):
        calibrate(model, prompts, 0.7)
    with model.disable_adapter(), pytest.raises(ValueError, match="`model` must have an active adapter"):
        calibrate(model, prompts, 0.7)
