"""What is read of a saved adapter before a model is there: its configuration, and whether its decisions are fixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from peft import PeftConfig
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open

from .config import ElasticConfig
from .static_router import is_static


#: Why a file of the Hub was not read, by the error's class.
UNREAD = {
    RepositoryNotFoundError: "there is no such repository, or it needs a token",
    RevisionNotFoundError: "it has no such revision",
    LocalEntryNotFoundError: "it is not in the cache, and the Hub cannot be reached",
    OfflineModeIsEnabled: "it is not in the cache, and the Hub cannot be reached",
    EntryNotFoundError: f"it has no {CONFIG_NAME} there",
}


def read_config(adapter: str | Path, *, revision: str | None = None, subfolder: str | None = None) -> ElasticConfig:
    """The configuration of a saved ELASTIC adapter, whose weights are there and readable.

    Args:
        adapter: folder of the adapter, or its repository on the Hub.
        revision: branch, tag or commit of the repository; `None` is `"main"`.
        subfolder: folder of the adapter in there.

    Returns:
        The configuration.

    Raises:
        ValueError: there is no adapter, or one of another kind; its configuration or its weights are damaged.
    """
    folder = Path(adapter, subfolder or "")
    # PEFT would look for a folder without a configuration on the Hub.
    if Path(adapter).exists():
        if not (folder / CONFIG_NAME).is_file():
            raise ValueError(f"`adapter` must hold a saved adapter, got {str(folder)!r} without {CONFIG_NAME}.")
        if revision is not None:
            raise ValueError(f"`revision` must not be given for a folder, got {revision!r}.")
    else:
        _check_is_repo_id(adapter)
    place: dict[str, Any] = {"revision": revision, "subfolder": subfolder}
    try:
        config = PeftConfig.from_pretrained(adapter, **place)
        if isinstance(config, ElasticConfig):
            config = ElasticConfig.from_pretrained(adapter, **place)  # checks the weights too
    except ValueError as error:
        if reason := next((words for kind, words in UNREAD.items() if isinstance(error.__cause__, kind)), None):
            raise ValueError(f"`adapter` {str(adapter)!r} cannot be read from the Hub: {reason}.") from error
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            raise ValueError(f"`adapter` must have a readable {CONFIG_NAME}, got {error!r}.") from error
        raise
    except (AttributeError, KeyError, TypeError) as error:
        # PEFT takes the form of the file for granted.
        raise ValueError(f"`adapter` must have a readable {CONFIG_NAME}, got {error!r}.") from error
    if not isinstance(config, ElasticConfig):
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise ValueError(f"`adapter` must be an ELASTIC adapter, got one of type {kind}.")
    heads = config.num_key_value_heads
    if config.head_dim is None or not heads:
        raise ValueError(
            f"`adapter` must note its base model's `head_dim` and `num_key_value_heads` in {CONFIG_NAME}, got "
            f"{config.head_dim!r} and {heads!r}."
        )
    return config


def has_fixed_decisions(directory: Path) -> bool:
    """Whether the adapter's decisions are fixed, as those of a converted head pattern."""
    with safe_open(directory / SAFETENSORS_WEIGHTS_NAME, framework="pt") as weights:
        deviations = [name for name in weights.keys() if name.endswith("standardizer.deviation")]  # noqa: SIM118
        return bool(deviations) and all(is_static(weights.get_tensor(name)) for name in deviations)


def _check_is_repo_id(adapter: str | Path) -> None:
    try:
        validate_repo_id(str(adapter))
    except HFValidationError as error:
        raise ValueError(
            f"`adapter` must be a folder that exists or a repository on the Hub, got {str(adapter)!r}."
        ) from error
