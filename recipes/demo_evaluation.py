"""What the demo measures: each task's answer likelihood with every head full, every head sparse, and routed."""

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from elastic_peft import RoutingRecord, forced_routing, last_routing


SHOWN_CHARACTERS = 120


@torch.inference_mode()
def evaluate(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, rows: list[dict]
) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """Answer likelihood and sparsity of held-out examples, one example at a time.

    Args:
        model: with an ELASTIC adapter, in evaluation mode.
        tokenizer: its tokenizer.
        rows: `prompt`, `completion` and `task`.

    Returns:
        One row per task (means over its examples; NLL in nats per answer token), and per task the routed decisions,
        bool `[N, L, H]`.
    """
    measured: dict[str, list[dict[str, float]]] = {}
    decisions: dict[str, list[torch.Tensor]] = {}
    for row in tqdm(rows, desc="evaluation"):
        ids, prompt_end = _tokens(tokenizer, row, model.device)
        result = {}
        for name, forced in (("full", "retrieval"), ("all sparse", "sparse"), ("routed", None)):
            with forced_routing(model, forced) if forced else nullcontext():
                result[f"NLL {name}"] = _answer_nll(model, ids, prompt_end)
        record = last_routing(model)
        assert record is not None
        measured.setdefault(row["task"], []).append({"MSR": record.msr.item(), "ESR": record.esr.item(), **result})
        decisions.setdefault(row["task"], []).append(record.decisions.cpu())
    table = [{"task": task, "n": len(results), **_means(results)} for task, results in measured.items()]
    return table, {task: torch.cat(parts) for task, parts in decisions.items()}


@torch.inference_mode()
def generate(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, row: dict, max_new_tokens: int
) -> tuple[dict, RoutingRecord]:
    """Greedy answer to one example's prompt.

    Args:
        model: with an ELASTIC adapter, in evaluation mode.
        tokenizer: its tokenizer.
        row: `prompt`, whose last message may be the assistant's and is then continued; `task`; `completion` where the
            true answer is known.
        max_new_tokens: tokens at most.

    Returns:
        The task, the prompt's end, the true answer or `None`, the generated one and the prompt's MSR; and what was
        routed.
    """
    begun = row["prompt"][-1]["role"] == "assistant"
    inputs = tokenizer.apply_chat_template(
        row["prompt"],
        add_generation_prompt=not begun,
        continue_final_message=begun,
        return_tensors="pt",
        return_dict=True,
    ).to(model.device)
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    record = last_routing(model)
    assert record is not None
    answer = {
        "task": row["task"],
        "prompt": row["prompt"][-1]["content"][-SHOWN_CHARACTERS:].strip(),
        "expected": row["completion"][0]["content"].strip() if "completion" in row else None,
        "generated": tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip(),
        "MSR": record.msr.item(),
    }
    return answer, record


def print_answer(answer: dict) -> None:
    """One generated answer, under the end of its prompt.

    Args:
        answer: as `generate` returns it.
    """
    lines = {"prompt ends": answer["prompt"], "expected": answer["expected"], "generated": answer["generated"]}
    print(f"\n{answer['task']}, MSR {answer['MSR']:.2f}")
    for name, text in lines.items():
        if text is not None:
            print(f"  {name + ':':<13}" + text.replace("\n", "\n" + " " * 15))


def _tokens(tokenizer: PreTrainedTokenizerBase, row: dict, device: torch.device) -> tuple[torch.Tensor, int]:
    """The example's tokens `[1, S]`, and how many of them are the prompt's."""
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(row["prompt"] + row["completion"], return_dict=False)
    return torch.tensor([whole], device=device), len(prompt)


def _answer_nll(model: torch.nn.Module, ids: torch.Tensor, prompt_end: int) -> float:
    answer = ids[0, prompt_end:]
    bounds = torch.tensor([prompt_end], device=ids.device)
    logits = model(input_ids=ids, prompt_end=bounds, logits_to_keep=len(answer) + 1).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits.float(), answer).item()


def _means(results: Iterable[dict[str, float]]) -> dict[str, float]:
    columns = {name: torch.tensor([result[name] for result in results]) for name in next(iter(results))}
    return {name: values.mean().item() for name, values in columns.items()}
