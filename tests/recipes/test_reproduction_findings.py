"""Bars: what the figures of made-up results say."""

import copy

import pytest
from recipes.reproduction_results import all_results, flat
from reproduction import findings
from reproduction.examples import SENSITIVE
from reproduction.jobs import REFERENCE
from reproduction.tables import row_of


@pytest.fixture
def results():
    return copy.deepcopy(all_results())


def bar(results, beginning):
    return next(row for row in findings.bars(results) if row["bar"].startswith(beginning))


def change(table, name, **figures):
    if "nll" in figures:
        figures["nll_by_example"] = [figures["nll"]] * 2
    row_of(table, name).update(figures)


def test_a_bar_takes_the_mean_of_the_seeds_with_its_spread(results):
    row = bar(results, "mean MSR of the question-answering sets")
    assert (row["measured"], row["std"]) == (pytest.approx(0.68), pytest.approx(0.01))
    assert row["reached"] == "yes"


@pytest.mark.parametrize("rise", [0.02, 0.04])
def test_nll_must_stay_near_full_attention(results, rise):
    full = row_of(results["bounds"]["masks"]["full"], "sqa_pkg")["nll"]
    for seed in range(3):
        change(results[f"fa-ssa-seed{seed}"], "sqa_pkg", nll=full + rise)
    row = bar(results, "sqa_pkg: NLL over full")
    assert row["measured"] == pytest.approx(rise)
    assert row["reached"] == ("yes" if rise < findings.MAX_SENSITIVE else "no")


def test_nll_rises_over_the_examples_that_both_measured(results):
    for seed in range(3):
        row_of(results[f"fa-ssa-seed{seed}"], "sqa_pkg")["nll_by_example"] = [3.0]
    row_of(results["bounds"]["masks"]["full"], "sqa_pkg")["nll_by_example"] = [2.5, 9.0]
    assert bar(results, "sqa_pkg: NLL over full")["measured"] == pytest.approx(0.5)


def test_static_masks_must_be_worse_on_the_sensitive_sets(results):
    assert bar(results, "static_learned")["reached"] == "yes"
    for job in ("masks-learned", "masks-learned-seed1", "masks-learned-seed2"):
        results[job]["masks"]["learned"] = {**results[REFERENCE], "mask": []}
    row = bar(results, "static_learned")
    assert row["measured"] < 0.1
    assert row["reached"] == "no"


def test_learned_masks_of_each_seed_are_in_the_bar_with_their_spread(results):
    table = results["masks-learned-seed2"]["masks"]["learned"]
    before = bar(results, "static_learned")["measured"]
    for name in SENSITIVE:
        change(table, name, nll=row_of(table, name)["nll"] + 0.3)
    row = bar(results, "static_learned")
    assert (row["measured"], row["std"]) == (pytest.approx(before + 0.1), pytest.approx(0.03**0.5))


def test_static_masks_measured_on_other_examples_are_no_bar(results):
    results["masks-learned"]["masks"]["learned"] = {**flat(0.75, count=3), "mask": []}
    ways = [row["bar"].partition(":")[0] for row in findings.bars(results) if row["bar"].startswith("static")]
    assert ways == ["static_random", "static_retrieval", "static_loss"]


def test_two_masks_for_two_kinds_of_sets_are_no_static_baseline_of_one(results):
    assert not [row for row in findings.bars(results) if row["bar"].startswith("static_category")]
