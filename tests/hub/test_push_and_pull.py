"""Adapters go to the Hub in one commit and come back bit for bit, by every way to load one."""

import json

import numpy as np
import pytest
from huggingface_hub import ModelCard


RESULTS = {"tasks": [{"task": "code", "set": "code completion", "t": 1.0, "msr": 0.75, "esr": 0.5}]}


def commits(hub, repo_id):
    """First lines of the commits after the one that makes a repository."""
    return list(hub.repos[repo_id].messages.values())[1:]


def files(hub, repo_id, revision="main"):
    repo = hub.repos[repo_id]
    return {path: content for path, content in repo.commits[repo.find(revision)].items() if path != ".gitattributes"}


@pytest.fixture(scope="module")
def adapter(client):
    """Name of a repository with an adapter, and what its model computes."""
    _, computed = client("push", "user/adapter")
    return "user/adapter", computed


def test_a_push_is_one_commit_of_card_adapter_figures_and_picture(client, hub):
    client("push", "user/complete", with_routing=True, results=RESULTS)
    assert commits(hub, "user/complete") == ["Upload ELASTIC adapter"]
    pushed = files(hub, "user/complete")
    assert set(pushed) == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "results.json",
        "routing.png",
    }
    assert json.loads(pushed["results.json"]) == RESULTS
    assert pushed["routing.png"].startswith(b"\x89PNG")


def test_a_second_push_is_a_second_commit(client, hub):
    for message in ("first", "second"):
        client("push", "user/twice", commit_message=message)
    assert commits(hub, "user/twice") == ["first", "second"]


@pytest.mark.parametrize("private", [True, None], ids=["private", "unset"])
def test_a_new_repository_is_as_private_as_asked(client, hub, private):
    client("push", f"user/private-{private}", private=private)
    assert hub.repos[f"user/private-{private}"].private == bool(private)


def test_a_branch_is_made_and_leaves_main_alone(client, hub):
    client("push", "user/branched", revision="trial")
    assert "adapter_config.json" in files(hub, "user/branched", "trial")
    assert files(hub, "user/branched", "main") == {}


def test_a_name_without_a_namespace_is_the_users_own(client, hub):
    client("push", "bare")
    card = files(hub, "user/bare")["README.md"].decode()
    assert 'PeftModel.from_pretrained(base, "user/bare")' in card


def test_an_adapter_of_any_name_lies_where_peft_looks_for_it(client, hub):
    _, computed = client("push", "user/named", adapter_name="other")
    assert np.array_equal(client("pull", "by_peft_model", "user/named"), computed)


@pytest.mark.parametrize("loader", ["by_peft_model", "by_load_adapter", "by_auto_peft", "by_auto_model"])
def test_a_pull_is_bit_exact(client, adapter, loader):
    repo_id, computed = adapter
    assert np.array_equal(client("pull", loader, repo_id), computed)


@pytest.mark.parametrize("loader", ["by_peft_model", "by_load_adapter", "by_auto_peft"])
def test_a_pinned_revision_is_the_one_that_was_pushed(client, loader):
    repo_id = f"user/pinned-{loader}"
    first, computed = client("push", repo_id, seed=1)
    _, latest = client("push", repo_id, seed=2)
    assert not np.array_equal(computed, latest)
    assert np.array_equal(client("pull", loader, repo_id, revision=first), computed)
    assert np.array_equal(client("pull", loader, repo_id), latest)


def test_adapters_share_a_repository_in_subfolders(client):
    computed = {seed: client("push", "user/shared", seed=seed, path_in_repo=f"v{seed}")[1] for seed in (1, 2)}
    for seed, loader in ((1, "by_peft_model"), (2, "by_load_adapter")):
        assert np.array_equal(client("pull", loader, "user/shared", subfolder=f"v{seed}"), computed[seed])


@pytest.mark.parametrize("folder", [None, "deep/folder"], ids=["root", "subfolder"])
def test_the_lines_of_python_on_the_card_load_the_adapter(client, folder):
    repo_id = f"user/card-{'root' if folder is None else 'subfolder'}"
    _, computed = client("push", repo_id, path_in_repo=folder)
    assert np.array_equal(client("run_card", repo_id, subfolder=folder), computed)


def test_a_cached_adapter_loads_offline(client, hub, adapter):
    repo_id, computed = adapter
    client("pull", "by_peft_model", repo_id)
    hub.requests.clear()
    assert np.array_equal(client("pull_offline", "by_peft_model", repo_id), computed)
    assert hub.requests == []


def test_pefts_own_push_loads_but_writes_another_card(client, hub):
    _, computed = client("push", "user/by-peft", by_peft=True)
    assert np.array_equal(client("pull", "by_peft_model", "user/by-peft"), computed)
    assert ModelCard(files(hub, "user/by-peft")["README.md"].decode()).data.library_name == "transformers"


def test_pefts_own_push_keeps_a_card_that_is_there(client, hub):
    client("push", "user/kept")
    card = files(hub, "user/kept")["README.md"]
    _, computed = client("push", "user/kept", seed=2, by_peft=True)
    assert files(hub, "user/kept")["README.md"] == card
    assert np.array_equal(client("pull", "by_peft_model", "user/kept"), computed)
