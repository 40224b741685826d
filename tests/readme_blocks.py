"""README's commands, and its Python run as a reader would run it.

Run as a program it executes the blocks of Python one after the other, in the current folder, where `base/` is a model
with its tokenizer. It is a program because huggingface_hub reads `HF_ENDPOINT` on import.
"""

import re
import shlex
from pathlib import Path


README = Path(__file__).parents[1] / "README.md"
WORDS = [f"w{i}" for i in range(90)]
# One step on a CPU stands in for hours on a GPU.
SHORTENED = {"max_steps=300": "max_steps=1, use_cpu=True"}


def blocks(language):
    """The text of each fenced block of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands():
    """Each command of the blocks of bash, without its comment."""
    lines = "\n".join(blocks("bash")).splitlines()
    return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]


class ReadersNames(dict):
    """What README leaves to its reader: `base`, a fresh model each time that it is read, `dataset` and `inputs`."""

    def __missing__(self, name):
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer

        text = " ".join(WORDS)
        if name == "base":
            return AutoModelForCausalLM.from_pretrained("base")
        if name == "dataset":
            row = {"prompt": text, "completion": " w1 w2", "task": "code"}
            return Dataset.from_list([row] * 8)
        if name == "inputs":
            return AutoTokenizer.from_pretrained("base")(text, return_tensors="pt", return_token_type_ids=False)
        raise KeyError(name)


def run_python():
    """Runs the blocks of Python in order, each with the names of those before it."""
    source = "\n".join(blocks("python"))
    for long, short in SHORTENED.items():
        if long not in source:
            raise ValueError(f"`SHORTENED` must name what README says, got {long!r}.")
        source = source.replace(long, short)
    exec(compile(source, README.name, "exec"), {}, ReadersNames())


if __name__ == "__main__":
    run_python()
