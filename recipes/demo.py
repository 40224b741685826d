"""The whole product in one run, on SmolLM2-135M: what the shipped adapter routes, then a training of your own.

    python recipes/demo.py                     # minutes on a CPU: shows the loop; on a GPU: trains an adapter
    python recipes/demo.py --steps 40 --force  # longer, from scratch

Writes `out/demo/shipped/{routing.png,routing.json}` and `out/demo/own/{adapter/,routing.png,metrics.json}`. What is
already there is not made again.
"""

import argparse
import hashlib
import json
import shutil
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import datasets
import torch
import transformers
from demo_data import TASKS, ExampleBuilder, Split, build_examples
from demo_evaluation import evaluate, generate, print_answer
from demo_model import model_directory
from demo_shipped import show_shipped
from demo_training import CPU, GPU, Profile, load_base, train
from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from elastic_peft import report


SHIPPED = Path(__file__).parents[1] / "hub_cards" / "smollm2-135m-fa-ssa"
ANSWER_TOKENS = 32
FIRST_PART = """
1 of 2. A trained adapter: {adapter}
Three prompts over text that is new to the shipped adapter, worded like those of its training. One of a kind shows that
the routing follows the input; it is no measurement."""
SECOND_PART = """
2 of 2. An adapter of your own: train, save, load, use, measure."""
NOT_TRAINED = """\
Your own adapter shows the loop, it is not trained: {steps} steps of {batch_size} short examples are what a CPU does in
minutes. Run this on a GPU to train it."""


def main(arguments: list[str] | None = None) -> None:
    """Runs the demo; see the module's description and `--help`."""
    args = _parse(arguments)
    warnings.simplefilter("ignore", FutureWarning)  # arguments that newer versions of transformers rename
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    folder: Path = args.output_dir / "demo"
    model_path = Path(args.model) if args.model else model_directory(args.output_dir / "models")
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    base = {"model": str(model_path), "device": args.device}

    print(FIRST_PART.format(adapter=args.adapter))
    digest = hashlib.sha256((args.adapter / "adapter_model.safetensors").read_bytes()).hexdigest()
    _start_over_if_changed(folder / "shipped", {**base, "adapter": digest}, args.force)
    show_shipped(model_path, args.device, args.adapter, tokenizer, folder / "shipped")

    print(SECOND_PART)
    profile = _profile(args)
    _start_over_if_changed(folder / "own", {**base, **asdict(profile)}, args.force)
    _own(model_path, args.device, tokenizer, profile, folder / "own")


def _own(model_path: Path, device: str, tokenizer: PreTrainedTokenizerBase, profile: Profile, folder: Path) -> None:
    """Trains an adapter, loads it again, generates and measures."""
    training_rows, evaluation_rows = _examples(folder / "data.json", tokenizer, profile)
    adapter, log = folder / "adapter", folder / "training.json"
    if adapter.exists():
        print(f"Training: {adapter} is there, skipped.")
    else:
        print(
            f"Training: {profile.steps} steps of {profile.batch_size} examples, at most {profile.length} tokens each."
        )
        started = time.perf_counter()
        lines = train(load_base(model_path, device), tokenizer, training_rows, profile, adapter)
        log.write_text(json.dumps({"seconds": time.perf_counter() - started, "log": lines}))

    model = PeftModel.from_pretrained(load_base(model_path, device), adapter).eval()
    print(f"Loaded {adapter} onto a fresh base model.")
    examples = {row["task"]: row for row in reversed(evaluation_rows)}
    answers = [generate(model, tokenizer, examples[task], ANSWER_TOKENS)[0] for task in ("single_qa", "code")]
    for answer in answers:
        print_answer(answer)

    metrics_file, picture = folder / "metrics.json", folder / "routing.png"
    if metrics_file.exists():
        print(f"\nEvaluation: {metrics_file} is there, skipped.")
        metrics = json.loads(metrics_file.read_text())
    else:
        started = time.perf_counter()
        table, decisions = evaluate(model, tokenizer, evaluation_rows)
        report.routing_png(decisions, picture, title="How often each head ran sparse")
        metrics = {
            "profile": asdict(profile),
            "device": torch.cuda.get_device_name(device) if device != "cpu" else "cpu",
            "tasks": table,
            "answers": answers,
            "training": json.loads(log.read_text()),
            "evaluation_seconds": time.perf_counter() - started,
        }
        metrics_file.write_text(json.dumps(metrics, indent=1))
    print(f"\n{report.routing_table(metrics['tasks'])}\n")
    print(f"Written: {adapter}, {picture}, {metrics_file}")
    if device == "cpu":
        print(NOT_TRAINED.format(**asdict(profile)))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in ("steps", "length", "batch_size"):
        shown = f"default {getattr(CPU, field)} on a CPU, {getattr(GPU, field)} on a GPU"
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, help=shown)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help="directory of another backbone; default SmolLM2-135M-Instruct")
    parser.add_argument(
        "--adapter", type=Path, default=SHIPPED, help="directory of a trained adapter for it; default the shipped one"
    )
    parser.add_argument("--output-dir", type=Path, default=Path("out"))
    parser.add_argument("--force", action="store_true", help="make everything but the model again")
    args = parser.parse_args(arguments)
    if not (args.adapter / "adapter_model.safetensors").exists():
        parser.error(f"--adapter must be a directory with an adapter_model.safetensors, got {args.adapter}")
    return args


def _profile(args: argparse.Namespace) -> Profile:
    given = {name: getattr(args, name) for name in ("steps", "length", "batch_size")}
    profile = replace(CPU if args.device == "cpu" else GPU, **{name: v for name, v in given.items() if v is not None})
    return replace(profile, examples=min(profile.examples, profile.steps * profile.batch_size))


def _start_over_if_changed(folder: Path, settings: dict, force: bool) -> None:
    """Removes what a run with other settings left behind, so that nothing stale is skipped."""
    file = folder / "settings.json"
    if force or not file.exists() or json.loads(file.read_text()) != settings:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        file.write_text(json.dumps(settings, indent=1))


def _examples(file: Path, tokenizer: PreTrainedTokenizerBase, profile: Profile) -> tuple[list[dict], list[dict]]:
    if file.exists():
        print(f"Examples: {file} is there, skipped.")
        training, evaluation = json.loads(file.read_text())
        return training, evaluation
    print("Examples: five tasks over the text of Python's standard library.")
    counts = (profile.examples, profile.evaluation_examples * len(TASKS))
    sizes = (profile.length, profile.sink_size, profile.window_size)
    training, evaluation = (
        build_examples(ExampleBuilder(tokenizer, Split(is_evaluation), *sizes), count, seed=0)
        for is_evaluation, count in zip((False, True), counts)
    )
    file.write_text(json.dumps([training, evaluation]))
    return training, evaluation


if __name__ == "__main__":
    main()
