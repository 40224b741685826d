"""The sweep: its command line, the tests before the measurement, and what becomes of the rows."""

import importlib
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import sweep
from benchmark import checkout_commit
from registry import OPERATORS, Operator


SHARED = {"hardware": "NVIDIA H200", "versions": {"torch": "2.11.0"}, "commit": "abc1234"}
GREEN = "import pytest\n\n\n@pytest.mark.gpu\ndef test_passes():\n    pass\n"
RED = GREEN.replace("pass\n", "assert False\n")


@pytest.fixture
def make_operator(tmp_path, monkeypatch):
    """Registers the one operator `fake`, with a test file of this text, and returns the lengths it was measured at."""

    def make(test):
        measured = []
        path = tmp_path / "test_fake.py"
        path.write_text(test)

        def rows(lengths):
            measured.extend(lengths)
            yield from ({"name": f"fake/{length}", "ours_ms": 1 / 3} for length in lengths)

        monkeypatch.setattr(sweep, "OPERATORS", {"fake": Operator((str(path),), (1, 2))})
        monkeypatch.setattr(sweep, "environment", lambda commit: SHARED | {"commit": commit})
        monkeypatch.setitem(sys.modules, "fake", SimpleNamespace(CONDITIONS="none", rows=rows))
        return measured

    return make


def run_sweep(tmp_path, *arguments):
    sweep.main([*arguments, "--output", str(tmp_path), "--commit", "abc1234"])
    return json.loads((tmp_path / "nvidia-h200" / "fake.json").read_text())


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_has_tests_that_need_a_gpu(name, root):
    for file in OPERATORS[name].tests:
        assert "pytest.mark.gpu" in (root / file).read_text(), f"{file} has no GPU tier"


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_has_a_module(name):
    module = importlib.import_module(name)
    assert callable(module.rows)
    assert isinstance(module.CONDITIONS, str)


@pytest.mark.parametrize(
    "arguments", [["unknown"], [], ["prefill", "--lengths", "3"]], ids=["operator", "none", "length"]
)
def test_command_line_refuses(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        sweep.main(arguments)
    assert stopped.value.code == 2, capsys.readouterr().err


def test_red_tests_end_the_sweep(make_operator, tmp_path):
    measured = make_operator(RED)
    with pytest.raises(SystemExit, match="not measured"):
        run_sweep(tmp_path, "fake")
    assert measured == []


def test_missing_tests_end_the_sweep(make_operator, tmp_path):
    measured = make_operator("")
    with pytest.raises(SystemExit, match="not measured"):
        run_sweep(tmp_path, "fake")
    assert measured == []


def test_green_tests_let_the_rows_be_written(make_operator, tmp_path):
    make_operator(GREEN)
    file = run_sweep(tmp_path, "fake")
    assert file == SHARED | {
        "conditions": "none",
        "rows": [{"name": "fake/1", "ours_ms": 0.333333}, {"name": "fake/2", "ours_ms": 0.333333}],
    }


def test_lengths_restrict_the_operator(make_operator, tmp_path, monkeypatch):
    measured = make_operator(GREEN)
    monkeypatch.setattr(sweep, "run_tests", lambda files: None)
    run_sweep(tmp_path, "fake", "--lengths", "2")
    assert measured == [2]


def test_tests_of_several_operators_run_once(make_operator, tmp_path, monkeypatch):
    make_operator(GREEN)
    runs = []
    monkeypatch.setattr(sweep, "run_tests", runs.extend)
    run_sweep(tmp_path, "fake", "fake")
    assert len(runs) == 1, "the same green file ran twice"


def test_rows_measured_before_a_crash_stay(make_operator, tmp_path, monkeypatch):
    make_operator(GREEN)
    monkeypatch.setattr(sweep, "run_tests", lambda files: None)

    def rows(lengths):
        yield {"name": "fake/1"}
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sys.modules["fake"], "rows", rows)
    with pytest.raises(RuntimeError, match="out of memory"):
        run_sweep(tmp_path, "fake")
    assert json.loads((tmp_path / "nvidia-h200" / "fake.json").read_text())["rows"] == [{"name": "fake/1"}]


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, ["old", "same"]),
        ({"commit": "def5678"}, ["same"]),
        ({"commit": "abc1234-dirty"}, ["same"]),
        ({"versions": {"torch": "2.12.0"}}, ["same"]),
        ({"hardware": "NVIDIA H100"}, ["same"]),
    ],
    ids=["same-environment", "commit", "changed-tree", "versions", "hardware"],
)
def test_rows_merge_only_within_one_environment(change, kept, tmp_path):
    path, shared = tmp_path / "fake.json", SHARED | change
    first = sweep.ResultFile(path, SHARED | ({"commit": shared["commit"]} if "dirty" in shared["commit"] else {}), "")
    first.add({"name": "old"})
    first.add({"name": "same", "ours_ms": 1.0})
    sweep.ResultFile(path, shared, "").add({"name": "same", "ours_ms": 2.0})
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == kept
    assert rows[-1]["ours_ms"] == 2.0


def test_commit_is_asked_for_without_git(monkeypatch, capsys):
    monkeypatch.setattr(sweep, "checkout_commit", lambda: None)
    with pytest.raises(SystemExit):
        sweep.main(["prefill"])
    assert "`--commit` must be given" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize(
    ("changed", "suffix"), [(None, ""), ("code.py", "-dirty"), ("benchmarks/results/rows.json", "")], ids=str
)
def test_commit_says_whether_code_changed(changed, suffix, tmp_path):
    def git(*arguments):
        command = ["git", "-c", "user.name=nobody", "-c", "user.email=nobody@example.org", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    folder = tmp_path / "benchmarks"
    (folder / "results").mkdir(parents=True)
    for name in ("code.py", "benchmarks/results/rows.json"):
        (tmp_path / name).write_text("before")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    if changed is not None:
        (tmp_path / changed).write_text("after")
    assert checkout_commit(folder) == git("rev-parse", "--short", "HEAD") + suffix


def test_commit_is_unknown_outside_a_checkout(tmp_path):
    assert checkout_commit(tmp_path) is None
