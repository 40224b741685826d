"""What a trained adapter routes: the one shipped with the sources, on a question, a summary and a code prompt."""

import json
from pathlib import Path
from pydoc_data.topics import topics

import torch
from demo_evaluation import generate, print_answer
from demo_training import load_base
from peft import PeftModel
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from elastic_peft import report


#: Tokens of each prompt's text; instruction and chat template come on top.
TEXT_TOKENS = 2300
ANSWER_TOKENS = 24
KEY, NUMBER = "quiet-harbor", "4817263"


def build_prompts(tokenizer: PreTrainedTokenizerBase) -> list[dict]:
    """Three prompts worded like those that the shipped adapter was trained on, over other text.

    The question and the summary are about Python's own language reference, the code is this project's.

    Args:
        tokenizer: of the model; it counts the tokens.

    Returns:
        Rows with `task`, `prompt` (chat messages) and, where one answer is right, `completion`.
    """

    def cut(text: str) -> str:
        return tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids[:TEXT_TOKENS])

    sentences = " ".join(cut(topics["specialnames"]).split()).split(". ")
    # Beyond the reach of streaming heads: neither near the start nor near the end.
    sentences.insert(2 * len(sentences) // 5, f"One of the special magic numbers for {KEY} is: {NUMBER}")
    question = (
        "A special magic number is hidden within the following text. Remember it. You will be asked for the number "
        f"afterwards.\n{'. '.join(sentences)}\n"
        f"What is the special magic number for {KEY} mentioned in the provided text?"
    )
    summary = (
        "You are given a technical report. Write a short summary of the report.\n\n"
        f"Report:\n{cut(topics['execmodel']).strip()}\n\nNow summarize the document."
    )
    code = Path(__file__).with_name("demo_data.py").read_text(encoding="utf-8")
    begun = cut(code)
    begun = begun[: begun.rindex("\n") + 1]
    following = code[len(begun) :].split("\n")[:2]
    return [
        _row("single_qa", question, answer=NUMBER),
        _row("summarization", summary),
        _row("code", "Please complete the code given below.", begun=begun, answer="\n".join(following)),
    ]


def _row(task: str, question: str, *, begun: str | None = None, answer: str | None = None) -> dict:
    prompt = [{"role": "user", "content": question}]
    if begun is not None:
        prompt.append({"role": "assistant", "content": begun})
    known = {} if answer is None else {"completion": [{"role": "assistant", "content": answer}]}
    return {"task": task, "prompt": prompt, **known}


def route_prompts(
    model_path: Path | str, device: str, adapter: Path, tokenizer: PreTrainedTokenizerBase, picture: Path
) -> dict[str, list[dict]]:
    """Answers the three prompts and draws which heads ran sparse.

    Args:
        model_path: directory of the backbone.
        device: "cpu" or a CUDA device.
        adapter: directory of a trained adapter for it.
        tokenizer: the backbone's.
        picture: PNG file to write.

    Returns:
        `routing`, a table's rows, and `answers`.
    """
    model = PeftModel.from_pretrained(load_base(model_path, device), adapter).eval()
    routing: list[dict] = []
    answers: list[dict] = []
    decisions: dict[str, torch.Tensor] = {}
    for row in tqdm(build_prompts(tokenizer), desc="prompts"):
        answer, record = generate(model, tokenizer, row, ANSWER_TOKENS)
        ratios = {"tokens": record.lengths.item(), "MSR": record.msr.item(), "ESR": record.esr.item()}
        routing.append({"task": row["task"], **ratios})
        answers.append(answer)
        decisions[row["task"]] = record.decisions.cpu()
    report.routing_png(decisions, picture, layers=record.layers, title="Trained adapter: which heads ran sparse")
    return {"routing": routing, "answers": answers}


def show_shipped(
    model_path: Path | str, device: str, adapter: Path, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Prints what the adapter routed and answered, and writes `routing.png` and `routing.json`.

    Args:
        model_path: directory of the backbone.
        device: "cpu" or a CUDA device.
        adapter: directory of a trained adapter for it.
        tokenizer: the backbone's.
        folder: where to write; with `routing.json` there, that is what is printed.
    """
    file, picture = folder / "routing.json", folder / "routing.png"
    if file.exists():
        print(f"Prompts: {file} is there, skipped.")
        shown = json.loads(file.read_text())
    else:
        shown = route_prompts(model_path, device, adapter, tokenizer, picture)
        file.write_text(json.dumps(shown, indent=1))
    print(f"\n{report.routing_table(shown['routing'])}\n")
    print(
        "MSR: share of the key-value heads that run sparse. ESR: share of the query-key pairs that are not computed."
    )
    for answer in shown["answers"]:
        print_answer(answer)
    print(f"\nWritten: {picture}, {file}")
