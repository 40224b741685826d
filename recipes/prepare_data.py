"""Builds the training mixture: five data sets to `prompt`, `completion` and `task`, 8K to 64K tokens each.

    python recipes/prepare_data.py --tokenizer Qwen/Qwen3-4B --output-dir data/qwen3 \\
        --files 'colt=CoLT-132K/sft_data/*.jsonl' --chat-template-options '{"enable_thinking": false}'

Sources are streamed and written in parts, one for each block of their rows; a run that was stopped goes on where it
was when it is started again. Lengths are those after the tokenizer's chat template. The parts are then mixed into
`OUTPUT_DIR/train/`, so that OUTPUT_DIR is the `dataset_name` of a recipe; the trainer packs. CoLT-132K is not on the
Hub: download it from https://zenodo.org/records/15019938 and name its files.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
from data_parts import PartBuilder
from data_sources import SOURCES
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer


PAPER_TOKENS = 740_000_000
ROWS_PER_FILE = 2000


def main(arguments: Sequence[str] | None = None) -> None:
    """Builds the mixture; see the module's description and `--help`."""
    args = _parse(arguments)
    _keep_settings(args)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    shares = sum(SOURCES[name].share for name in args.sources)
    for name in args.sources:
        builder = PartBuilder(name, tokenizer, args.min_tokens, args.max_tokens, args.chat_template_options, args.seed)
        wanted = round(args.tokens * SOURCES[name].share / shares)
        builder.run(args.output_dir / "parts" / name, args.files.get(name), wanted)
    mix(args.output_dir, args.sources, args.chat_template_options, args.seed)


def mix(folder: Path, sources: Sequence[str], template_options: dict, seed: int) -> None:
    """Shuffles the parts of some sources into `folder/train`, and prints what it holds.

    Args:
        folder: holds `parts/SOURCE/*.parquet`.
        sources: their names.
        template_options: what the trainer must hand to the chat template with each example.
        seed: of the order.

    Raises:
        ValueError: no example has a wanted length.
    """
    parts = [part for name in sources for part in sorted((folder / "parts" / name).glob("*.parquet"))]
    # `datasets` cannot read a file without rows.
    filled = [str(part) for part in parts if pq.read_metadata(part).num_rows]
    if not filled:
        raise ValueError("`min_tokens` and `max_tokens` must leave at least one example, got none.")
    # Hidden, so that what a killed run leaves is no part of the data set.
    workplace, target = folder / ".mixing", folder / "train"
    shutil.rmtree(workplace, ignore_errors=True)
    try:
        examples = load_dataset("parquet", data_files=filled, split="train", cache_dir=workplace / "cache")
        _print_summary(examples)
        if template_options:
            examples = examples.map(lambda _: {"chat_template_kwargs": template_options})
        examples = examples.shuffle(seed=seed)
        (workplace / "train").mkdir()
        files = -(-len(examples) // ROWS_PER_FILE)
        for index in range(files):
            shard = examples.shard(files, index, contiguous=True)
            shard.to_parquet(workplace / "train" / f"{index:05}.parquet")
        shutil.rmtree(target, ignore_errors=True)
        (workplace / "train").rename(target)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    print(f"Written: {target}, {len(examples)} examples.")


def _print_summary(examples: Dataset) -> None:
    lengths = defaultdict(list)
    for source, task, tokens in zip(examples["source"], examples["task"], examples["tokens"]):
        lengths[source, task].append(tokens)
    print(f"{'source':<12}{'task':<22}{'examples':>10}{'tokens':>15}{'longest':>10}")
    for (source, task), tokens in lengths.items():
        print(f"{source:<12}{task:<22}{len(tokens):>10,}{sum(tokens):>15,}{max(tokens):>10,}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="of the base model: a repository or a folder")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--sources", nargs="+", choices=list(SOURCES), default=list(SOURCES))
    parser.add_argument(
        "--files",
        nargs="*",
        default=[],
        metavar="SOURCE=PATTERN",
        help="local JSON, JSON Lines or Parquet files to read instead of the Hub's",
    )
    parser.add_argument("--tokens", type=int, default=PAPER_TOKENS, help="of the mixture, the sources' shares of it")
    parser.add_argument("--min-tokens", type=int, default=8192, help="of an example")
    parser.add_argument("--max-tokens", type=int, default=65536, help="of an example")
    parser.add_argument("--chat-template-options", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if not 1 <= args.min_tokens <= args.max_tokens:
        parser.error(f"--min-tokens must be from 1 to --max-tokens, {args.max_tokens}, got {args.min_tokens}")
    if args.tokens < 1:
        parser.error(f"--tokens must be at least 1, got {args.tokens}")
    if not isinstance(args.chat_template_options, dict):
        parser.error(f"--chat-template-options must be a JSON object, got {args.chat_template_options!r}")
    pairs = [pair.partition("=")[::2] for pair in args.files]
    for option, names in (("--sources", args.sources), ("--files", [name for name, _ in pairs])):
        if len(set(names)) < len(names):
            parser.error(f"{option} must name each source once, got {', '.join(names)}")
    for name, pattern in pairs:
        if name not in SOURCES or not pattern:
            parser.error(f"--files must be SOURCE=PATTERN, SOURCE one of {', '.join(SOURCES)}, got {name}={pattern}")
    args.files = dict(pairs)
    return args


def _keep_settings(args: argparse.Namespace) -> None:
    """Refuses to go on where a run with other settings left its parts."""
    names = ("tokenizer", "min_tokens", "max_tokens", "chat_template_options", "seed", "files")
    settings = {name: getattr(args, name) for name in names}
    file = args.output_dir / "settings.json"
    if not file.exists():
        args.output_dir.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(settings, indent=1))
        partial.rename(file)
    elif (earlier := json.loads(file.read_text())) != settings:
        raise ValueError(f"`output_dir` must be new or made with {settings}, got one made with {earlier}.")


if __name__ == "__main__":
    main()
