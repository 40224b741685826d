"""Whether routing follows the task: what the figures of made-up results say, and how they are told."""

import copy

import pytest
from recipes.reproduction_results import all_results, flat
from reproduction import generalisation
from reproduction.examples import SENSITIVE, TASKS
from reproduction.generalisation import LEFT_OUT, ONE_TASK, RECIPE, UNSEEN, VARIED
from reproduction.generalisation_tables import explain, long_rows, pivot
from reproduction.jobs import REFERENCE
from reproduction.tables import row_of


@pytest.fixture
def results():
    return copy.deepcopy(all_results())


def judge(results, name, prompts, training=RECIPE):
    judged = generalisation.judgements(results)
    return next(one for one in judged if (one.set, one.prompts, one.training) == (name, prompts, training))


def change(table, name, **figures):
    if "nll" in figures:
        figures["nll_by_example"] = [figures["nll"]] * 2
    row_of(table, name).update(figures)


def full(results, name):
    return row_of(results["bounds"]["masks"]["full"], name)["nll"]


# Judgements


def test_every_condition_is_judged_on_each_of_its_sets(results):
    rows = long_rows(generalisation.judgements(results))
    assert {condition: len(of_condition) for condition, of_condition in rows.items()} == {
        "left out of training": len(TASKS),
        "unseen phrasings": len(TASKS),
        "1K tokens": len(TASKS),
        "left out of training; training had one task a document": len(TASKS),
        "unseen phrasings; training had one task a document": len(TASKS),
        "left out of training; training had one task a document and more wordings of the instructions": 3,
        "unseen phrasings; training had one task a document and more wordings of the instructions": len(TASKS),
    }


@pytest.mark.parametrize(
    ("shift", "expected"), [(-0.3, "task"), (0.07, "task"), (0.1, "template")], ids=["away", "near", "across"]
)
def test_a_sensitive_set_must_not_run_as_sparse_as_the_robust_ones(results, shift, expected):
    # 0.16 lie between the two kinds.
    change(results["without-sqa_pkg"], "sqa_pkg", msr=0.68 + shift)
    assert judge(results, "sqa_pkg", LEFT_OUT).follows == expected


def test_a_robust_set_must_not_run_as_full_as_the_sensitive_ones(results):
    change(results["without-code_stdlib"], "code_stdlib", msr=0.7)
    assert judge(results, "code_stdlib", LEFT_OUT).follows == "template"


def test_routing_that_changes_with_the_length_follows_that(results):
    change(results[f"{REFERENCE}-lengths"]["lengths"]["1024"]["routed"], "code_stdlib", msr=0.7)
    assert judge(results, "code_stdlib", "1K tokens").follows == "length"


@pytest.mark.parametrize(
    ("trained", "rise", "loses"),
    [(-0.3, -0.05, False), (-0.3, 0.05, False), (-0.3, 0.15, True), (0.1, 0.15, False), (0.1, 0.25, True)],
    ids=["still-below-full", "near-full", "above-full", "hardly-grown", "grown"],
)
def test_nll_is_lost_where_it_is_above_full_attention_and_has_grown(results, trained, rise, loses):
    for seed in range(3):
        change(results[f"fa-ssa-seed{seed}"], "code_stdlib", nll=full(results, "code_stdlib") + trained)
    change(results["without-code_stdlib"], "code_stdlib", nll=full(results, "code_stdlib") + rise)
    one = judge(results, "code_stdlib", LEFT_OUT)
    assert one.loses == loses
    assert one.follows == "task"


@pytest.mark.parametrize("training", [ONE_TASK, VARIED], ids=lambda training: training.prefix)
@pytest.mark.parametrize("prompts", [LEFT_OUT, UNSEEN])
def test_trainings_on_one_task_a_document_are_judged_beside_their_own_kind(results, prompts, training):
    for seed in range(3):
        change(results[f"one-task-seed{seed}"], "sqa_pkg", msr=0.5)
    assert judge(results, "sqa_pkg", prompts, training).trained.msr == pytest.approx(0.5)
    assert judge(results, "sqa_pkg", prompts).trained.msr == pytest.approx(0.68)


def test_without_a_training_of_their_kind_on_every_set_they_are_not_judged(results):
    kept = {name: result for name, result in results.items() if not name.startswith("one-task-seed")}
    assert {one.training for one in generalisation.judgements(kept)} == {RECIPE}


def test_unseen_phrasings_are_compared_with_full_attention_on_the_same_prompts(results):
    results["unseen-phrasings"]["unseen"]["full"] = flat(1.0)
    measured = generalisation.unseen_phrasings(results)
    assert all(measured[name].rise < -1 for name in SENSITIVE)


def test_the_length_of_training_is_among_the_lengths(results):
    assert list(generalisation.by_length(results)) == [1024, generalisation.TRAINED_LENGTH]


# Tables and words


def test_the_pivot_has_a_row_a_set_and_a_column_for_each_kind_of_prompts(results):
    rows = pivot(generalisation.judgements(results))
    assert [row["set"] for row in rows] == list(TASKS)
    assert all(list(row) == ["set", "as trained", LEFT_OUT, UNSEEN, "1K tokens"] for row in rows)


def test_a_cell_of_the_pivot_shows_what_strayed(results):
    table = results["without-sqa_pkg"]
    cells = {}
    for strays, msr in ((False, 0.68), (True, 0.9)):
        for loses, rise in ((False, 0.04), (True, 0.4)):
            change(table, "sqa_pkg", msr=msr, nll=full(results, "sqa_pkg") + rise)
            (row,) = (row for row in pivot(generalisation.judgements(results)) if row["set"] == "sqa_pkg")
            cells[strays, loses] = row[LEFT_OUT]
    # As trained these results are above full attention by 0.12.
    assert cells == {
        (False, False): "0.68, +0.04",
        (False, True): "0.68, **+0.40**",
        (True, False): "**0.90**, +0.04",
        (True, True): "**0.90**, **+0.40**",
    }


def test_a_set_that_was_not_measured_has_an_empty_cell(results):
    ways = results[f"{REFERENCE}-lengths"]["lengths"]["1024"]
    for table in ways.values():
        table["tasks"] = [row for row in table["tasks"] if row["set"] != "summ_rfc"]
    cells = {row["set"]: row["1K tokens"] for row in pivot(generalisation.judgements(results))}
    assert [name for name, cell in cells.items() if cell is None] == ["summ_rfc"]


def test_the_words_count_the_sets(results):
    for name in ("sqa_pkg", "sqa_foldoc"):
        change(results[f"without-{name}"], name, msr=0.9)
    change(results["unseen-phrasings"]["unseen"]["routed"], "sqa_pkg", nll=9.0)
    text = explain(generalisation.judgements(results))
    assert "The routing of 2 of 7 then follows the template of the prompts" in text
    assert "and not the task; 0 of 7 lose NLL." in text
    assert "follows the task: unseen phrasings, 7 of 7; 1K tokens, 7 of 7. 1 of these lose NLL." in text


COMPARED = {"": "other tasks over the same documents", "varied-": "more wordings of the instructions"}


def comparisons(results):
    """The paragraphs that compare a training with one on one task a document."""
    paragraphs = explain(generalisation.judgements(results)).split("\n\n")
    return [paragraph for paragraph in paragraphs if paragraph.startswith("Training with")]


def without(results, *beginnings):
    return {name: result for name, result in results.items() if not name.startswith(beginnings)}


@pytest.mark.parametrize(("gain", "verdict", "lost"), [(0.05, "did not help", 3), (0.55, "helped", 0)])
@pytest.mark.parametrize("prefix", COMPARED, ids=["recipe", "varied"])
def test_a_training_helps_where_sets_left_out_lose_less_than_on_one_task_a_document(
    results, prefix, gain, verdict, lost
):
    strayed = ("sqa_foldoc", "sqa_pkg", "mhop_wordnet")
    results = without(results, *(f"without-{name}" for name in TASKS if name not in strayed))
    for name in strayed:
        change(results[f"one-task-without-{name}"], name, nll=full(results, name) + 0.6)
        change(results[f"{prefix}without-{name}"], name, nll=full(results, name) + 0.6 - gain)
    (text,) = (text for text in comparisons(results) if text.startswith(f"Training with {COMPARED[prefix]}"))
    assert f", one seed each, {verdict}; in brackets without them. " in text
    assert (
        f"Where their set was left out, 0 of 3 sets follow the template (0 of 3) and {lost} of 3 lose NLL (3 of 3); "
        f"NLL over full, mean of these sets, is +{0.6 - gain:.2f} (+0.60)." in text
    )


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        ("varied-", [""]),
        ("varied-without", [""]),
        ("without", ["varied-"]),
        ("one-task-", []),
        ("one-task-without", []),
    ],
)
def test_a_comparison_without_one_of_its_sides_is_not_told(results, gone, told):
    texts = comparisons(without(results, gone))
    assert len(texts) == len(told)
    assert all(text.startswith(f"Training with {COMPARED[prefix]}") for text, prefix in zip(texts, told))


@pytest.mark.parametrize("gone", ["unseen-phrasings", "one-task-phrasings"])
def test_a_comparison_without_unseen_phrasings_is_of_sets_left_out(results, gone):
    text = comparisons(without(results, gone))[0]
    assert "Where their set was left out, " in text
    assert "Where the phrasing is new" not in text


def test_without_full_attention_nothing_is_judged(results):
    del results["bounds"]
    judged = generalisation.judgements(results)
    assert (judged, pivot(judged), explain(judged)) == ([], [], "")


def test_how_far_the_kinds_are_apart_is_told_where_every_set_was_judged(results):
    said = "On sets that training held, the kinds are 0.16 of MSR apart (0.16)."
    assert said in comparisons(results)[0]
    others = without(results, "unseen-phrasings", "without-sqa_pkg", f"{REFERENCE}-lengths")
    assert said not in comparisons(others)[0]
