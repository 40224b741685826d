"""The recipe that is reproduced: one of the YAML files that `recipes/train_sft.py` trains with."""

from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from elastic_peft import ElasticConfig, ElasticSFTConfig


RECIPES = Path(__file__).parents[1] / "smollm2_135m"


class Recipe(NamedTuple):
    """The fields of `ElasticConfig` and of `ElasticSFTConfig` that a recipe sets."""

    config: dict[str, Any]
    arguments: dict[str, Any]


def read_recipe(folder: Path, mode_pair: str) -> Recipe:
    """A mode pair's recipe.

    Args:
        folder: of the recipes, `fa_ssa.yaml` and so on.
        mode_pair: one of `ElasticConfig`'s.
    """
    file = folder / f"{mode_pair.lower().replace('-', '_')}.yaml"
    options = yaml.safe_load(file.read_text(encoding="utf-8"))
    kinds = ({field.name for field in fields(kind)} for kind in (ElasticConfig, ElasticSFTConfig))
    return Recipe(*({name: value for name, value in options.items() if name in names} for names in kinds))
