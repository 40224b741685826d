import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from trainer.tiny import T_VALUES, base_model, dataset, routed_model, router_weights, routing_metrics, trainer


RUN = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": "random"}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    run = trainer(tmp_path_factory.mktemp("straight"), **RUN)
    run.train()
    return run


@pytest.mark.parametrize("step", [2, 4], ids=["inside-an-epoch-2", "after-two-epochs"])
def test_resumed_run_equals_the_straight_one_bitwise(tmp_path, straight, step):
    resumed = trainer(tmp_path, **RUN)
    resumed.train(resume_from_checkpoint=f"{straight.args.output_dir}/checkpoint-{step}")
    torch.testing.assert_close(router_weights(resumed.model), router_weights(straight.model), atol=0, rtol=0)
    torch.testing.assert_close(resumed.multipliers.state_dict(), straight.multipliers.state_dict(), atol=0, rtol=0)
    torch.testing.assert_close(
        dict(resumed.model.named_buffers()), dict(straight.model.named_buffers()), atol=0, rtol=0
    )
    logs = [
        [(log["step"], log["learning_rate"], routing_metrics(log)) for log in run.state.log_history[:5]]
        for run in (resumed, straight)
    ]
    assert logs[0] == logs[1]


def test_checkpoint_holds_the_multipliers_as_safetensors(straight):
    state = load_file(f"{straight.args.output_dir}/checkpoint-4/multipliers.safetensors")
    assert {"qa.value", "code.exp_avg", "code.exp_avg_sq", "code.step", "default.value"} <= set(state)


def test_resume_without_multipliers_is_refused(tmp_path, straight):
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(f"{straight.args.output_dir}/checkpoint-2", checkpoint)
    (checkpoint / "multipliers.safetensors").unlink()
    with pytest.raises(ValueError, match="complete safetensors file of multipliers"):
        trainer(tmp_path, **RUN).train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode_pair": "XA-SSA"}, "`mode_pair` 'FA-SSA' instead of 'XA-SSA'"),
        ({"window_size": 5}, "`window_size` 4 instead of 5"),
        ({"t_values": {**T_VALUES, "qa": 0.9}}, "`t_values` {'code': 1.0, 'qa': 0.3} instead of {'qa': 0.9"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_resume_of_another_configuration_is_refused(tmp_path, straight, change, message):
    run = trainer(tmp_path, model=routed_model(**change), **RUN)
    with pytest.raises(ValueError, match=message):
        run.train(resume_from_checkpoint=f"{straight.args.output_dir}/checkpoint-2")


def test_resume_of_another_method_is_refused(tmp_path, straight):
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(f"{straight.args.output_dir}/checkpoint-2", checkpoint)
    get_peft_model(base_model(), LoraConfig(task_type="CAUSAL_LM")).save_pretrained(checkpoint)
    with pytest.raises(
        ValueError, match="`resume_from_checkpoint` must hold an adapter with an ElasticConfig, got LoraConfig"
    ):
        trainer(tmp_path, **RUN).train(resume_from_checkpoint=str(checkpoint))


def test_checkpoint_is_an_adapter_that_trains_on(tmp_path, straight):
    model = PeftModel.from_pretrained(base_model(), f"{straight.args.output_dir}/checkpoint-4", is_trainable=True)
    before = router_weights(model)
    trainer(tmp_path, model=model, train_dataset=dataset(seed=3), max_steps=1).train()
    assert any(not torch.equal(before[name], weight) for name, weight in router_weights(model).items())
