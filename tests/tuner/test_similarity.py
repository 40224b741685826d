"""How alike tasks look to the routers, and the picture of it."""

import pytest
import torch

from elastic_peft.report import similarity_figure
from elastic_peft.similarity import pooled_keys, task_similarity
from elastic_peft.standardization import calibrate_standardization


@pytest.fixture
def model(make_routed):
    return make_routed()


def pool(model, *seeds):
    """Pooled keys of random prompts of 40 tokens."""
    prompts = [torch.randint(96, (40,), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    with torch.no_grad(), pooled_keys(model) as pooled:
        model(torch.stack(prompts))
    return pooled


def test_pooled_keys_are_the_routers_own(model):
    pooled = pool(model, 0, 1)
    assert {layer: tuple(keys.shape[:2]) for layer, keys in pooled.items()} == {0: (2, 2), 1: (2, 2)}
    model(torch.zeros(1, 8, dtype=torch.int64))
    assert len(pooled[0]) == 2, "a pass outside must not be collected"


def test_pooled_keys_are_collected_after_a_calibration_too(model):
    prompts = torch.randint(96, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), pooled_keys(model) as pooled:
        calibrate_standardization(model, [{"input_ids": prompts}])
        assert not pooled, "a calibration collects for itself"
        model(prompts)
    assert len(pooled[0]) == 3


def test_similarity_is_the_mean_cosine_of_the_tasks_mean_keys(model):
    pooled = {"qa": pool(model, 0, 1), "code": pool(model, 2, 3, 4)}
    expected = [
        torch.cosine_similarity(*(keys[layer].mean(dim=0) for keys in pooled.values()), dim=-1).mean()
        for layer in (0, 1)
    ]
    matrix = task_similarity(model, pooled)["keys"]
    torch.testing.assert_close(matrix, torch.eye(2) + (1 - torch.eye(2)) * torch.stack(expected).mean())


def test_the_router_input_is_standardised(model):
    similarity = task_similarity(model, {"qa": pool(model, 0), "code": pool(model, 1)})
    assert not torch.allclose(similarity["keys"], similarity["input"], atol=1e-3)


def test_similarity_of_no_tasks_is_refused(model):
    with pytest.raises(ValueError, match="`pooled` must hold at least one task"):
        task_similarity(model, {})


@pytest.mark.parametrize(
    ("keys", "layer"),
    [({}, 0), ({0: torch.ones(1, 2, 16)}, 1), ({0: torch.ones(1, 2, 16), 1: torch.ones(0, 2, 16)}, 1)],
    ids=["no-pass", "one-layer", "no-prompt"],
)
def test_similarity_of_a_task_without_prompts_is_refused(model, keys, layer):
    with pytest.raises(ValueError, match=rf"`pooled\['code'\]` must hold keys of a prompt, got none in layer {layer}"):
        task_similarity(model, {"qa": pool(model, 0), "code": keys})


def test_similarity_of_a_disabled_adapter_is_refused(model):
    pooled = {"qa": pool(model, 0)}
    with (
        model.disable_adapter(),
        pytest.raises(ValueError, match="`model` must have an active adapter, got one whose"),
    ):
        task_similarity(model, pooled)


def test_similarity_picture_shows_every_stage():
    pytest.importorskip("matplotlib")
    stages = {stage: torch.eye(2) * scale for stage, scale in (("keys", 1.0), ("input", 0.5), ("task_mlp", 0.25))}
    panels = [ax.images[0].get_array() for ax in similarity_figure(stages, ["qa", "code"]).axes if ax.images]
    assert [panel[1, 1] for panel in panels] == [1.0, 0.5, 0.25]
