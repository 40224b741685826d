"""The command `elastic-peft`."""

import json
import os
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from elastic_peft import ElasticConfig, last_routing
from elastic_peft_cli import app, bench, route


ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ["inspect", "route", "convert", "convert paper", "convert duo", "card", "bench"]
PROMPT = " ".join(f"w{(7 * i) % 96}" for i in range(60))


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run_json(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def assert_refused(result, message):
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(f"Error: {message}")
    assert "Traceback" not in result.output


@pytest.fixture
def adapter(make_routed, tmp_path):
    """A trained adapter's folder."""
    make_routed().save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def base(make_base, tmp_path):
    """A base model's folder, with a tokenizer that knows the words `w0` to `w95`."""
    make_base().save_pretrained(tmp_path / "base")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def prompt(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    return file


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command):
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert f"Example: elastic-peft {command}" in result.output


def readme_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    return [line.split("#")[0].strip() for line in lines if line.startswith("elastic-peft ")]


@pytest.mark.parametrize("command", readme_commands())
def test_the_readme_names_commands_and_options_that_exist(command):
    # Help comes instead of the work, but after every name was read.
    assert run(*shlex.split(command)[1:], "--help").exit_code == 0


def test_help_does_not_wait_for_heavy_packages():
    code = (
        "import sys; from elastic_peft_cli import app; app(['--help'], standalone_mode=False); "
        "print({'elastic_peft', 'peft', 'torch', 'transformers'} & set(sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "set()"


def test_the_installed_command_is_this_one():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, name = scripts["elastic-peft"].split(":")
    assert getattr(import_module(module), name) is app


def test_inspect_shows_the_adapter(adapter):
    shown = run_json("inspect", adapter)
    config = ElasticConfig.from_pretrained(adapter)
    assert {name: shown[name] for name in ("mode_pair", "sink_size", "window_size", "t_values")} == {
        "mode_pair": config.mode_pair,
        "sink_size": config.sink_size,
        "window_size": config.window_size,
        "t_values": config.t_values,
    }
    assert (shown["routed_layers"], shown["key_value_heads"], shown["calibrated"]) == (2, 4, True)
    model_file = adapter / "adapter_model.safetensors"
    assert shown["bytes"] == model_file.stat().st_size


def test_inspect_reads_a_repository(client, hub, tmp_path):
    client("push", "user/inspected")
    code = "from elastic_peft_cli import app; app(['inspect', 'user/inspected', '--json'])"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    shown = json.loads(output.stdout)
    assert (shown["base_model"], shown["routed_layers"]) == ("user/base", 2)


def test_inspect_reads_the_revision_that_is_asked_for(client, hub, tmp_path):
    client("push", "user/branches", revision="tried", path_in_repo="part")
    arguments = ["inspect", "user/branches", "--subfolder", "part", "--json"]
    code = f"from elastic_peft_cli import app; app({[*arguments, '--revision', 'tried']})"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(output.stdout)["routed_layers"] == 2


def test_inspect_counts_the_parameters_that_learn(make_base, make_config, tmp_path):
    model = get_peft_model(make_base(), make_config())
    model.save_pretrained(tmp_path / "adapter")
    learns = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert run_json("inspect", tmp_path / "adapter")["parameters"] == learns


def test_inspect_is_readable(adapter):
    lines = run("inspect", adapter).stdout.splitlines()
    assert any(line.split() == ["mode", "pair", "FA-SSA"] for line in lines)


@pytest.mark.parametrize("as_json", [["--json"], []], ids=["json", "text"])
def test_inspect_prints_lone_surrogates_as_escapes(adapter, as_json):
    edit_config(adapter, base_model_name_or_path="\udcff")
    printed = json.dumps(r"\udcff") if as_json else r"  \udcff"
    assert printed in run("inspect", adapter, *as_json).stdout


def test_inspect_refuses_another_adapter(make_base, tmp_path):
    get_peft_model(make_base(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "lora")
    assert_refused(run("inspect", tmp_path / "lora"), "`adapter` must be an ELASTIC adapter, got one of type")


def test_inspect_refuses_an_unknown_kind_of_adapter(adapter):
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace('"ELASTIC"', '"NOPE"'))
    assert_refused(run("inspect", adapter), "`adapter` must have a readable adapter_config.json, got KeyError('NOPE')")


def edit_config(adapter, **fields):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("command", ["inspect", "card"])
@pytest.mark.parametrize(
    "heads",
    [["a"], 5, {"a": 2}, {"0": "two"}, {"0": 2.5}, {"0": None}, {}],
    ids=["list", "number", "index", "text", "float", "null", "none"],
)
def test_malformed_heads_are_refused_in_one_line(adapter, command, heads):
    edit_config(adapter, num_key_value_heads=heads)
    message = "`adapter` must note" if heads == {} else "`num_key_value_heads"
    assert_refused(run(command, adapter), message)


@pytest.mark.parametrize("text", ["[1]", "5", "{", "\xff"], ids=["list", "number", "cut", "binary"])
def test_a_configuration_that_is_no_object_is_refused(adapter, text):
    (adapter / "adapter_config.json").write_bytes(text.encode("latin-1"))
    assert_refused(run("inspect", adapter), "`adapter` must have a readable adapter_config.json, got")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "`adapter` must hold a saved adapter, got"),
        ("a/b/c d", "`adapter` must be a folder that exists or a repository on the Hub, got 'a/b/c d'."),
        ("user/x", "`adapter` 'user/x' cannot be read from the Hub: it is not in the cache"),
    ],
    ids=["empty-folder", "no-name", "offline"],
)
def test_where_no_adapter_is_it_says_so(tmp_path, monkeypatch, name, message):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_refused(run("inspect", name), message)


def test_a_folder_has_no_revisions(adapter):
    assert_refused(run("inspect", adapter, "--revision", "v1"), "`revision` must not be given for a folder, got 'v1'.")


def test_inspect_reads_a_subfolder(adapter):
    assert run_json("inspect", adapter.parent, "--subfolder", adapter.name)["routed_layers"] == 2


def test_json_has_a_text_for_what_is_no_number_in_it(adapter):
    edit_config(adapter, sparsity_bias=float("inf"))
    result = run("inspect", adapter, "--json")
    assert json.loads(result.stdout, parse_constant=pytest.fail)["sparsity_bias"] == "inf"


def test_inspect_refuses_damaged_weights(adapter):
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert_refused(run("inspect", adapter), "`adapter_model.safetensors` must be a complete safetensors file")


def test_wrong_usage_has_its_own_exit_code(adapter):
    assert run("inspect", adapter, "--colour").exit_code == 2


def test_route_shows_what_the_model_decides(adapter, base, make_base, prompt):
    everything = run_json("route", "--model", base, "--adapter", adapter, "--prompt-file", prompt)
    (shown,) = everything["prompts"]
    model = PeftModel.from_pretrained(make_base(), adapter).eval()
    with torch.no_grad():
        model(torch.tensor([[int(word[1:]) for word in PROMPT.split()]]))
    record = last_routing(model)
    assert shown["sparse"] == record.decisions[0].tolist()
    assert (shown["tokens"], everything["layers"]) == (60, record.layers)
    assert shown["msr"] == pytest.approx(record.msr.item())
    assert shown["esr"] == pytest.approx(record.esr.item())


def test_route_prints_a_line_for_each_layer(adapter, base, prompt):
    result = run("route", "--model", base, "--adapter", adapter, "--prompt-file", prompt)
    assert [line.split()[:2] for line in result.stdout.splitlines()[-2:]] == [["0", "2"], ["1", "2"]]


def test_route_writes_picture_and_page(adapter, base, prompt, tmp_path):
    png, html = tmp_path / "routing.png", tmp_path / "routing.html"
    result = run(
        *("route", "--model", base, "--adapter", adapter, "--prompt-file", prompt),
        *("--png", png, "--html", html),
    )
    assert result.exit_code == 0, result.output
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64," in html.read_text()


@pytest.fixture
def prompts(prompt, tmp_path):
    """Options for two prompts of one file name, the second with other words."""
    other = tmp_path / "other" / prompt.name
    other.parent.mkdir()
    other.write_text(" ".join(f"w{(11 * i) % 96}" for i in range(50)))
    return ("--prompt-file", prompt, "--prompt-file", other)


def test_route_runs_each_prompt_as_if_alone(adapter, base, prompts):
    place = ("route", "--model", base, "--adapter", adapter)
    together = run_json(*place, *prompts)["prompts"]
    alone = [run_json(*place, *prompts[first : first + 2])["prompts"][0] for first in (0, 2)]
    assert [shown["prompt"] for shown in together] == [prompts[1].name, f"other/{prompts[1].name}"]
    assert [shown["sparse"] for shown in together] == [shown["sparse"] for shown in alone]


def test_route_shows_how_alike_several_prompts_look_to_the_routers(adapter, base, prompts, tmp_path):
    html = tmp_path / "routing.html"
    result = run("route", "--model", base, "--adapter", adapter, *prompts, "--html", html)
    assert result.exit_code == 0, result.output
    assert html.read_text().count("<img") == 2, "heat map and similarity"


@pytest.mark.parametrize("option", ["--html", "--png"])
def test_route_looks_at_its_outputs_before_it_runs(adapter, base, prompt, tmp_path, monkeypatch, option):
    monkeypatch.setattr(route, "_load", lambda *_, **__: pytest.fail("the model ran"))
    output = tmp_path / "missing" / "file"
    result = run("route", "--model", base, "--adapter", adapter, "--prompt-file", prompt, option, output)
    assert_refused(result, f"`{option}` must be in a folder that exists, got")


def test_route_looks_at_the_adapter_before_the_base_model(make_base, prompt, tmp_path, monkeypatch):
    monkeypatch.setattr(route, "_load", lambda *_, **__: pytest.fail("the model ran"))
    get_peft_model(make_base(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "lora")
    result = run("route", "--model", "base", "--adapter", tmp_path / "lora", "--prompt-file", prompt)
    assert_refused(result, "`adapter` must be an ELASTIC adapter, got one of type LORA.")


def test_route_reads_a_subfolder(adapter, base, prompt):
    place = ("--adapter", adapter.parent, "--subfolder", adapter.name)
    assert run_json("route", "--model", base, *place, "--prompt-file", prompt)["prompts"][0]["tokens"] == 60


def test_route_names_a_base_model_that_is_none(adapter, prompt, tmp_path):
    (tmp_path / "empty").mkdir()
    result = run("route", "--model", tmp_path / "empty", "--adapter", adapter, "--prompt-file", prompt)
    assert_refused(result, f"`--model` '{tmp_path / 'empty'}' cannot be loaded: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "`--prompt-file` must be UTF-8, got {file!r}: 'utf-8' codec can't decode"),
        (b"", "`--prompt-file` must hold text, got {file!r}: it is empty."),
        (b" \n", "`--prompt-file` must hold text, got {file!r}: it has no tokens."),
    ],
    ids=["undecodable", "empty", "no-tokens"],
)
def test_route_names_the_prompt_that_it_refuses(adapter, base, prompt, tmp_path, content, message):
    refused = tmp_path / "refused.txt"
    refused.write_bytes(content)
    prompts = ("--prompt-file", prompt, "--prompt-file", refused)
    result = run("route", "--model", base, "--adapter", adapter, *prompts)
    assert_refused(result, message.format(file=str(refused)))


def test_route_refuses_a_prompt_that_is_given_twice(adapter, base, prompt, tmp_path):
    again = tmp_path / "other" / ".." / prompt.name
    (tmp_path / "other").mkdir()
    result = run("route", "--model", base, "--adapter", adapter, "--prompt-file", prompt, "--prompt-file", again)
    assert_refused(result, f"`--prompt-file` must name each file once, got {str(again)!r} again.")


def test_route_draws_and_prints_whatever_a_prompt_is_named(adapter, base, prompt, tmp_path):
    named = prompt.rename(tmp_path / r"$\nosuchsymbol$")
    output = ("--png", tmp_path / "routing.png", "--html", tmp_path / "routing.html")
    result = run("route", "--model", base, "--adapter", adapter, "--prompt-file", named, *output)
    assert result.exit_code == 0, result.output
    assert f"MSR, {named.name}" in result.stdout


@pytest.fixture
def undecodable(prompt, tmp_path):
    """A prompt whose name is the byte 0xff: no UTF-8."""
    try:
        return prompt.rename(tmp_path / os.fsdecode(b"\xff"))
    except OSError:
        pytest.skip("needs a file system whose names are bytes")


def test_route_writes_a_name_that_is_no_utf_8_with_escapes(adapter, base, undecodable, tmp_path):
    html = tmp_path / "routing.html"
    output = ("--png", tmp_path / "routing.png", "--html", html)
    result = run("route", "--model", base, "--adapter", adapter, "--prompt-file", undecodable, *output)
    assert result.exit_code == 0, result.output
    assert r"<td>\udcff</td>" in html.read_text(encoding="utf-8")
    assert r"MSR, \udcff" in result.stdout


def test_route_names_a_prompt_in_json_as_on_the_page(adapter, base, undecodable):
    shown = run_json("route", "--model", base, "--adapter", adapter, "--prompt-file", undecodable)
    assert shown["prompts"][0]["prompt"] == r"\udcff"


def test_route_refuses_an_adapter_of_another_base(make_routed, make_base, base, prompt, tmp_path):
    make_routed(make_base(num_hidden_layers=3)).save_pretrained(tmp_path / "other")
    result = run("route", "--model", base, "--adapter", tmp_path / "other", "--prompt-file", prompt)
    assert_refused(result, "`num_key_value_heads` must cover 2 layers")


def test_convert_makes_an_adapter_to_inspect(base, tmp_path):
    pattern, output = tmp_path / "full_attention_heads.tsv", tmp_path / "static"
    pattern.write_text("1\t0\n0\t1\n")
    sizes = ("--sink-size", 4, "--window-size", 8)
    converted = run_json("convert", "duo", pattern, output, "--base-model", base, *sizes)
    inspected = run_json("inspect", output)
    assert converted == {name: inspected[name] for name in converted}


def test_convert_refuses_in_one_line(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    result = run("convert", "paper", tmp_path / "checkpoint", tmp_path / "adapter")
    assert_refused(result, "`config.json` must be a readable JSON file")


def test_card_is_written_beside_the_adapter(adapter):
    shown = run_json("card", adapter)
    assert shown["card"] == str(adapter / "README.md")
    assert "library_name: peft" in (adapter / "README.md").read_text()


def test_card_names_repository_and_licence(adapter):
    options = ("--repo-id", "user/tiny", "--subfolder", "part", "--license", "mit")
    assert run_json("card", adapter, *options)["metadata"]["license"] == "mit"
    assert '"user/tiny", subfolder="part")' in (adapter / "README.md").read_text()


@pytest.fixture
def sweep(monkeypatch, tmp_path):
    """Replaces the measurements by a script that writes its arguments as the result."""

    def write(code):
        monkeypatch.setattr(bench, "BENCHMARKS", tmp_path)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        (tmp_path / "sweep.py").write_text(
            "import json, sys\nfrom pathlib import Path\n"
            "folder = Path(sys.argv[sys.argv.index('--output') + 1], 'gpu')\n"
            "folder.mkdir(parents=True)\n"
            "(folder / f'{sys.argv[1]}.json').write_text(json.dumps({'rows': sys.argv[1:]}))\n"
            f"sys.exit({code})\n"
        )
        return tmp_path

    return write


def test_bench_runs_the_sweep(sweep, tmp_path):
    sweep(0)
    shown = run_json("bench", "decode", "--length", 1024, "--length", 2048, "--output", tmp_path / "out")
    assert shown == {"rows": ["decode", "--lengths", "1024", "2048", "--output", str(tmp_path / "out")]}


def test_bench_says_when_nothing_was_measured(sweep, tmp_path):
    (sweep(0) / "sweep.py").write_text("")
    assert_refused(run("bench", "router", "--length", 2048, "--output", tmp_path), "`--length` must be one that")


def test_bench_ends_as_the_sweep_ends(sweep):
    sweep(1)
    assert run("bench", "router").exit_code == 1


def test_bench_needs_the_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "BENCHMARKS", tmp_path)
    assert_refused(run("bench", "train"), "`bench` must run in a checkout of the sources")


def test_bench_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(run("bench", "train"), "`bench` must run where torch sees a CUDA GPU, got none.")


def test_bench_finds_the_sources():
    assert (bench.BENCHMARKS / "sweep.py").is_file()


@pytest.mark.parametrize("operator", list(bench.Operator))
def test_bench_offers_what_the_sweep_measures(operator, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "kernels" / "benchmarks"))
    assert operator.value in import_module("registry").OPERATORS
