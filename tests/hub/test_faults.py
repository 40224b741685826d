"""What goes wrong on the way to the Hub and back: an error that says so, and nothing half done."""

import re

import numpy as np
import pytest
from hub.fake_hub import Fault


PREUPLOAD, COMMIT, OBJECT, WEIGHTS = "/preupload/", "/commit/", "^/objects/", "adapter_model.safetensors$"


def adapter_files(hub, repo_id):
    repo = hub.repos[repo_id]
    return sorted(path for path in repo.commits[repo.branches["main"]] if path != ".gitattributes")


def count(hub, method, path):
    return sum(m == method and re.search(path, p) is not None for m, p in hub.requests)


def test_a_push_without_a_valid_token_is_refused(client, hub):
    with pytest.raises(RuntimeError, match=r"HfHubHTTPError: .*401"):
        client("push", "user/no-token", token="hf_stranger")
    assert "user/no-token" not in hub.repos


def test_a_private_adapter_needs_a_token(client, hub):
    client("push", "user/hidden", private=True)
    with pytest.raises(RuntimeError, match=r"Can't find 'adapter_config\.json' at 'user/hidden'"):
        client("pull", "by_peft_model", "user/hidden", token=False)


@pytest.mark.parametrize("revision", [None, "0" * 40], ids=["repository", "revision"])
def test_what_is_not_on_the_hub_is_not_found(client, hub, revision):
    repo_id = "user/nowhere"
    if revision is not None:
        repo_id = "user/somewhere"
        client("push", repo_id)
    with pytest.raises(RuntimeError, match=f"Can't find 'adapter_config.json' at '{repo_id}'"):
        client("pull", "by_peft_model", repo_id, revision=revision)


@pytest.mark.parametrize(
    ("seed", "fault"),
    [(11, ("POST", PREUPLOAD, 429)), (12, ("PUT", OBJECT, 429)), (13, ("PUT", OBJECT, "drop"))],
    ids=["rate-limit-of-the-api", "rate-limit-of-the-storage", "connection-lost"],
)
def test_an_upload_is_tried_again(client, hub, seed, fault):
    hub.faults.append(Fault(*fault))
    client("push", f"user/again-{seed}", seed=seed)
    assert hub.faults[0].times == 0, "nothing went wrong"
    assert "adapter_model.safetensors" in adapter_files(hub, f"user/again-{seed}")


@pytest.mark.parametrize("kind", [429, "drop"], ids=["rate-limit", "dropped"])
def test_a_push_that_breaks_off_leaves_no_commit_and_can_be_repeated(client, hub, kind):
    repo_id = f"user/broken-{kind}"
    hub.faults.append(Fault("POST", COMMIT, kind))
    with pytest.raises(RuntimeError, match="429" if kind == 429 else "RemoteProtocolError"):
        client("push", repo_id)
    assert adapter_files(hub, repo_id) == []
    _, computed = client("push", repo_id)
    assert np.array_equal(client("pull", "by_peft_model", repo_id), computed)


@pytest.mark.parametrize("kind", [429, "drop", "cut"], ids=["rate-limit", "dropped", "cut-short"])
def test_a_download_is_tried_again(client, hub, kind):
    _, computed = client("push", f"user/download-{kind}", seed=20)
    hub.faults.append(Fault("GET", WEIGHTS, kind))
    assert np.array_equal(client("pull", "by_peft_model", f"user/download-{kind}"), computed)
    assert count(hub, "GET", WEIGHTS) == 2


@pytest.mark.parametrize("loader", ["by_peft_model", "by_load_adapter", "by_auto_peft"])
def test_a_corrupt_download_is_refused_until_it_is_forced_anew(client, hub, loader):
    repo_id = f"user/corrupt-{loader}"
    _, computed = client("push", repo_id, seed=30 + len(loader))
    hub.faults.append(Fault("GET", WEIGHTS, "corrupt"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"ValueError: `adapter_model\.safetensors` must have the sha256"):
            client("pull", loader, repo_id)
    assert np.array_equal(client("pull", "by_peft_model", repo_id, force_download=True), computed)


def test_weights_in_another_format_are_not_loaded_from_the_hub(client, hub):
    client("push", "user/pickled")
    repo = hub.repos["user/pickled"]
    files = repo.commits[repo.branches["main"]]
    files["adapter_model.bin"] = files.pop("adapter_model.safetensors")
    with pytest.raises(RuntimeError, match=r"ValueError: .* weights in another format are not loaded"):
        client("pull", "by_peft_model", "user/pickled")


def test_bad_figures_reach_no_hub(client, hub):
    with pytest.raises(RuntimeError, match=r"ValueError: `results\.json` must hold at least one row"):
        client("push", "user/bad-results", results={"tasks": []})
    assert "user/bad-results" not in hub.repos


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path_in_repo": "../elsewhere"}, "ValueError: "),
        ({"commit_message": ""}, "ValueError: `commit_message` must not be empty"),
        ({"results": {"tasks": [], "note": float("nan")}}, "ValueError: `results` must be what JSON can hold"),
    ],
    ids=["path", "message", "nan"],
)
def test_bad_arguments_reach_no_hub(client, hub, arguments, message):
    with pytest.raises(RuntimeError, match=message):
        client("push", "user/bad-arguments", **arguments)
    assert "user/bad-arguments" not in hub.repos


def test_only_elastic_adapters_are_pushed(client, hub):
    with pytest.raises(RuntimeError, match="ValueError: `model` must be a PeftModel whose active adapter is ELASTIC"):
        client("push_lora", "user/lora")
    assert "user/lora" not in hub.repos
