"""What the jobs measured, gathered: `results.json` as cards read it, tables, pictures."""

import json
import re
from pathlib import Path
from statistics import stdev

import pytest
from recipes.reproduction_results import FULL, LAYERS, all_results, flat, write_all
from reproduction import collect, readme, tables
from reproduction.examples import TASKS
from reproduction.jobs import REFERENCE, UNCHANGED, all_jobs
from reproduction.results import read_all, write_result
from reproduction.run import refuse_other_recipes
from reproduction.words import CHOSEN, SETS
from reproduction.workplace import Workplace

from elastic_peft.card import render_card


MEASURED = Path(collect.__file__).parent / "results"


@pytest.fixture(scope="module")
def results():
    return all_results()


def test_the_committed_tables_are_of_the_committed_jobs():
    assert (MEASURED / "tables.md").read_text(encoding="utf-8") == collect.tables_text(read_all(MEASURED))


def test_the_committed_results_are_of_jobs_by_their_recipes():
    assert {file.stem for file in (MEASURED / "jobs").iterdir()} <= {job.name for job in all_jobs()}
    refuse_other_recipes(Workplace(Path(), Path(), MEASURED, "cpu"), all_jobs())


def test_the_results_beside_adapters_are_of_the_committed_jobs():
    for pair, record in readme.read_records(readme.CARDS).items():
        collected = collect.pair_results(read_all(MEASURED), pair, record["commit"])
        assert record == json.loads(json.dumps(collected)), pair


def row_of(record, name):
    return next(row for row in record["tasks"] if row["set"] == name)


def test_figures_are_means_over_the_seeds_with_their_spread(results):
    row = row_of(collect.pair_results(results, "fa-ssa", None), "sqa_pkg")
    shares = [0.67, 0.68, 0.69]
    assert row["msr"] == {"mean": pytest.approx(0.68), "std": pytest.approx(stdev(shares))}
    assert row["nll"]["routed"]["mean"] == pytest.approx(sum(3.1 - 0.8 + 2 * share**2 for share in shares) / 3)


def test_every_way_of_running_has_its_figure(results):
    row = row_of(collect.pair_results(results, "fa-ssa", None), "sqa_pkg")
    statics = ["static_random", "static_retrieval", "static_loss", "static_learned", "static_category"]
    assert list(row["nll"]) == list(row["accuracy"]) == ["full", "all_sparse", "routed", *statics]
    assert row["nll"]["full"] == pytest.approx(FULL["sqa_pkg"])
    assert row["nll"]["static_learned"]["mean"] == pytest.approx(FULL["sqa_pkg"] + 2 * 0.75**2)


def test_other_pairs_are_compared_with_full_attention_and_their_own_sparse_mode(results):
    row = row_of(collect.pair_results(results, "fa-xa", None), "sqa_pkg")
    assert list(row["nll"]) == ["full", "all_sparse", "routed"]


def test_a_pair_that_was_trained_once_has_no_spread(results):
    kept = {name: result for name, result in results.items() if name not in ("fa-ssa-seed1", "fa-ssa-seed2")}
    assert row_of(collect.pair_results(kept, "fa-ssa", None), "sqa_pkg")["msr"] == pytest.approx(0.67)


def test_outcomes_tell_both_categories_apart(results):
    row = next(row for row in tables.outcomes(results, ("fa-ssa-seed",)) if row["training"] == REFERENCE)
    assert row["MSR sensitive"] == pytest.approx(0.67)
    assert row["apart"] == pytest.approx(0.16)
    assert row["worst rise, robust"] == pytest.approx(2 * 0.83**2 - 0.8)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (REFERENCE, {"window": 512, "pool": 40, "t robust": "1/0.85/1", "steps": 600, "documents": "crossed"}),
        ("trade-window256-seed0", {"window": 256, "pool": 100, "t robust": "1", "answer tokens": "all"}),
        ("trade-code0.85-answer32-seed0", {"t robust": "1/0.85/1", "answer tokens": 32, "counterfactual": None}),
        ("trade-gentle-answer32-seed0", {"multiplier lr": "0.005"}),
        ("trade-counterfactual0.25", {"counterfactual": 0.25, "documents": None}),
        ("trade-crossed-robust0.9-seed0", {"pool": 40, "t robust": "0.9", "steps": 600, "documents": "crossed"}),
        ("one-task-seed0", {"pool": 75, "t robust": "0.9", "steps": 450, "documents": None}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_table_of_settings_says_what_a_training_changed(results, name, expected):
    row = next(row for row in tables.tried(results) if row["training"] == name)
    assert {setting: row[setting] for setting in expected} == expected


def test_trainings_that_were_judged_elsewhere_are_no_other_settings(results):
    (table,) = (table for table in collect.all_tables(results) if table.title == "Other settings than the recipe's")
    first, *others = [row["training"] for row in table.rows]
    assert first == REFERENCE
    assert others
    assert all(name.startswith(("trade-", "one-task-seed")) for name in others)
    assert [row["training"] for row in tables.tried(results)] == [first, *others]


def test_a_dialled_adapter_is_shown_at_both_ends_and_as_trained(results):
    (table,) = (table for table in tables.conditions(results) if "sparsity_bias" in table.title)
    row = next(row for row in table.rows if row["set"] == "sqa_pkg")
    shares = {key: value for key, value in row.items() if key.startswith("msr")}
    assert shares == {
        "msr at -4": pytest.approx(0.47),
        "msr at 0": pytest.approx(0.67),
        "msr at +4": pytest.approx(0.87),
    }


def test_other_tasks_over_the_same_documents_have_a_table_for_each_adapter(results):
    found = {
        t.title.rpartition(": ")[2]: t.rows for t in tables.conditions(results) if t.title.startswith("Other tasks")
    }
    assert list(found) == [REFERENCE, "one-task-seed0"]
    row = next(row for row in found[REFERENCE] if row["set"] == "sqa_pkg-question")
    assert list(row) == ["set", "n", "MSR", "nll routed", "nll full", "nll all_sparse"]
    assert row["MSR"] == pytest.approx(0.67)


def test_each_condition_that_training_did_not_hold_has_its_own_table(results):
    titles = [table.title for table in collect.all_tables(results)]
    for condition in ("left out of training", "unseen phrasings", "1K tokens"):
        assert titles.count(f"Does routing follow the task? {condition}") == 1


def test_every_condition_has_a_table(results):
    titles = " ".join(table.title for table in tables.conditions(results))
    for word in ("1024 tokens", "sparsity_bias", "mixed batches", "sampled"):
        assert word in titles


def test_every_ablation_follows_the_one_that_changes_nothing(results):
    longer = {**results[UNCHANGED], **flat(0.5)}
    unchanged, *changed = collect.ablations({**results, UNCHANGED: longer}).rows
    assert (unchanged["changed"], unchanged["MSR robust"]) == ("nothing", pytest.approx(0.5))
    names = [name for name in results if name.startswith("ablation-") and name != UNCHANGED]
    assert [f"ablation-{row['changed']}" for row in changed] == names


def test_ablations_say_how_long_they_trained(results):
    assert collect.ablations(results).shows.startswith("Trainings of half the recipe's steps, 300, one seed each")


@pytest.mark.parametrize("gone", [UNCHANGED, "bounds"])
def test_without_what_they_compare_with_there_are_no_ablations(results, gone):
    kept = {name: result for name, result in results.items() if name != gone}
    assert collect.ablations(kept).rows == []
    assert "Ablations" not in [table.title for table in collect.all_tables(kept)]
    record = collect.pair_results(kept, "fa-ssa", None)
    assert (record["ablations"], "ablations" in record["notes"]) == ([], False)


@pytest.fixture
def card(results, tmp_path, make_routed):
    make_routed().save_pretrained(tmp_path)
    (tmp_path / "results.json").write_text(json.dumps(collect.pair_results(results, "fa-ssa", "0" * 40)))
    return render_card(tmp_path).content


@pytest.mark.parametrize(
    "words",
    [CHOSEN, *SETS.values(), "worst rise:", "Bold MSR:", "mean over 5 draws", "NVIDIA H200", "3 training seeds"],
    ids=lambda words: words[:20],
)
def test_a_card_says_what_the_figures_are(card, words):
    assert words in card


def test_a_card_has_a_row_for_each_ablation(card):
    assert "| signed |" in card


def test_a_cards_zeros_have_no_sign(card):
    assert "-0.000" not in card


@pytest.mark.parametrize("pair", collect.PAIRS)
def test_notes_are_about_parts_that_have_rows(results, pair):
    of_one_pair = ("generalisation", "ablations") if pair == "fa-ssa" else ()
    assert set(collect.pair_results(results, pair, None)["notes"]) == {"tasks", "ruler", *of_one_pair}


@pytest.mark.parametrize(
    ("way", "gone", "expected"),
    [
        ("static_learned", (), "; mean over 3 training seeds"),
        ("static_learned", ("masks-learned-seed1", "masks-learned-seed2"), "; one training seed"),
        ("static_random", (), "; mean over 5 draws"),
        ("static_loss", (), "by what each costs alone"),
    ],
    ids=["three-seeds", "one-seed", "draws", "once"],
)
def test_a_way_of_running_says_over_what_its_figures_are_means(results, way, gone, expected):
    kept = {name: result for name, result in results.items() if name not in gone}
    assert collect.pair_results(kept, "fa-ssa", None)["ways"][way].endswith(expected)


def test_every_set_is_described():
    assert list(collect.SETS) == list(TASKS)


def test_a_pair_that_retrieves_with_xattention_shows_that_alone_too(results):
    assert "all_retrieval" in row_of(collect.pair_results(results, "xa-ssa", None), "sqa_pkg")["nll"]


@pytest.fixture
def output(results, tmp_path):
    write_all(tmp_path, results)
    return tmp_path


def test_collecting_writes_a_file_for_each_pair(output):
    collect.main(["--output", str(output), "--commit", "abc"])
    for pair in collect.PAIRS:
        record = json.loads((output / pair / "results.json").read_text())
        assert record["commit"] == "abc"
        assert [row["set"] for row in record["tasks"]] == list(TASKS)


def test_collecting_writes_every_table(results, output, capsys):
    collect.main(["--output", str(output)])
    written = (output / "tables.md").read_text()
    assert re.findall("^## (.*)$", written, flags=re.MULTILINE) == [
        table.title for table in collect.all_tables(results)
    ]
    assert "What those settings are" in capsys.readouterr().out


@pytest.mark.parametrize("pair", collect.PAIRS)
def test_scores_of_ruler_are_those_of_the_pairs_own_jobs(output, pair):
    collect.main(["--output", str(output)])
    rows = json.loads((output / pair / "results.json").read_text())["ruler"]
    assert {(row["mode_pair"], row["length"]) for row in rows} == {
        (pair.upper(), length) for length in (2048, 4096, 8192)
    }


def test_masks_are_written_for_other_evaluations(output):
    collect.main(["--output", str(output)])
    masks = json.loads((output / "static_masks.json").read_text())
    assert masks["static_retrieval"] == [[1, 0, 1]] * LAYERS
    assert list(masks) == ["static_random", "static_retrieval", "static_loss", "static_learned"]


def test_results_of_a_single_job_are_collected(results, tmp_path, capsys):
    (tmp_path / "jobs").mkdir()
    write_result(tmp_path, REFERENCE, results[REFERENCE])
    collect.main(["--output", str(tmp_path)])
    assert "FA-SSA, seed 0: NLL" in capsys.readouterr().out


def test_margins_are_static_less_routed(results):
    row = next(row for row in tables.margins(results) if row["masks"] == "static_learned")
    routed = sum(2 * share**2 - 0.8 for share in (0.67, 0.68, 0.69)) / 3
    assert row["sqa_pkg"] == pytest.approx(2 * 0.75**2 - routed)
    assert row["measured"] == 3


def test_rises_compare_the_examples_that_both_measured():
    def figures(values):
        return {"tasks": [{"set": "code_stdlib", "nll": 0.0, "nll_by_example": values}]}

    assert tables.rise(figures([3.0, 4.0, 100.0]), figures([1.0, 1.0]), "code_stdlib") == 2.5


# Examples of another number


@pytest.fixture
def unequal(results):
    """Full attention, every head sparse and the learned masks, each measured on three examples; routed on two."""
    ends = {"full": flat(0.0, count=3), "all_sparse": flat(1.0, count=3)}
    learned = {"learned": {**flat(0.75, count=3), "mask": [[1, 0, 1]] * LAYERS}}
    masks = {"bounds": ends, "masks-learned": learned}
    return results | {name: {**results[name], "masks": of_job} for name, of_job in masks.items()}


def test_means_over_other_examples_stay_out_of_the_rows(unequal):
    row = row_of(collect.pair_results(unequal, "fa-ssa", None), "sqa_pkg")
    kept = ["routed", "static_random", "static_retrieval", "static_loss", "static_category"]
    assert list(row["nll"]) == list(row["accuracy"]) == kept


def test_means_over_other_examples_stay_out_of_the_margins(unequal):
    assert "static_learned" not in [row["masks"] for row in tables.margins(unequal)]


def test_a_seed_measured_on_other_examples_stays_out_of_the_means(results):
    other = {**results["fa-ssa-seed1"], **flat(0.5, count=3)}
    record = collect.pair_results({**results, "fa-ssa-seed1": other}, "fa-ssa", None)
    assert record["seeds"] == [0, 2]
    assert row_of(record, "sqa_pkg")["msr"]["mean"] == pytest.approx(0.68)


def test_a_line_says_what_is_left_out(unequal, tmp_path, capsys):
    write_all(tmp_path, unequal)
    collect.main(["--output", str(tmp_path)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
    assert lines == [
        "left out of FA-SSA: full, measured on 3 examples and not on 2",
        "left out of FA-SSA: all_sparse, measured on 3 examples and not on 2",
        "left out of FA-SSA: static_learned, measured on 3 examples and not on 2",
        "left out of FA-XA: full, measured on 3 examples and not on 2",
        "left out of XA-SSA: full, measured on 3 examples and not on 2",
    ]


# Folders


def test_collecting_where_no_job_ran_says_so(tmp_path):
    with pytest.raises(SystemExit, match="`--output` must be a folder with jobs/"):
        collect.main(["--output", str(tmp_path)])


def test_results_of_an_earlier_collection_are_replaced(output):
    (output / "fa-ssa").mkdir()
    file = output / "fa-ssa" / "results.json"
    file.write_text("{}")
    collect.main(["--output", str(output)])
    assert "tasks" in json.loads(file.read_text())
