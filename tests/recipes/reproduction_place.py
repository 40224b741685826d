"""A tiny model, tokenizer and file of examples of the reproduction's seven sets."""

import random

import numpy as np
import yaml
from recipes.tiny_llama import save_tiny_llama
from reproduction.examples import TASKS
from reproduction.recipe import RECIPES
from reproduction.workplace import Workplace
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast


SYSTEM = "<|im_start|>system\nhelp<|im_end|>\n<|im_start|>user\n"
MODE_PAIRS = ("fa_ssa", "fa_xa", "xa_ssa")
TINY = {"sink_size": 4, "window_size": 8, "max_steps": 2, "calibration_batches": 1, "logging_steps": 1}
END = "<|im_end|>\n<|im_start|>assistant\n"


def make_tokenizer():
    trained = ByteLevelBPETokenizer()
    special = ["<|im_end|>", "<|im_start|>"]
    trained.train_from_iterator(["the a of"], vocab_size=300, special_tokens=special, show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")


def prompt_and_answer(name, index):
    """Text of one example, with instructions in two phrasings, and its answer."""
    draw = random.Random(f"{name} {index}")
    opening = "Read this." if index % 2 else "Study this."
    closing = "Now" if index % 2 else "Then"
    words = ["".join(draw.choices("bcdfgh", k=3)) for _ in range(8)]
    word = words[3]
    if name == "sqa_foldoc":
        body = "\n\n".join(f"{w}: it is {w}" for w in words)
        return f'{opening}\n\n{body}\n\n{closing} what is "{word}"?{END}', f"it is {word}"
    if name == "sqa_pkg":
        body = "\n\n".join(f"Package: {w}\nDescription: does {w}" for w in words[:6])
        return f'{opening}\n\n{body}\n\n{closing} what is "{word}"?{END}', f"does {word}"
    if name == "niah_single":
        body = ". ".join([*words, f"the special magic number for {word} is: 12{index}", *words])
        asked = f"What is the special magic number for {word} mentioned in the provided text?"
        return f"{opening}\n{body}\n{asked}{END}It is:", f" 12{index}"
    if name == "mhop_wordnet":
        facts = [f"* {w} is a kind of {w}er.\n* {w}er means: so {w}." for w in words[:5]]
        answer = f"{word} is a kind of {word}er, which means"
        return f"{opening}\n\n" + "\n".join(facts) + f"\n\n{closing} that {word} is a kind of?{END}", answer
    if name == "summ_rfc":
        return f"{opening}\n\n" + "\n".join(words * 6) + f"\n\n{closing} write it.{END}Summary:", f" {word}"
    if name == "code_stdlib":
        return f"{opening}{END}" + "\n".join(words * 6), f"\n{word}"
    body = "\n\n".join(f"Word: {w}\nClass: {w[0]}" for w in words)
    return f"{opening}\n\n{body}\n\nWord: {word}{END}Class:", f" {word[0]}"


def write_examples(file, tokenizer, count):
    arrays = {}
    for split in ("train", "eval"):
        for name in TASKS:
            rows, bounds = [], []
            for index in range(count):
                prompt, answer = prompt_and_answer(name, index + (split == "eval"))
                prompt_ids = tokenizer.encode(SYSTEM + prompt, add_special_tokens=False)
                ids = prompt_ids + tokenizer.encode(answer + "<|im_end|>", add_special_tokens=False)
                rows.append(ids)
                bounds.append((len(prompt_ids), len(ids)))
            width = max(map(len, rows))
            padded = [ids + [0] * (width - len(ids)) for ids in rows]
            arrays[f"{split}/{name}/ids"] = np.array(padded, dtype=np.uint16)
            arrays[f"{split}/{name}/lens"] = np.array(bounds, dtype=np.int32)
    np.savez(file, **arrays)


def make_place(folder):
    tokenizer = make_tokenizer()
    save_tiny_llama(tokenizer, folder / "model")
    write_examples(folder / "tasks.npz", tokenizer, 4)
    for name in ("jobs", "failed", "adapters", "claims"):
        (folder / "output" / name).mkdir(parents=True)
    recipes = folder / "recipes"
    recipes.mkdir()
    for pair in MODE_PAIRS:
        recipe = yaml.safe_load((RECIPES / f"{pair}.yaml").read_text()) | TINY
        (recipes / f"{pair}.yaml").write_text(yaml.safe_dump(recipe))
    return Workplace(
        folder / "model",
        folder / "tasks.npz",
        folder / "output",
        "cpu",
        rows=1,
        batch_size=7,
        lengths=(170, 340),
        ruler_samples=1,
        recipes=recipes,
    )
