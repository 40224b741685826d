"""`recipes/evaluate.py`: from a model and an adapter on disk to rows of results, on text that comes with Python."""

import importlib.util
import json
from pathlib import Path

import pytest
from ruler_text import language_reference, multi_hop, python_sources, single_hop

from elastic_peft.evaluation.ruler import TASKS, build_examples


RECIPE = Path(__file__).parents[2] / "recipes" / "evaluate.py"


@pytest.fixture(scope="module")
def evaluate():
    # By its path: an installed package has the same name.
    spec = importlib.util.spec_from_file_location("evaluate_recipe", RECIPE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def command(make_base, make_routed, tokenizer, tmp_path):
    """Arguments for a tiny model, adapter and masks; adds those given."""
    model = make_routed(make_base(vocab_size=len(tokenizer), max_position_embeddings=2048))
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "base")
    model.unload().save_pretrained(tmp_path / "base")
    (tmp_path / "prose.txt").write_text("One sentence follows another. " * 20)
    (tmp_path / "masks.json").write_text(json.dumps({"static_random": [[1, 0], [0, 1]]}))
    paths = {"model": "base", "adapter": "adapter", "haystack": "prose.txt", "output": "results.json"}
    given = [part for name, path in paths.items() for part in (f"--{name}", str(tmp_path / path))]
    return lambda *arguments: [*given, "--device", "cpu", *arguments]


def test_rows_of_the_results_file(evaluate, command, tmp_path, capsys):
    static = ["--static", str(tmp_path / "masks.json")]
    evaluate(command("--lengths", "320", "400", "--tasks", "vt", "qa_1", "--samples", "1", *static))
    rows = json.loads((tmp_path / "results.json").read_text())["ruler"]
    assert [(row["task"], row["length"], row["n"]) for row in rows] == [
        (task, length, 1) for length in (320, 400) for task in ("vt", "qa_1")
    ]
    assert {name for row in rows for name in row["score"]} == {"full", "all_sparse", "routed", "static_random"}
    assert "static_random" in capsys.readouterr().out


def test_rows_that_are_measured_again_are_replaced(evaluate, command, tmp_path):
    other = {"task": "vt", "length": 4096, "mode_pair": "FA-SSA", "score": {"full": 1.0}}
    stale = {"task": "vt", "length": 320, "mode_pair": "FA-SSA", "score": {"full": -1.0}}
    (tmp_path / "results.json").write_text(json.dumps({"tasks": ["kept"], "ruler": [stale, other]}))
    evaluate(command("--lengths", "320", "--tasks", "vt", "--samples", "1"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["tasks"] == ["kept"]
    assert results["ruler"][0] == other
    assert [row["score"]["full"] >= 0 for row in results["ruler"]] == [True, True]


def test_a_write_that_is_cut_short_leaves_the_results(evaluate, command, tmp_path, monkeypatch):
    before = json.dumps({"tasks": ["kept"]})
    (tmp_path / "results.json").write_text(before)
    monkeypatch.setattr(Path, "write_text", lambda file, text, **_: file.write_bytes(text[:5].encode()) and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate(command("--lengths", "320", "--tasks", "vt", "--samples", "1"))
    assert (tmp_path / "results.json").read_text() == before


def test_a_file_that_cannot_take_results_is_refused_before_anything_is_loaded(evaluate, tmp_path):
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="`output` must be a file of results"):
        evaluate(["--model", "none", "--adapter", "none", "--output", str(tmp_path / "list.json")])


@pytest.mark.parametrize("rows", [[[0, 1], [1]], [[0.3, 0.9]], {"mask": [[0, 1]]}, [0, 1], [], [[]]])
def test_a_file_of_other_things_than_masks_is_refused(evaluate, tmp_path, rows):
    (tmp_path / "masks.json").write_text(json.dumps({"scores": rows}))
    with pytest.raises(ValueError, match="`static` must hold rows of one length of 0 and 1, got others for 'scores'"):
        evaluate(["--model", "none", "--adapter", "none", "--static", str(tmp_path / "masks.json")])


def test_masks_without_names_are_refused(evaluate, tmp_path):
    (tmp_path / "masks.json").write_text("[[0, 1]]")
    with pytest.raises(ValueError, match="`static` must map names to rows of 0 and 1, got a list in"):
        evaluate(["--model", "none", "--adapter", "none", "--static", str(tmp_path / "masks.json")])


def test_an_unknown_task_is_refused_before_anything_is_loaded(evaluate):
    with pytest.raises(ValueError, match="`tasks` must be among"):
        evaluate(["--model", "none", "--adapter", "none", "--tasks", "niah"])


@pytest.fixture(scope="module")
def python_text():
    return python_sources()


def test_the_language_reference_is_long_prose():
    text = language_reference()
    assert len(text.split()) > 15_000
    assert "::=" not in text


@pytest.mark.parametrize("task", TASKS)
def test_python_has_text_enough_for_every_task(tokenizer, python_text, task):
    (example,) = build_examples(tokenizer, python_text, 16_384, tasks=[task], samples=1)
    assert len(example.input_ids) == 16_384 - 128


@pytest.mark.parametrize("questions", [single_hop, multi_hop], ids=["single_hop", "multi_hop"])
def test_evidence_holds_the_answer_and_no_other_question_has_it(python_text, questions):
    asked = getattr(python_text, questions.__name__)
    assert all(question.answers[0] in question.evidence[-1] for question in asked)
    assert len({question.text for question in asked}) == len(asked)


def test_one_document_is_not_enough_for_two_hops(python_text):
    first_hops = [(q.text.rpartition(": ")[2], q.evidence) for q in python_text.multi_hop]
    assert all(summary in first and summary not in second for summary, (first, second) in first_hops)
