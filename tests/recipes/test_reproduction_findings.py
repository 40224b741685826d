"""Bars, and whether routing follows the task: what the figures of made-up results say."""

import copy

import pytest
from recipes.reproduction_results import all_results, flat
from reproduction import findings
from reproduction.examples import SENSITIVE, TASKS
from reproduction.jobs import REFERENCE
from reproduction.tables import row_of


@pytest.fixture
def results():
    return copy.deepcopy(all_results())


def bar(results, beginning):
    return next(row for row in findings.bars(results) if row["bar"].startswith(beginning))


def verdict(results, name, condition):
    rows = findings.generalisation(results)
    return next(row["follows"] for row in rows if (row["set"], row["condition"]) == (name, condition))


def change(table, name, **figures):
    if "nll" in figures:
        figures["nll_by_example"] = [figures["nll"]] * 2
    row_of(table, name).update(figures)


# Bars


def test_a_bar_takes_the_mean_of_the_seeds_with_its_spread(results):
    row = bar(results, "mean MSR of the sensitive sets")
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


# Generalisation


def test_every_condition_is_judged_on_each_of_its_sets(results):
    conditions = [row["condition"] for row in findings.generalisation(results)]
    assert {condition: conditions.count(condition) for condition in conditions} == {
        "left out of training": len(TASKS),
        "unseen phrasings": len(TASKS),
        "left out of training, more words in training": 3,
        "unseen phrasings, more words in training": len(TASKS),
        f"left out of training{findings.OTHER_TASKS}": len(TASKS),
        f"unseen phrasings{findings.OTHER_TASKS}": len(TASKS),
        "1024 tokens": len(TASKS),
    }


@pytest.mark.parametrize(
    ("shift", "expected"), [(-0.3, "task"), (0.07, "task"), (0.1, "template (MSR)")], ids=["away", "near", "across"]
)
def test_a_sensitive_set_must_not_run_as_sparse_as_the_robust_ones(results, shift, expected):
    # 0.16 lie between the two kinds.
    results["without-sqa_pkg"] = {**results["without-sqa_pkg"], **copy.deepcopy(results["fa-ssa-seed1"])}
    change(results["without-sqa_pkg"], "sqa_pkg", msr=0.68 + shift)
    assert verdict(results, "sqa_pkg", "left out of training") == expected


@pytest.mark.parametrize("condition", ["left out of training", "unseen phrasings"])
def test_trainings_on_other_tasks_too_are_compared_with_their_own_kind(results, condition):
    for seed in range(3):
        change(results[f"crossed-seed{seed}"], "sqa_pkg", msr=0.5)
    rows = findings.generalisation(results)
    compared = {row["condition"]: row["MSR trained"] for row in rows if row["set"] == "sqa_pkg"}
    assert compared[f"{condition}{findings.OTHER_TASKS}"] == pytest.approx(0.5)
    assert compared[condition] == pytest.approx(0.68)


def test_without_a_training_of_their_kind_on_every_set_they_are_not_judged(results):
    kept = {name: result for name, result in results.items() if not name.startswith("crossed-seed")}
    assert not [row for row in findings.generalisation(kept) if findings.OTHER_TASKS in row["condition"]]


def test_a_robust_set_must_not_run_as_full_as_the_sensitive_ones(results):
    change(results["without-code_stdlib"], "code_stdlib", msr=0.7)
    assert verdict(results, "code_stdlib", "left out of training") == "template (MSR)"


def test_a_set_must_not_lose_more_than_where_it_was_trained_on(results):
    table = results[f"{REFERENCE}-lengths"]["lengths"]["1024"]["routed"]
    change(table, "code_stdlib", nll=row_of(table, "code_stdlib")["nll"] + 0.2)
    assert verdict(results, "code_stdlib", "1024 tokens") == "length (NLL)"


def test_unseen_phrasings_are_compared_with_full_attention_on_the_same_prompts(results):
    results["unseen-phrasings"]["unseen"]["full"] = flat(1.0)
    measured = findings.unseen_phrasings(results)
    assert all(measured[name].rise < -1 for name in SENSITIVE)


def test_the_length_of_training_is_among_the_lengths(results):
    assert list(findings.by_length(results)) == [1024, findings.TRAINED_LENGTH]
