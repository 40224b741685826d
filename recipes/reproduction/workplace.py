"""Where jobs run, what they read, and what they measure with."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from reproduction.examples import Example, load_examples
from reproduction.jobs import Job
from reproduction.measuring import Measured, measure
from reproduction.recipe import RECIPES, Recipe, read_recipe
from reproduction.training import load_base
from ruler_text import python_sources
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from elastic_peft.evaluation.ruler_prompt import Sources


@dataclass(frozen=True)
class Workplace:
    """Where jobs run and what they read.

    Args:
        model: folder of the backbone.
        data: file of the examples, see `reproduction.examples`.
        output: folder of the results and adapters.
        device: `"cpu"` or a CUDA device.
        rows: evaluation examples of each set.
        batch_size: rows of a measured batch.
        lengths: tokens of the examples that are made longer and shorter.
        ruler_samples: prompts of each of RULER's tasks.
        ruler_batch_tokens: tokens of a batch of RULER's prompts: several workers share a GPU.
        recipes: folder of the recipes.
    """

    model: Path
    data: Path
    output: Path
    device: str
    rows: int = 100
    batch_size: int = 8
    lengths: tuple[int, ...] = (1024, 2048, 8192)
    ruler_samples: int = 20
    ruler_batch_tokens: int = 2**18
    recipes: Path = RECIPES

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The backbone's tokenizer."""
        return AutoTokenizer.from_pretrained(self.model)

    @cached_property
    def training(self) -> dict[str, list[Example]]:
        """Training examples by set."""
        return load_examples(self.data, "train")

    @cached_property
    def evaluation(self) -> dict[str, list[Example]]:
        """Evaluation examples by set."""
        return load_examples(self.data, "eval")

    @cached_property
    def ruler_sources(self) -> Sources:
        """What RULER's prompts are made of."""
        return python_sources()

    def recipe(self, job: Job) -> Recipe:
        """The recipe of a job's mode pair, with what the job changes."""
        base = read_recipe(self.recipes, job.config.get("mode_pair", "FA-SSA"))
        return Recipe({**base.config, **job.config}, {**base.arguments, **job.arguments})

    def evaluation_rows(self) -> list[Example]:
        """The first evaluation examples of each set, set by set."""
        return [example for members in self.evaluation.values() for example in members[: self.rows]]

    def adapter(self, name: str) -> Path:
        """Folder of the adapter that a job trained."""
        return self.output / "adapters" / name

    def load(self, name: str) -> torch.nn.Module:
        """The backbone with the adapter that a job trained, in evaluation mode."""
        return PeftModel.from_pretrained(load_base(self.model, self.device), self.adapter(name)).eval()

    def measure(self, model: torch.nn.Module, examples: list[Example], forced: Any = None) -> dict[str, Any]:
        """Measures examples; the table, and what computed the prompts."""
        return summary(measure(model, examples, self.batch_size, forced))


def summary(measured: Measured) -> dict[str, Any]:
    """A result's entry for what was measured."""
    return {"implementations": list(measured.implementations), "tasks": measured.table()}
