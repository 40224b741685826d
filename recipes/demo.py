"""The whole product in one run: train routers on SmolLM2-135M, save them, load them again, generate and measure.

    python recipes/demo.py                     # minutes on a CPU: shows the loop; on a GPU: trains an adapter
    python recipes/demo.py --steps 40 --force  # longer, from scratch

Writes `out/demo/{adapter/,routing.png,metrics.json}`. What is already there is not made again.
"""

import argparse
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
from demo_evaluation import evaluate, generate
from demo_model import model_directory
from demo_training import CPU, GPU, Profile, load_base, train
from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from elastic_peft import report


ANSWER_TOKENS = 32
NOT_TRAINED = """\
This was a demonstration on a CPU, not a trained adapter: {steps} steps of {batch_size} short examples show that
routers learn, save, load and generate. They do not show what a trained adapter reaches: run this on a GPU for that."""


def main(arguments: list[str] | None = None) -> None:
    """Runs the demo; see the module's description and `--help`."""
    args = _parse(arguments)
    warnings.simplefilter("ignore", FutureWarning)  # arguments that newer versions of transformers rename
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    profile = _profile(args)
    folder: Path = args.output_dir / "demo"
    model_path = Path(args.model) if args.model else model_directory(args.output_dir / "models")
    _start_over_if_changed(folder, {"model": str(model_path), "device": args.device, **asdict(profile)}, args.force)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    training_rows, evaluation_rows = _examples(folder / "data.json", tokenizer, profile)

    adapter, log = folder / "adapter", folder / "training.json"
    if adapter.exists():
        print(f"Training: {adapter} is there, skipped.")
    else:
        print(
            f"Training: {profile.steps} steps of {profile.batch_size} examples, at most {profile.length} tokens each."
        )
        started = time.perf_counter()
        lines = train(load_base(model_path, args.device), tokenizer, training_rows, profile, adapter)
        log.write_text(json.dumps({"seconds": time.perf_counter() - started, "log": lines}))

    model = PeftModel.from_pretrained(load_base(model_path, args.device), adapter).eval()
    print(f"Loaded {adapter} onto a fresh base model.")
    examples = {row["task"]: row for row in reversed(evaluation_rows)}
    answers = [generate(model, tokenizer, examples[task], ANSWER_TOKENS) for task in ("single_qa", "code")]
    for answer in answers:
        print(
            "\n{task}, MSR {MSR:.2f}\n  ... {prompt}\n  expected:  {expected}\n  generated: {generated}\n".format(
                **answer
            )
        )

    metrics_file, picture = folder / "metrics.json", folder / "routing.png"
    if metrics_file.exists():
        print(f"Evaluation: {metrics_file} is there, skipped.")
        metrics = json.loads(metrics_file.read_text())
    else:
        started = time.perf_counter()
        table, decisions = evaluate(model, tokenizer, evaluation_rows)
        report.routing_png(decisions, picture, title="How often each head ran sparse")
        metrics = {
            "profile": asdict(profile),
            "device": torch.cuda.get_device_name(args.device) if args.device != "cpu" else "cpu",
            "tasks": table,
            "answers": answers,
            "training": json.loads(log.read_text()),
            "evaluation_seconds": time.perf_counter() - started,
        }
        metrics_file.write_text(json.dumps(metrics, indent=1))
    print(f"\n{report.routing_table(metrics['tasks'])}\n")
    print(f"Written: {adapter}, {picture}, {metrics_file}")
    if args.device == "cpu":
        print(NOT_TRAINED.format(**asdict(profile)))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in ("steps", "length", "batch_size"):
        shown = f"default {getattr(CPU, field)} on a CPU, {getattr(GPU, field)} on a GPU"
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, help=shown)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help="directory of another backbone; default SmolLM2-135M-Instruct")
    parser.add_argument("--output-dir", type=Path, default=Path("out"))
    parser.add_argument("--force", action="store_true", help="make everything but the model again")
    return parser.parse_args(arguments)


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
