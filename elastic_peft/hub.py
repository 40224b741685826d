"""Adapters on the Hugging Face Hub: pushing one with its card in one commit. Pulling is PEFT's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from huggingface_hub.constants import REPOCARD_NAME
from peft import PeftModel

from .card import PICTURE_NAME, render_card
from .config import ElasticConfig
from .context import RoutingRecord
from .report import routing_png
from .results import RESULTS_NAME


def push_to_hub(
    model: PeftModel,
    repo_id: str,
    *,
    results: Mapping[str, Any] | None = None,
    routing: RoutingRecord | Mapping[str, torch.Tensor] | None = None,
    license: str | None = None,
    path_in_repo: str | None = None,
    commit_message: str = "Upload ELASTIC adapter",
    commit_description: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> CommitInfo:
    """Puts the active adapter on the Hub in one commit: weights, configuration, card, figures and picture.

    The repository and the branch are made when they are missing. What needs no network comes first, so that bad
    arguments change nothing on the Hub; an interrupted push leaves no commit and can be repeated.

    Args:
        model: a `PeftModel` whose active adapter is ELASTIC.
        repo_id: `"user/name"`, or a name in the user's own namespace.
        results: figures for the card, saved as `results.json`; see `render_card`.
        routing: what the card's picture shows: a record from `last_routing`, or task name to bool `[N, L, H]`, True =
            sparse. `None`: no picture.
        license: licence of the adapter's weights, as the Hub names it, such as `"apache-2.0"`.
        path_in_repo: folder of the repository to write to; `None` is its root.
        commit_message: first line of the commit.
        commit_description: the rest of its message.
        private: make a new repository private; `None` leaves it to the account's setting.
        token: a token of the Hub; `None` takes the one that was stored by `hf auth login`.
        revision: branch to commit to; `None` is `"main"`.
        create_pr: open a pull request instead of committing to the branch.

    Returns:
        The commit, as `huggingface_hub.HfApi.create_commit` returns it.

    Raises:
        ValueError: `model` has no active ELASTIC adapter, or `results` or `routing` are not as described.
        ImportError: `routing` is given and matplotlib is not installed.
        huggingface_hub.errors.HfHubHTTPError: the Hub refuses.
    """
    if not commit_message:
        raise ValueError("`commit_message` must not be empty, got ''.")
    if not isinstance(model, PeftModel) or not isinstance(model.active_peft_config, ElasticConfig):
        raise ValueError(f"`model` must be a PeftModel whose active adapter is ELASTIC, got a {type(model).__name__}.")
    adapter_name, config = model.active_adapter, model.active_peft_config
    api = HfApi(token=token)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder, selected_adapters=[adapter_name])
        # PEFT saves an adapter of another name than "default" in a folder of that name.
        directory = Path(folder) if adapter_name == "default" else Path(folder, adapter_name)
        if results is not None:
            (directory / RESULTS_NAME).write_text(_as_json(results), encoding="utf-8")
        if routing is not None:
            _draw_routing(routing, sorted(config.num_key_value_heads or {}), directory / PICTURE_NAME)
        render = partial(render_card, directory, subfolder=path_in_repo, license=license)
        # Refuses what cannot be described or committed before anything changes on the Hub.
        render(repo_id=repo_id).save(directory / REPOCARD_NAME)
        _additions(directory, path_in_repo)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id  # now with the user's namespace
        render(repo_id=repo_id).save(directory / REPOCARD_NAME)
        if revision is not None and not create_pr and not revision.startswith("refs/pr/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        # `upload_folder` may spread its files over several commits.
        return api.create_commit(
            repo_id,
            _additions(directory, path_in_repo),
            commit_message=commit_message,
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )


def _additions(directory: Path, path_in_repo: str | None) -> list[CommitOperationAdd]:
    return [
        CommitOperationAdd(Path(path_in_repo or "", file.name).as_posix(), file)
        for file in sorted(directory.iterdir())
    ]


def _as_json(results: Mapping[str, Any]) -> str:
    try:
        return json.dumps(results, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`results` must be what JSON can hold, got one that it cannot: {error}.") from error


def _draw_routing(routing: RoutingRecord | Mapping[str, torch.Tensor], layers: list[int], path: Path) -> None:
    by_task = {"last prompts": routing.decisions} if isinstance(routing, RoutingRecord) else routing
    routing_png(by_task, path, layers=layers, title="How often each key-value head ran sparse")
