"""The kernels as a build on the Kernel Hub: what it holds, that it computes the same, and how it is asked for."""

import ast
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hub.client import operators_from
from hub.fake_hub import Repo
from hub.kernel_build import KERNELS, PACKAGE, SETTINGS, build_files, write_build
from huggingface_hub import ModelCard
from kernels import get_local_kernel
from ops.operator_calls import CALLS
from peft import get_peft_model

import elastic_kernels
from elastic_peft import operators


COMMIT = "0123456789abcdef0123456789abcdef01234567"
SOURCE = f"hub:user/kernels@{COMMIT}"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The package from a build, beside the installed one."""
    folder = tmp_path_factory.mktemp("build")
    write_build(folder, "loaded")
    return get_local_kernel(folder)


@pytest.fixture
def put_on_hub(hub):
    """Makes a kernel repository with one commit; returns what names it."""

    def put(repo_id, files):
        hub.repos[repo_id] = repo = Repo(repo_id, private=False)
        return f"{repo_id}@{repo.commit('main', files, 'build')}"

    return put


def test_the_build_file_is_one():
    from kernels._rust import Build  # only releases from 0.17 on have what kernel-builder reads it with

    assert {str(backend) for backend in Build.open(KERNELS).general.backends} == set(SETTINGS["general"]["backends"])


def test_the_build_file_names_what_is_asked_for():
    assert (SETTINGS["general"]["name"], SETTINGS["general"]["version"]) == (operators.NAME, operators.VERSION)


def test_the_card_names_every_operator():
    card = ModelCard((KERNELS / "CARD.md").read_text(encoding="utf-8"))
    assert card.data.library_name == "kernels"
    assert card.data.license == SETTINGS["general"]["license"].lower()
    described = set(re.findall(r"^\| `(\w+)`", card.text, flags=re.MULTILINE))
    assert described == {name for name in elastic_kernels.__all__ if name[0].islower()}


def test_the_card_shows_a_call_that_works(loaded, monkeypatch):
    code = (KERNELS / "CARD.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    monkeypatch.setattr("kernels.get_kernel", lambda repo_id, **options: loaded)
    names = {}
    exec(code.replace("cuda", "cpu").replace("{{version}}", str(operators.VERSION)), names)
    assert names["output"].shape == names["query"].shape


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_package_does_not_import_itself_by_name(path):
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert PACKAGE.name not in {name.split(".")[0] for name in names}


@pytest.mark.parametrize("name", CALLS)
def test_a_build_computes_what_the_installed_package_does(loaded, name):
    arguments, options = CALLS[name]
    outputs = [getattr(package, name)(*arguments, **options) for package in (loaded, elastic_kernels)]
    if name == "block_selection":
        outputs = [output.to_mask() for output in outputs]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are either interpreted or compiled")
def test_kernels_of_a_build_compute_what_the_installed_ones_do(loaded):
    arguments, options = CALLS["routed_attention"]
    options = {**options, "mode_pair": "FA-SSA", "kept_blocks": None, "implementation": "triton"}
    outputs = [package.routed_attention(*arguments, **options) for package in (loaded, elastic_kernels)]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


def test_a_build_registers_its_operators_under_its_own_name(loaded):
    assert loaded.__name__ != elastic_kernels.__name__
    for package in (loaded, elastic_kernels):
        namespaces = {
            op._opoverload.namespace for op in vars(package._compiled).values() if hasattr(op, "_opoverload")
        }
        assert namespaces == {package.__name__}


@pytest.mark.parametrize("source", [None, ""], ids=["unset", "empty"])
def test_without_a_source_the_installed_package_is_used(monkeypatch, source):
    with operators_from(source or ""):
        if source is None:
            monkeypatch.delenv(operators.VARIABLE)
        assert operators.routed_attention is elastic_kernels.routed_attention
        assert operators.describe("triton") == "triton"


def test_a_model_runs_on_kernels_from_the_hub_and_says_so(client, put_on_hub):
    source = put_on_hub("user/kernels", build_files("hub"))
    implementation, computed, expected = client("route_on", f"hub:{source}")
    assert implementation == f"triton of {source}"
    np.testing.assert_allclose(computed, expected, rtol=1e-4, atol=1e-4)


def test_downloaded_kernels_need_no_network(client, hub, put_on_hub):
    source = put_on_hub("user/cached", build_files("cached"))
    package, place = client("load_operators", f"hub:{source}")
    assert package.startswith("_elastic_kernels_")
    assert place == f"kernels of {source}"
    hub.repos.pop("user/cached")
    assert client("load_operators", f"hub:{source}", offline=True) == (package, place)


@pytest.mark.parametrize("repo_id", ["user/no-kernels", "user/empty-kernels"], ids=["repository", "commit"])
def test_what_is_not_on_the_hub_is_refused(client, put_on_hub, repo_id):
    put_on_hub("user/empty-kernels", {})
    source = f"hub:{repo_id}@{COMMIT}"
    message = f"ValueError: `ELASTIC_PEFT_KERNELS` must name kernels that can be loaded, got '{source}': .*404"
    with pytest.raises(RuntimeError, match=message) as caught:
        client("load_operators", source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    ["user/kernels", f"user/kernels@{COMMIT}", "hub:user/kernels", "hub:user/kernels@main", f"hub:kernels@{COMMIT}"],
    ids=["no scheme, no commit", "no scheme", "no commit", "branch", "no owner"],
)
def test_a_source_must_name_one_commit(source):
    message = rf"`ELASTIC_PEFT_KERNELS` must be hub:owner/repository@commit, .* got '{source}'"
    with operators_from(source), pytest.raises(ValueError, match=message):
        operators.load()


def test_a_refused_source_is_refused_again_and_leaves_the_model_alone(make_base, make_config):
    base = make_base()
    names = [name for name, _ in base.named_modules()]
    with operators_from("main"):
        for _ in range(2):
            with pytest.raises(ValueError, match="`ELASTIC_PEFT_KERNELS` must be"):
                get_peft_model(base, make_config())
    assert [name for name, _ in base.named_modules()] == names


def test_a_source_needs_the_package_kernels(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    message = r"`ELASTIC_PEFT_KERNELS` needs the package kernels .*: pip install 'elastic_peft\[hub-kernels\]'"
    with operators_from(SOURCE), pytest.raises(ImportError, match=message):
        operators.load()


@pytest.mark.parametrize(
    ("metadata", "holds"),
    [({"version": 2}, "elastic-kernels version 2"), ({"name": "relu"}, "relu version 1")],
    ids=["version", "name"],
)
def test_a_build_of_something_else_is_refused(client, put_on_hub, metadata, holds):
    source = put_on_hub(f"user/other-{next(iter(metadata))}", build_files("other", **metadata))
    message = f"must name a build of elastic-kernels version 1, got 'hub:{source}', a build of {holds}"
    with pytest.raises(RuntimeError, match=message):
        client("load_operators", f"hub:{source}")


def test_a_build_that_cannot_be_imported_is_refused(client, put_on_hub):
    files = build_files("broken")
    source = put_on_hub(
        "user/broken", {path: b"1 / 0" if path.endswith("__init__.py") else c for path, c in files.items()}
    )
    with pytest.raises(RuntimeError, match=f"got 'hub:{source}': ZeroDivisionError: division by zero"):
        client("load_operators", f"hub:{source}")


def test_a_build_without_one_of_the_operators_is_refused(client, put_on_hub):
    files = build_files("partial")
    without = b"from .routed_attention import routed_attention\n"
    files = {
        path: without if path.count("/") == 2 and path.endswith("__init__.py") else c for path, c in files.items()
    }
    source = put_on_hub("user/partial", files)
    message = f"ValueError: `ELASTIC_PEFT_KERNELS` must name a build with every operator, got 'hub:{source}'"
    with pytest.raises(RuntimeError, match=message):
        client("load_operators", f"hub:{source}")


def test_threads_that_need_the_operators_at_once_load_them_once(monkeypatch):
    loads = []

    def slow_load(source):
        loads.append(source)
        time.sleep(0.05)
        return "elastic_kernels"

    def first_use(_):
        return operators.router, operators.describe("triton")

    with operators_from(SOURCE), ThreadPoolExecutor(4) as threads:
        monkeypatch.setattr(operators, "load_from_hub", slow_load)
        found = list(threads.map(first_use, range(4)))
        monkeypatch.undo()
    assert loads == [SOURCE]
    assert set(found) == {(elastic_kernels.router, f"triton of {SOURCE.removeprefix('hub:')}")}
