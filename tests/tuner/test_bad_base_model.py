"""A base model's damaged files end a command in one line that names the model."""

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from elastic_peft_cli import app


@pytest.fixture
def folder(make_routed, make_base, tmp_path):
    """A folder with an adapter, its base model, a prompt and a head pattern."""
    make_routed().save_pretrained(tmp_path / "adapter")
    make_base().save_pretrained(tmp_path / "base")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "base")
    (tmp_path / "prompt.txt").write_text("w1")
    (tmp_path / "pattern.tsv").write_text("1\t0\n0\t1\n")
    return tmp_path


def assert_refused(result, message):
    assert not result.exception or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(f"Error: {message}")


def set_heads(base):
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_attention_heads": "x"}))


# What is wrong -> the damage to the base model's folder.
DAMAGES = {
    "no-weights": lambda base: (base / "model.safetensors").unlink(),
    "empty-weights": lambda base: (base / "model.safetensors").write_bytes(b""),
    "other-weights": lambda base: (base / "model.safetensors").write_bytes(b"\xff" * 300),
    "empty-config": lambda base: (base / "config.json").write_text(""),
    "heads-in-words": set_heads,
    "empty-tokenizer": lambda base: (base / "tokenizer.json").write_text(""),
    "tokenizer-without-fields": lambda base: (base / "tokenizer.json").write_text("{}"),
    "tokenizer-options-in-a-list": lambda base: (base / "tokenizer_config.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_route_names_the_base_model_that_it_cannot_load(folder, damage):
    base = folder / "base"
    damage(base)
    options = ["--model", base, "--adapter", folder / "adapter", "--prompt-file", folder / "prompt.txt"]
    result = CliRunner().invoke(app, ["route", *map(str, options)])
    assert_refused(result, f"`--model` {str(base)!r} cannot be loaded: ")


@pytest.mark.parametrize("damage", ["empty-config", "heads-in-words"])
def test_convert_names_the_base_model_that_it_cannot_build(folder, damage):
    base = folder / "base"
    DAMAGES[damage](base)
    options = [folder / "pattern.tsv", folder / "made", "--base-model", base, "--sink-size", 2, "--window-size", 6]
    result = CliRunner().invoke(app, ["convert", "duo", *map(str, options)])
    assert_refused(result, f"`base_model` must be a model that transformers can build, got {str(base)!r}: ")
    assert not (folder / "made").exists()
