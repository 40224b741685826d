"""Every recipe parses, recipes differ where they should, and accelerate reads its configurations."""

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from train_sft import ElasticOptions, parse_recipe

from elastic_peft.config import DEFAULT_T_VALUES


RECIPES = Path(__file__).parents[2] / "recipes"
#: What the trades of recipes/reproduction chose for the small model.
T_VALUES = {"smollm2_135m": {"code": 0.85, "continuation": 0.9}}
MODELS = {
    "smollm2_135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen3_4b": "Qwen/Qwen3-4B",
    "qwen3_8b": "Qwen/Qwen3-8B",
    "llama3_1_8b": "meta-llama/Llama-3.1-8B-Instruct",
}
PAIRS = {"fa_ssa": "FA-SSA", "fa_xa": "FA-XA", "xa_ssa": "XA-SSA"}
LARGE = [folder for folder in MODELS if folder != "smollm2_135m"]
FILES = [f"{folder}/{name}" for folder in MODELS for name in PAIRS]
PAPER_FILES = [f"{folder}/paper/{name}" for folder in LARGE for name in PAIRS]
OF_THE_MODEL = {"model_name_or_path", "dataset_name", "output_dir"}
OF_THE_PAIR = {"mode_pair", "output_dir", "xattn_block_size", "xattn_stride", "xattn_threshold"}


def read(name):
    return yaml.safe_load((RECIPES / f"{name}.yaml").read_text())


def parse(name, *options):
    return parse_recipe(["--config", str(RECIPES / f"{name}.yaml"), "--use_cpu", *options])


def differences(first, second):
    first, second = read(first), read(second)
    return {field for field in {*first, *second} if first.get(field) != second.get(field)}


def test_the_list_has_every_recipe():
    found = {str(path.relative_to(RECIPES).with_suffix("")) for path in RECIPES.glob("*/**/*.yaml")}
    assert {name for name in found if not name.startswith("accelerate/")} == {*FILES, *PAPER_FILES}


@pytest.mark.parametrize("name", FILES + PAPER_FILES)
def test_recipe_parses_to_its_model_and_pair(name):
    recipe = parse(name)
    folder, *_, pair = name.split("/")
    assert recipe.model.model_name_or_path == MODELS[folder]
    assert recipe.elastic.mode_pair == PAIRS[pair]
    assert recipe.elastic.t_values == {**DEFAULT_T_VALUES, **T_VALUES.get(folder, {})}


def test_output_folders_are_apart():
    folders = [read(name)["output_dir"] for name in FILES + PAPER_FILES]
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("name", FILES)
def test_pairs_of_a_model_differ_in_nothing_else(name):
    assert differences(f"{name.split('/')[0]}/fa_ssa", name) <= OF_THE_PAIR


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("folder", LARGE)
@pytest.mark.parametrize("kind", ["", "paper/"], ids=["ours", "paper"])
def test_large_models_differ_in_nothing_else(folder, kind, name):
    assert differences(f"qwen3_4b/{kind}{name}", f"{folder}/{kind}{name}") <= OF_THE_MODEL


@pytest.mark.parametrize("name", PAPER_FILES)
def test_paper_recipes_have_its_hyperparameters(name):
    _, training, _, elastic = parse(name)
    assert not elastic.standardize_input
    assert (elastic.sink_size, elastic.window_size, elastic.pool_size) == (128, 2048, 100)
    assert (training.router_learning_rate, training.multiplier_learning_rate) == (5e-4, 1e-3)
    assert (training.max_steps, training.max_length, training.warmup_steps) == (300, 65536, 0.2)
    assert training.per_device_train_batch_size * training.gradient_accumulation_steps * 8 == 48
    assert (training.adam_beta1, training.adam_beta2, training.weight_decay) == (0.9, 0.95, 0.1)


@pytest.mark.parametrize("name", FILES)
def test_our_recipes_have_the_rates_that_measured_better(name):
    _, training, _, elastic = parse(name)
    assert elastic.standardize_input
    assert (training.router_learning_rate, training.multiplier_learning_rate) == (1e-3, 1e-2)


def test_an_option_goes_before_the_recipe():
    assert parse("qwen3_4b/fa_ssa", "--window_size", "512").elastic.window_size == 512


def test_an_unknown_field_is_refused(tmp_path):
    (tmp_path / "recipe.yaml").write_text("windw_size: 512")
    with pytest.raises(ValueError, match="windw_size"):
        parse_recipe(["--config", str(tmp_path / "recipe.yaml"), "--use_cpu"])


@pytest.mark.parametrize("missing", ["model_name_or_path", "dataset_name"])
def test_what_a_recipe_must_name(tmp_path, missing):
    fields = {"model_name_or_path": "model", "dataset_name": "data"}
    del fields[missing]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(fields))
    with pytest.raises(ValueError, match=f"`{missing}` must name"):
        parse_recipe(["--config", str(tmp_path / "recipe.yaml"), "--use_cpu"])


@pytest.mark.parametrize("option", ["load_in_4bit", "use_peft", "use_dora", "ignore_bias_buffers"])
def test_a_field_of_trl_s_that_nothing_reads_is_refused(option):
    with pytest.raises(ValueError, match=f"`{option}` must be left out: nothing here reads it, got True"):
        parse("qwen3_4b/fa_ssa", f"--{option}", "true")


def test_options_of_the_adapter_are_those_a_user_sets():
    options = set(ElasticOptions.__dataclass_fields__)
    assert {"mode_pair", "t_values", "sink_size", "standardize_input"} <= options
    assert not options & {"head_dim", "num_key_value_heads", "format_version", "peft_type", "revision"}


@pytest.mark.parametrize(
    ("name", "kind"), [("ddp", "MULTI_GPU"), ("fsdp2", "FSDP"), ("zero2", "DEEPSPEED")], ids=["ddp", "fsdp2", "zero2"]
)
def test_accelerate_reads_its_configuration(name, kind):
    config = load_config_from_file(str(RECIPES / "accelerate" / f"{name}.yaml"))
    assert config.distributed_type.value == kind
    assert config.num_processes == 8


def test_fsdp2_does_not_load_on_one_process_alone():
    # accelerate would spread every entry of the state dict as a sharded tensor, and the routers' buffers are none.
    config = load_config_from_file(str(RECIPES / "accelerate" / "fsdp2.yaml"))
    assert config.fsdp_config["fsdp_version"] == 2
    assert not config.fsdp_config["fsdp_cpu_ram_efficient_loading"]
