import itertools

import pytest
from datasets import Dataset
from trainer.tiny import dataset, rows, trainer


ADDED = {"lm_loss", "sparsity_loss", "temperature"} | {
    f"{name}/{task}" for name in ("msr", "lambda1", "lambda2") for task in ("qa", "code")
}


def test_every_training_log_has_the_metrics_of_the_tasks_that_occurred(tmp_path):
    run = trainer(tmp_path, max_steps=2)
    run.train()
    for log in run.state.log_history[:2]:
        assert set(log) >= ADDED
        assert not any("default" in name for name in log)


def test_metrics_are_averaged_between_logs(tmp_path):
    single, double = trainer(tmp_path, max_steps=2), trainer(tmp_path, max_steps=2, logging_steps=2)
    single.train()
    double.train()
    first, second = single.state.log_history[:2]
    for name in ADDED:
        assert double.state.log_history[0][name] == pytest.approx((first[name] + second[name]) / 2)


def test_evaluation_of_several_sets_keeps_their_prefixes(tmp_path):
    held_out = {"near": dataset(4, seed=5), "far": dataset(4, seed=6, tasks=("code",))}
    run = trainer(tmp_path, eval_dataset=held_out)
    metrics = run.evaluate()
    assert {f"eval_near_{name}" for name in ADDED} <= set(metrics)
    assert {f"eval_far_{name}" for name in ADDED if "qa" not in name} <= set(metrics)
    assert "eval_far_msr/qa" not in metrics


def test_evaluation_loss_has_no_regulariser(tmp_path):
    metrics = trainer(tmp_path, eval_dataset=dataset(4, seed=5)).evaluate()  # one batch: both means are the same
    assert metrics["eval_lm_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-6)
    assert metrics["eval_sparsity_loss"] > 0.01


def test_evaluation_lm_loss_does_not_depend_on_the_batch_size(tmp_path):
    held_out = dataset(6, seed=5)
    losses = [
        trainer(tmp_path, eval_dataset=held_out, per_device_eval_batch_size=size).evaluate()["eval_lm_loss"]
        for size in (1, 4)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_evaluation_of_a_new_dataset_is_prepared_alike(tmp_path):
    run = trainer(tmp_path, packing=True, max_length=40)
    assert {name.removeprefix("eval_") for name in run.evaluate(dataset(4, seed=5))} >= ADDED


def test_predict_has_the_metrics_too(tmp_path):
    run = trainer(tmp_path, eval_dataset=dataset(4))
    assert {f"test_{name}" for name in ADDED} <= set(run.predict(run.eval_dataset).metrics)


def test_temperature_falls_along_its_schedule(tmp_path):
    run = trainer(tmp_path, max_steps=4, temperature_schedule="cosine")
    run.train()
    logged = [log["temperature"] for log in run.state.log_history[:4]]
    assert logged == pytest.approx([1.5, 1.3147048, 1.0334936, 1.0], abs=1e-6)  # cosine over the first 60%


def test_multipliers_follow_the_learning_rate_schedule(tmp_path):
    run = trainer(tmp_path, max_steps=3, lr_scheduler_type="constant_with_warmup", warmup_steps=2)
    run.train()
    logged = [log["lambda1/qa"] for log in run.state.log_history[:3]] + [run.multipliers.lambda1[0].item()]
    changes = [after - before for before, after in itertools.pairwise(logged)]
    assert changes[0] == 0  # the first step of a warm-up has learning rate 0
    assert changes[1:] == pytest.approx([0.005, 0.01], rel=0.1)  # Adam moves by about the learning rate, 1e-2 at last


def test_examples_without_a_task_are_pulled_to_the_target_sparsity(tmp_path):
    examples = [{key: value for key, value in row.items() if key != "task"} for row in rows()]
    run = trainer(tmp_path, train_dataset=Dataset.from_list(examples), max_steps=1)
    run.train()
    log = run.state.log_history[0]
    assert {name for name in log if name.startswith("msr/")} == {"msr/default"}
    assert run.tasks == ("qa", "code", "default")
