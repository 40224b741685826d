"""The training mixture, from small files with the columns of the five data sets."""

import json
import random
import re
from pathlib import Path

import data_parts
import prepare_data
import pyarrow.parquet as pq
import pytest
from data_sources import SOURCES, Lengths
from datasets import load_dataset


MINIMUM, MAXIMUM = 300, 1200


def words(rng, count):
    return " ".join(f"w{rng.randrange(50)}" for _ in range(count))


def chatqa2(rng, index):
    question = f"User: {words(rng, 150)}\n\nQ: what is number {index}?\n\nAssistant:"
    return {"question": question, "answer": f"answer {index}", "sub-paragraphs": ""}


def musique(rng, index):
    paragraphs = [
        {"idx": i, "title": f"title {index}-{i}", "paragraph_text": f"text {index}-{i} {words(rng, 20)}"}
        for i in range(3)
    ]
    return {
        "paragraphs": paragraphs,
        "question": f"which is number {index}?",
        "answer": f"answer {index}",
        "answerable": index % 5 != 4,
    }


def colt(rng, index):
    return {
        "prefix": f"def before_{index}():\n    ",
        "middle": f"return middle_{index}",
        "suffix": f"\ndef after_{index}(): ...",
        "code_file_path": f"package/file_{index}.py",
        "cross_file_dependency": [{"code_file_path": "package/a.py", "abstraction": f"def declared_{index}(): ..."}],
        "similar_functions": [{"code_file_path": "package/b.py", "code_block": f"similar_{index} {words(rng, 150)}"}],
    }


def govreport(rng, index):
    return {"report": f"report {index} {words(rng, 150)}", "summary": f"summary {index}"}


def xsum(rng, index):
    return {"document": f"document {index} {words(rng, 20)}", "summary": f"sentence {index}.", "id": str(index)}


ROWS = {"chatqa2": chatqa2, "musique": musique, "colt": colt, "govreport": govreport, "xsum": xsum}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """JSON Lines with 30 rows of each source, by its name."""
    folder = tmp_path_factory.mktemp("files")
    for name, row in ROWS.items():
        rng = random.Random(name)
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row(rng, index)) for index in range(30)))
    return {name: str(folder / f"{name}.jsonl") for name in ROWS}


@pytest.fixture(scope="module")
def tokenizer_folder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prepare(files, tokenizer_folder, monkeypatch):
    """Runs the script in blocks of 7 rows; returns the mixture's rows."""
    monkeypatch.setattr(data_parts, "BLOCK", 7)

    def run(output_dir, *options, sources=tuple(ROWS), files=files):
        prepare_data.main(
            ["--tokenizer", str(tokenizer_folder), "--output-dir", str(output_dir), "--sources", *sources]
            + ["--files", *(f"{name}={path}" for name, path in files.items())]
            + ["--min-tokens", str(MINIMUM), "--max-tokens", str(MAXIMUM), *options]
        )
        return [row for file in sorted((output_dir / "train").iterdir()) for row in pq.read_table(file).to_pylist()]

    return run


@pytest.fixture(scope="module")
def examples(tokenizer):
    """Examples of a source's rows, as `task`, prompt and completion."""
    lengths = Lengths(lambda text: len(tokenizer(text).input_ids), MINIMUM, MAXIMUM)

    def build(name, count=10):
        rng = random.Random(0)
        return list(SOURCES[name].build([ROWS[name](rng, index) for index in range(count)], lengths, rng))

    return build


def test_rows_have_a_prompt_a_completion_and_a_task(prepare, tmp_path):
    for row in prepare(tmp_path):
        assert [message["role"] for message in row["prompt"] + row["completion"]] == ["user", "assistant"]
        assert row["task"]


def test_every_task_of_the_default_targets_is_there(prepare, tmp_path):
    from elastic_peft.config import DEFAULT_T_VALUES

    assert {row["task"] for row in prepare(tmp_path)} == set(DEFAULT_T_VALUES)


def test_lengths_are_within_the_bounds(prepare, tmp_path, tokenizer):
    for row in prepare(tmp_path):
        tokens = len(tokenizer.apply_chat_template(row["prompt"] + row["completion"], return_dict=True)["input_ids"])
        assert tokens == row["tokens"]
        assert MINIMUM <= tokens <= MAXIMUM


def test_sources_are_mixed(prepare, tmp_path):
    sources = [row["source"] for row in prepare(tmp_path)]
    assert sources != sorted(sources, key=list(ROWS).index)


def test_the_same_seed_gives_the_same_mixture(prepare, tmp_path):
    assert prepare(tmp_path / "a") == prepare(tmp_path / "b")


def test_another_seed_gives_another_mixture(prepare, tmp_path):
    assert prepare(tmp_path / "a") != prepare(tmp_path / "b", "--seed", "1")


@pytest.mark.parametrize("parts_before", [1, 4, 9])
def test_a_run_that_was_stopped_goes_on_to_the_same_mixture(prepare, tmp_path, monkeypatch, parts_before):
    write = data_parts._write
    written = []

    def stop(examples, path):
        if len(written) == parts_before:
            raise KeyboardInterrupt
        written.append(path)
        write(examples, path)

    with monkeypatch.context() as patch:
        patch.setattr(data_parts, "_write", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path / "stopped")
    times = {path: path.stat().st_mtime_ns for path in written}
    assert prepare(tmp_path / "stopped") == prepare(tmp_path / "whole")
    assert {path: path.stat().st_mtime_ns for path in written} == times


def test_a_part_that_was_half_written_is_written_again(prepare, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", lambda table, path: path.write_bytes(b"half") and 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(tmp_path / "stopped")
    assert prepare(tmp_path / "stopped") == prepare(tmp_path / "whole")


def test_a_source_is_read_until_its_share_of_the_tokens(prepare, tmp_path):
    rows = prepare(tmp_path, "--tokens", "9000", sources=("chatqa2", "govreport"))
    tokens = {name: sum(row["tokens"] for row in rows if row["source"] == name) for name in ("chatqa2", "govreport")}
    assert 6000 <= tokens["chatqa2"] < 6000 + 7 * MAXIMUM
    assert tokens["govreport"] < tokens["chatqa2"]


def test_more_tokens_extend_an_earlier_run(prepare, tmp_path):
    few = prepare(tmp_path, "--tokens", "1000")
    many = prepare(tmp_path)
    assert len(few) < len(many)
    assert all(row in many for row in few)


def test_options_of_the_chat_template_go_with_each_row(prepare, tmp_path):
    rows = prepare(tmp_path, "--chat-template-options", '{"enable_thinking": false}', sources=("chatqa2",))
    assert all(row["chat_template_kwargs"] == {"enable_thinking": False} for row in rows)


def test_other_settings_in_the_same_folder_are_refused(prepare, tmp_path):
    prepare(tmp_path, sources=("chatqa2",))
    with pytest.raises(ValueError, match="`output_dir` must be new or made with"):
        prepare(tmp_path, "--seed", "1", sources=("chatqa2",))


@pytest.mark.parametrize("name", list(ROWS))
def test_a_missing_column_is_named(prepare, tmp_path, name):
    column = SOURCES[name].columns[-1]
    row = ROWS[name](random.Random(0), 0)
    del row[column]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    with pytest.raises(ValueError, match=f"`{name}` must have the columns .*, without {column}"):
        prepare(tmp_path / "out", sources=(name,), files={name: str(file)})


@pytest.mark.parametrize(
    ("name", "column"),
    [(name, column) for name, source in SOURCES.items() for column in source.columns if column not in source.nullable],
    ids=str,
)
def test_a_row_with_a_null_makes_no_example(prepare, tmp_path, name, column):
    def mixture(folder, rows):
        file = tmp_path / f"{folder}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        return prepare(tmp_path / folder, sources=(name,), files={name: str(file)})

    rng = random.Random(0)
    rows = [ROWS[name](rng, index) for index in range(35)]
    assert mixture("null", [*rows, rows[0] | {column: None}]) == mixture("whole", rows)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("chatqa2", {"answer": []}),
        ("chatqa2", {"question": 5}),
        ("musique", {"paragraphs": [{"idx": 0}]}),
        ("colt", {"similar_functions": ["code"]}),
        ("xsum", {"summary": 3}),
    ],
    ids=["empty-list", "number", "missing-field", "text-for-fields", "number-beside-text"],
)
def test_a_row_of_another_form_is_refused(prepare, tmp_path, name, changes):
    rows = [ROWS[name](random.Random(0), 0) | changes]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(rows[0]))
    with pytest.raises(
        ValueError, match=f"`{name}` must have rows in the form of its data set; got, among rows 0 to 0"
    ):
        prepare(tmp_path / "out", sources=(name,), files={name: str(file)})


@pytest.mark.parametrize("pattern", ["none.jsonl", "none*.jsonl", "empty.jsonl"])
def test_files_without_rows_are_refused(prepare, tmp_path, pattern):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="`files` must name files with rows for govreport, got"):
        prepare(tmp_path / "out", sources=("govreport",), files={"govreport": str(tmp_path / pattern)})


def test_a_run_killed_while_mixing_leaves_the_data_set_as_it_was(prepare, tmp_path, monkeypatch):
    before = prepare(tmp_path / "out", sources=("govreport",))
    with monkeypatch.context() as patch:
        patch.setattr(prepare_data.shutil, "rmtree", lambda *args, **kwargs: None)  # a killed run clears nothing
        patch.setattr(Path, "rename", lambda path, target: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(tmp_path / "out", "--tokens", "10000000", sources=("govreport",))
    read = load_dataset(str(tmp_path / "out"), cache_dir=tmp_path / "cache")
    assert {name: rows.num_rows for name, rows in read.items()} == {"train": len(before)}
    assert prepare(tmp_path / "out", sources=("govreport",)) == before
    assert not (tmp_path / "out" / ".mixing").exists()


def test_a_run_killed_before_its_settings_were_kept_can_be_started_again(prepare, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", lambda path, text: path.write_bytes(b"{") and 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(tmp_path, sources=("govreport",))
    assert prepare(tmp_path, sources=("govreport",))


def test_a_source_outside_the_hub_asks_for_its_files(prepare, tmp_path):
    with pytest.raises(ValueError, match=r"`files` must name the files of colt.*zenodo\.org/records/15019938"):
        prepare(tmp_path, sources=("colt",), files={})


@pytest.mark.parametrize("name", ["chatqa2", "musique", "govreport", "xsum"])
def test_without_files_a_source_is_streamed_from_the_hub(prepare, tmp_path, monkeypatch, files, name):
    load = data_parts.load_dataset
    calls = []

    def record(*args, **kwargs):
        calls.append(kwargs)
        return load("json", data_files=files[name], split="train", streaming=True)

    monkeypatch.setattr(data_parts, "load_dataset", record)
    prepare(tmp_path, sources=(name,), files={})
    assert calls == [{**SOURCES[name].load, "split": "train", "streaming": True}]


def test_no_example_of_a_wanted_length_is_an_error(prepare, tmp_path):
    with pytest.raises(ValueError, match="`min_tokens` and `max_tokens` must leave at least one example"):
        prepare(tmp_path, "--min-tokens", "1199", sources=("chatqa2",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--min-tokens", "0"], "--min-tokens must be from 1 to --max-tokens, 1200, got 0"),
        (["--min-tokens", "1201"], "--min-tokens must be from 1 to --max-tokens, 1200, got 1201"),
        (["--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--chat-template-options", "[1]"], r"--chat-template-options must be a JSON object, got \[1\]"),
        (["--sources", "xsum", "xsum"], "--sources must name each source once, got xsum, xsum"),
        (["--files", "xsum=a", "xsum=b"], "--files must name each source once, got xsum, xsum"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_out_of_range_are_refused(prepare, tmp_path, capsys, options, message):
    with pytest.raises(SystemExit):
        prepare(tmp_path, *options)
    assert re.search(message, capsys.readouterr().err)


def test_files_of_an_unknown_source_are_refused(prepare, tmp_path, capsys):
    with pytest.raises(SystemExit):
        prepare(tmp_path, files={"pile": "pile.jsonl"})
    assert "--files must be SOURCE=PATTERN" in capsys.readouterr().err


# The examples of each source


def test_chatqa2_loses_the_names_of_the_speakers(examples):
    for index, (task, prompt, completion) in enumerate(examples("chatqa2")):
        assert (task, completion) == ("single_qa", f"answer {index}")
        assert prompt.startswith("w")
        assert prompt.endswith(f"what is number {index}?")


def test_chatqa2_has_summaries_too():
    row = {"question": "User: text\n\nCan you write an appropriate summary of it?\n\nAssistant:", "answer": ["one"]}
    assert [task for task, _, _ in SOURCES["chatqa2"].build([row], None, None)] == ["summarization"]


def test_musique_keeps_a_question_s_own_paragraphs(examples):
    for task, prompt, completion in examples("musique"):
        index = completion.removeprefix("answer ")
        assert task == "multihop_qa"
        assert all(f"text {index}-{i} " in prompt for i in range(3))
        assert prompt.endswith(f"Question: which is number {index}?")


def test_musique_is_lengthened_by_paragraphs_of_other_questions(examples):
    assert all(prompt.count("title ") > 3 for _, prompt, _ in examples("musique"))


def test_musique_leaves_out_what_has_no_answer(examples):
    assert not {"answer 4", "answer 9"} & {completion for _, _, completion in examples("musique")}


def test_colt_is_half_completion_half_demonstrations(examples):
    tasks = [task for task, _, _ in examples("colt")]
    assert tasks == ["code", "in_context_learning"] * 5


def test_colt_prompts_end_before_the_gap(examples):
    for index, (_, prompt, completion) in enumerate(examples("colt")):
        assert completion == f"return middle_{index}"
        assert prompt.endswith(f"def before_{index}():\n    ")
        assert f"similar_{index}" in prompt
        assert completion not in prompt


def test_govreport_is_one_report(examples):
    for index, (task, prompt, completion) in enumerate(examples("govreport")):
        assert (task, completion) == ("summarization", f"summary {index}")
        assert f"report {index} " in prompt


def test_xsum_joins_articles_and_sentences_in_one_order(examples):
    joined = examples("xsum", 100)
    assert len(joined) > 1
    for task, prompt, completion in joined:
        sentences = completion.splitlines()
        assert task == "summarization"
        assert len(sentences) == prompt.count("document ") > 1
        places = [prompt.index(f"document {sentence.split()[1].rstrip('.')} ") for sentence in sentences]
        assert places == sorted(places)


def test_no_article_of_xsum_comes_twice(examples):
    sentences = [sentence for _, _, completion in examples("xsum", 100) for sentence in completion.splitlines()]
    assert len(sentences) == len(set(sentences))
