"""The newcomer's commands and the pinned versions."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read_pins(name):
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


@pytest.fixture(scope="module")
def pins():
    return read_pins("constraints.txt")


def make(*arguments):
    """Runs make as from a shell, also where the tests were started by a make with variables of its own."""
    given = ("MAKE", "MFLAGS", "VENV", "CONSTRAINTS", "ARGS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(given)}
    command = ["make", "-C", str(ROOT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", ["demo", "test", "test-compat", "quality", "docs"])
def test_help_lists_the_target(target):
    assert re.search(rf"^  make {target} ", make("help").stdout, flags=re.MULTILINE)


@pytest.mark.parametrize("extra", ["demo", "test", "quality", "docs"])
def test_each_target_installs_an_extra_that_exists(project, extra):
    assert f"'.[{extra}]'" in make("--dry-run", "--always-make", extra).stdout
    assert extra in project["optional-dependencies"]


def test_slow_and_gpu_tests_run_only_when_asked():
    assert '-m "not slow and not gpu"' in make("--dry-run", "test").stdout


def test_old_python_is_refused_in_one_line(tmp_path):
    old = tmp_path / "old-python"
    old.write_text('#!/bin/sh\nexec python3 -c "import sys; sys.version_info = (3, 9); exec(sys.argv[1])" "$2"\n')
    old.chmod(0o755)
    result = make(f"PYTHON={old}", f"VENV={tmp_path}/venv", f"{tmp_path}/venv/bin/pip")
    assert result.stderr.splitlines()[0] == f"elastic_peft needs Python 3.11 or newer, {old} is 3.9: set PYTHON="


def test_every_dependency_is_pinned_within_its_range(project, pins):
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    for requirement in map(Requirement, (line for group in groups for line in group)):
        if requirement.name in ("elastic_peft", "triton"):  # torch pins the triton that it was built with
            continue
        assert Version(pins[requirement.name]) in requirement.specifier, requirement.name


def test_compatibility_is_tested_at_the_lower_bounds(project, pins):
    bounds = {}
    for requirement in map(Requirement, project["dependencies"]):
        if requirement.name in ("transformers", "peft", "huggingface_hub"):
            (bound,) = (Version(part.version) for part in requirement.specifier if part.operator == ">=")
            bounds[requirement.name] = bound
    oldest = {name: Version(version) for name, version in read_pins("constraints-oldest.txt").items()}
    assert oldest == {name: Version(version) for name, version in pins.items()} | bounds


def test_compatibility_has_an_environment_of_its_own():
    commands = make("--dry-run", "--always-make", "test-compat").stdout
    assert ".venv-oldest/bin/python -m pytest" in commands
    assert "--constraint constraints-oldest.txt" in commands


def test_hooks_lint_with_the_pinned_ruff(pins):
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    assert set(re.findall(r"ruff==([\d.]+)", config)) == {pins["ruff"]}


def test_ci_runs_the_tests():
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "make test"
