"""Trains an ELASTIC adapter by supervised fine-tuning: a recipe in, an adapter out.

    # One GPU
    python recipes/train_sft.py --config recipes/smollm2_135m/fa_ssa.yaml --dataset_name DATASET

    # Eight GPUs; also fsdp2.yaml and zero2.yaml
    accelerate launch --config_file recipes/accelerate/ddp.yaml \
        recipes/train_sft.py --config recipes/qwen3_4b/fa_ssa.yaml

    # Goes on from a checkpoint
    python recipes/train_sft.py --config RECIPE --resume_from_checkpoint OUTPUT_DIR/checkpoint-100

A recipe is a YAML file whose fields are those of TRL's `ScriptArguments` and `ModelConfig` that say what to load, of
`ElasticSFTConfig` and of `ElasticConfig`; each is also an option here, and an option given wins. The dataset has the
columns `prompt`, `completion` and `task`, as `prepare_data.py` writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, field, fields, make_dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from datasets import load_dataset
from huggingface_hub import HfApi
from huggingface_hub.constants import REPOCARD_NAME
from peft import PeftConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import ModelConfig, ScriptArguments, TrlParser

from elastic_peft import ElasticConfig, ElasticSFTConfig, ElasticSFTTrainer
from elastic_peft.card import render_card


# What the library fills in, and what every PEFT method has, is not for a recipe to set.
_NOT_OPTIONS = {"format_version", "head_dim", "num_key_value_heads"} | {option.name for option in fields(PeftConfig)}
_HINTS = get_type_hints(ElasticConfig)
ElasticOptions = make_dataclass(
    "ElasticOptions",
    [
        (
            option.name,
            _HINTS[option.name],
            field(default=option.default, default_factory=option.default_factory, metadata=option.metadata),
        )
        for option in fields(ElasticConfig)
        if option.name not in _NOT_OPTIONS
    ],
)


# What is read of TRL's classes, which hold more: a quantised base model, LoRA, ...
_READ = {
    *("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming"),
    *("model_name_or_path", "model_revision", "dtype", "attn_implementation"),
}


class Recipe(NamedTuple):
    """What a recipe and the command line ask for."""

    script: ScriptArguments
    training: ElasticSFTConfig
    model: ModelConfig
    elastic: ElasticConfig


def parse_recipe(arguments: Sequence[str] | None = None) -> Recipe:
    """Reads a recipe, and the options that go before its fields.

    Args:
        arguments: such as `["--config", "recipe.yaml", "--seed", "1"]`; `None` takes those of the command line.

    Raises:
        ValueError: the recipe has a field that nothing reads, or a value outside its range.
    """
    parser = TrlParser((ScriptArguments, ElasticSFTConfig, ModelConfig, ElasticOptions), description=__doc__)
    script, training, model, options = parser.parse_args_and_config(arguments)
    if not model.model_name_or_path:
        raise ValueError("`model_name_or_path` must name the base model, got none.")
    if not script.dataset_name:
        raise ValueError("`dataset_name` must name a dataset or a folder of files, got none.")
    for given in (script, model):
        defaults = type(given)()
        for option in fields(given):
            value = getattr(given, option.name)
            if option.name not in _READ and value != getattr(defaults, option.name):
                raise ValueError(f"`{option.name}` must be left out: nothing here reads it, got {value!r}.")
    return Recipe(script, training, model, ElasticConfig(task_type="CAUSAL_LM", **asdict(options)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, saves the adapter with its card and, with `push_to_hub`, pushes both; see `--help`."""
    recipe = parse_recipe(arguments)
    args = recipe.training
    push = args.push_to_hub
    args.push_to_hub = False  # the trainer would push a generic card
    trainer = build_trainer(recipe)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        write_card(args, args.hub_model_id)
        if push:
            push_adapter(args)
    trainer.accelerator.end_training()


def build_trainer(recipe: Recipe) -> ElasticSFTTrainer:
    """A trainer around the recipe's base model with new routers, and its dataset."""
    script, args, model_args, config = recipe
    hub = {"revision": model_args.model_revision, "trust_remote_code": args.trust_remote_code}
    options = {
        **hub,
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        **(args.model_init_kwargs or {}),
    }
    args.model_init_kwargs = None  # spent here
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, **options)
    set_seed(args.seed)  # the trainer's comes after the routers are made
    dataset: Any = load_dataset(script.dataset_name, script.dataset_config, streaming=script.dataset_streaming)
    return ElasticSFTTrainer(
        model=get_peft_model(model, config),
        args=args,
        train_dataset=_split(dataset, script, "dataset_train_split"),
        eval_dataset=_split(dataset, script, "dataset_test_split") if args.eval_strategy != "no" else None,
        processing_class=AutoTokenizer.from_pretrained(model_args.model_name_or_path, **hub),
    )


def _split(dataset: Any, script: ScriptArguments, option: str) -> Any:
    name = getattr(script, option)
    if name not in dataset:
        raise ValueError(f"`{option}` must be one of {', '.join(map(repr, dataset))}, got {name!r}.")
    return dataset[name]


def write_card(args: ElasticSFTConfig, repo_id: str | None) -> None:
    """Writes the card of the adapter in `output_dir`, which is loaded from `repo_id` or, without one, from there."""
    render_card(args.output_dir, repo_id=repo_id).save(Path(args.output_dir, REPOCARD_NAME))


def push_adapter(args: ElasticSFTConfig) -> None:
    """Pushes the adapter that was saved in `output_dir`: files hold its weights whole where the model is sharded."""
    api = HfApi(token=args.hub_token)
    name = args.hub_model_id or Path(args.output_dir).resolve().name
    repo_id = api.create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id  # with the user's namespace
    if args.hub_revision is not None:
        api.create_branch(repo_id, branch=args.hub_revision, exist_ok=True)
    write_card(args, repo_id)
    api.upload_folder(
        repo_id=repo_id,
        folder_path=args.output_dir,
        allow_patterns=["adapter_config.json", "adapter_model.safetensors", REPOCARD_NAME],
        revision=args.hub_revision,
        commit_message="Upload ELASTIC adapter",
    )


if __name__ == "__main__":
    main()
