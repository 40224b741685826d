"""How candidates are timed and compared, without a GPU."""

import benchmark
import pytest
import torch
from benchmark import Times, compare, require_agreement, time_runs


def test_not_a_number_is_not_timed():
    with pytest.raises(RuntimeError, match="not timed: fa2"):
        require_agreement("fa2", torch.tensor([torch.nan]), torch.ones(1))


def test_speedup_is_baseline_over_ours():
    row = compare("a/b", Times([1.0, 2.0, 3.0], "graph"), "cudnn", Times([8.0], "events"), ratio=1)
    assert row == {
        "name": "a/b",
        "ours_ms": 2.0,
        "ours_20": 1.4,
        "ours_80": 2.6,
        "baseline": "cudnn",
        "baseline_ms": 8.0,
        "baseline_20": 8.0,
        "baseline_80": 8.0,
        "speedup": 4.0,
        "timed_by": "graph",
        "baseline_timed_by": "events",
        "ratio": 1,
    }


def test_rounds_alternate(monkeypatch):
    order = []
    monkeypatch.setattr(benchmark, "milliseconds", lambda run, repeats: run() and [1.0])
    runs = {name: lambda name=name: order.append(name) for name in ("ours", "theirs")}
    times = time_runs(runs, repeats=1, rounds=2)
    assert order == ["ours", "theirs", "ours", "theirs"]
    assert [x.timed_by for x in times.values()] == ["events", "events"]


def test_times_are_those_of_one_launch(monkeypatch):
    monkeypatch.setattr(benchmark, "capture", lambda run, launches: lambda: None)
    monkeypatch.setattr(benchmark, "milliseconds", lambda run, repeats: [5.0] * repeats)
    assert time_runs({"ours": None}, repeats=1, rounds=1, launches=10)["ours"] == Times([0.5], "graph")


def test_a_candidate_that_cannot_be_captured_is_launched(monkeypatch):
    launched = []
    monkeypatch.setattr(benchmark, "capture", lambda run, launches: None)
    monkeypatch.setattr(benchmark, "milliseconds", lambda run, repeats: [5.0 if run() else 0.0])
    times = time_runs({"fa4": lambda: launched.append(1)}, repeats=1, rounds=1, launches=10)
    assert len(launched) == 10
    assert times["fa4"] == Times([0.5], "events")
