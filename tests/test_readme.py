"""Every command of README runs, or is named here with the reason why it is only parsed."""

import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from itertools import takewhile
from pathlib import Path

import evaluate
import prepare_data
import pytest
import readme_blocks
import train_sft
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from hub.fake_hub import TOKEN, FakeHub
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from elastic_peft import operators, run
from elastic_peft_cli import app


ROOT = Path(__file__).resolve().parents[1]
BASES = ["base", "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B-Instruct"]


@pytest.fixture
def place(make_base, tmp_path, monkeypatch):
    """A current folder in which README's models and files are folders and files."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(["<eos>", *readme_blocks.WORDS])}, "<eos>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    for name in BASES:
        make_base().save_pretrained(tmp_path / name)
        fast.save_pretrained(tmp_path / name)
    (tmp_path / "prompt.txt").write_text(" ".join(readme_blocks.WORDS))
    (tmp_path / "full_attention_heads.tsv").write_text("0.75\t0.25\n0.5\t0.125\n")
    (tmp_path / "config.json").write_text('{"sink_size": 3, "recent_size": 7}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def adapters(place, make_routed):
    """The adapters that README names, in that folder."""
    for name in ("adapter", "user/adapter"):
        make_routed().save_pretrained(place / name)


def run_command_line(command):
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output


def find_command_line(arguments, monkeypatch):
    # Help comes instead of the work, but after every name was read.
    assert CliRunner().invoke(app, [*arguments[1:], "--help"]).exit_code == 0


def find_target(arguments, monkeypatch):
    command = ["make", "--dry-run", "-C", ROOT, *arguments[1:]]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def find_extras(arguments, monkeypatch):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = re.fullmatch(r"\.\[(.*)\]", arguments[-1])
    assert set(wanted[1].split(",")) <= set(extras)


def read_variable(arguments, monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("well-formed, and asked for")

    name, source = arguments[1].split("=")
    assert name == operators.VARIABLE
    monkeypatch.setattr(operators, "snapshot_download", unreachable)
    with pytest.raises(ValueError, match="well-formed, and asked for"):
        operators.load_from_hub(source)


def parse_evaluation(arguments, monkeypatch):
    evaluate._parse(arguments[2:])


def parse_data(arguments, monkeypatch):
    prepare_data._parse(arguments[2:])


def parse_training(arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    *_, script = takewhile(lambda argument: not argument.startswith("--"), arguments)
    assert Path(script).samefile(train_sft.__file__)
    train_sft.parse_recipe([*arguments[arguments.index(script) + 1 :], "--use_cpu"])


def parse_launch(arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    launch = launch_command_parser().parse_args(arguments[2:])
    load_config_from_file(launch.config_file)
    parse_training([launch.training_script, *launch.training_script_args], monkeypatch)


def read_module(arguments, monkeypatch):
    given = []
    monkeypatch.setattr(sys, "argv", arguments[2:])
    monkeypatch.setattr(runpy, "run_module", lambda module, **kwargs: given.extend([module, *sys.argv[1:]]))
    monkeypatch.setitem(sys.modules, "elastic_peft.evaluation.lm_eval_model", LmEval)
    run.main()
    assert given == arguments[3:]


class LmEval:
    """Stands in for the module that needs lm_eval."""

    @staticmethod
    def report_routing():
        pass


READS_ADAPTERS = ["elastic-peft inspect", "elastic-peft route", "elastic-peft card"]
WRITES_ADAPTERS = ["elastic-peft convert duo"]
# Beginning of a command to the reason why it is not run, and what is tested of it instead.
NOT_RUN = {
    "make demo": ("minutes; tests/recipes/test_demo.py runs its script", find_target),
    "make test": ("these tests", find_target),
    "pip install": ("a download", find_extras),
    "export ELASTIC_PEFT_KERNELS=": ("no such repository; tests/hub has one", read_variable),
    "python recipes/evaluate.py": ("hours; tests/evaluation runs a small one", parse_evaluation),
    "python -m elastic_peft.run lm_eval": ("a download; tests/evaluation runs lm_eval", read_module),
    "elastic-peft bench": ("a GPU", find_command_line),
    "elastic-peft convert paper": ("a whole checkpoint; tests/hub makes one", find_command_line),
    "python recipes/prepare_data.py": ("a download; tests/recipes has small files", parse_data),
    "python recipes/train_sft.py": ("a GPU; tests/recipes runs a small one", parse_training),
    "accelerate launch": ("GPUs; tests/recipes launches two processes", parse_launch),
}
DECISIONS = [*READS_ADAPTERS, *WRITES_ADAPTERS, *NOT_RUN]


def commands_of(beginnings):
    """Commands with one of these beginnings, and the beginning as their id."""
    return [
        pytest.param(command, id=beginning)
        for beginning in beginnings
        for command in readme_blocks.commands()
        if command.startswith(beginning)
    ]


def test_blocks_are_of_known_languages():
    text = readme_blocks.README.read_text()
    assert set(re.findall(r"^```(\w+)$", text, flags=re.MULTILINE)) == {"bash", "python"}


def test_each_command_is_run_or_left_out_for_a_reason():
    undecided = [command for command in readme_blocks.commands() if not command.startswith(tuple(DECISIONS))]
    assert undecided == []


@pytest.mark.parametrize("beginning", DECISIONS)
def test_a_decision_is_about_a_command_that_is_there(beginning):
    assert commands_of([beginning])


@pytest.mark.parametrize("command", commands_of(READS_ADAPTERS))
def test_a_command_on_adapters_runs(command, adapters):
    run_command_line(command)


@pytest.mark.parametrize("command", commands_of(WRITES_ADAPTERS))
def test_a_command_that_makes_an_adapter_runs(command, place):
    run_command_line(command)


@pytest.mark.parametrize("command", commands_of(NOT_RUN))
def test_a_command_that_is_not_run_is_understood(command, monkeypatch):
    ((_, check),) = [decision for beginning, decision in NOT_RUN.items() if command.startswith(beginning)]
    check(shlex.split(command), monkeypatch)


@pytest.mark.parametrize("extras", re.findall(r"pip install -e '(\S+)'", readme_blocks.README.read_text()))
def test_extras_exist(extras, monkeypatch):
    find_extras([extras], monkeypatch)


def pushed(repo):
    return repo.commits[repo.branches["main"]]


def test_the_python_runs_in_order(place):
    with FakeHub() as hub:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(place / "hub"),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
        }
        program = [sys.executable, readme_blocks.__file__]
        result = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert re.search(r"^tensor\(\[\d", result.stdout, flags=re.MULTILINE)
        assert {"README.md", "adapter_model.safetensors", "routing.png"} <= set(pushed(hub.repos["user/adapter"]))
