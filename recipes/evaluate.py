"""RULER scores of an adapter: full attention, every head sparse, routed, and static choices of heads.

    python recipes/evaluate.py --model HuggingFaceTB/SmolLM2-135M-Instruct --adapter adapter --lengths 2048 4096 8192
    python recipes/evaluate.py ... --static masks.json     # {"name": [[0, 1, ...], ...]}, 1 = sparse, a row a layer

Needs no network and no data: prompts are made of text that comes with Python, or of `--haystack`. Scores go into the
`ruler` list of `--output`, where rows of the same task, length and mode pair are replaced. For LongBench:

    python -m elastic_peft.run lm_eval --model elastic --model_args pretrained=MODEL,peft=ADAPTER --tasks longbench_e
"""

import argparse
import json
from pathlib import Path

import torch
import transformers
from peft import PeftModel
from ruler_text import python_sources
from transformers import AutoModelForCausalLM, AutoTokenizer

from elastic_peft import report
from elastic_peft.evaluation.ruler import TASKS, build_examples, check_tasks
from elastic_peft.evaluation.ruler_run import evaluate


def main(arguments: list[str] | None = None) -> None:
    """Runs the evaluation; see the module's description and `--help`."""
    args = _parse(arguments)
    check_tasks(args.tasks)
    static = _read_static(args.static) if args.static else {}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    _read_results(args.output)  # hours before it is needed
    transformers.logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    sources = python_sources(args.haystack)
    dtype = torch.float32 if args.device == "cpu" else "auto"  # CPUs are slow at bfloat16
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device)
    model = PeftModel.from_pretrained(base, args.adapter).eval()
    for length in args.lengths:
        examples = build_examples(tokenizer, sources, length, tasks=args.tasks, samples=args.samples, seed=args.seed)
        rows = evaluate(model, tokenizer, examples, static=static, batch_tokens=args.batch_tokens)
        _write(args.output, rows)
        print(report.routing_table([_flat(row) for row in rows]), flush=True)
    print(f"Written: {args.output}")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="base model: a folder, or repository on the Hub")
    parser.add_argument("--adapter", required=True, help="adapter: a folder, or repository on the Hub")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096], help="tokens of a prompt and its answer")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help=f"default all: {', '.join(TASKS)}")
    parser.add_argument("--samples", type=int, default=20, help="prompts of each task and length")
    parser.add_argument("--output", type=Path, default=Path("results.json"))
    parser.add_argument("--static", type=Path, help="JSON file of static choices of sparse heads to compare with")
    parser.add_argument("--haystack", type=Path, help="text file to hide needles in")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-tokens", type=int, help="prompt tokens of a batch; default 1M, one prompt on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    if args.batch_tokens is None:
        args.batch_tokens = 1 if args.device == "cpu" else 2**20
    return args


def _read_static(file: Path) -> dict[str, torch.Tensor]:
    masks = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(masks, dict):
        raise ValueError(f"`static` must map names to rows of 0 and 1, got a {type(masks).__name__} in {file}.")
    for name, rows in masks.items():
        is_mask = isinstance(rows, list) and all(isinstance(row, list) and len(row) == len(rows[0]) for row in rows)
        if not is_mask or not any(rows) or any(head not in (0, 1) for row in rows for head in row):
            raise ValueError(f"`static` must hold rows of one length of 0 and 1, got others for {name!r} in {file}.")
    return {name: torch.tensor(rows, dtype=torch.bool) for name, rows in masks.items()}


def _read_results(file: Path) -> dict:
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if not isinstance(results, dict):
        raise ValueError(f"`output` must be a file of results with a `ruler` list or none, got {file}.")
    return {"ruler": [], **results}


def _write(file: Path, rows: list[dict]) -> None:
    """Puts rows into the `ruler` list of a results file, in place of those that they measure again."""
    results = _read_results(file)
    new = {_key(row) for row in rows}
    results["ruler"] = [row for row in results["ruler"] if _key(row) not in new] + rows
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(results, indent=1), encoding="utf-8")
    part.replace(file)  # at once: the file may hold other results


def _key(row: dict) -> tuple:
    return row["task"], row["length"], row["mode_pair"]


def _flat(row: dict) -> dict:
    return {**{name: value for name, value in row.items() if name != "score"}, **row["score"]}


if __name__ == "__main__":
    main()
