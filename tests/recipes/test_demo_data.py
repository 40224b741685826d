"""The demo's examples: questions are answered by the prompt, and only by what streaming heads cannot see."""

import re

import pytest
from demo_data import PHRASINGS, TASKS, ExampleBuilder, Split, build_examples

from elastic_peft import ElasticConfig


LENGTH, SINK, WINDOW = 640, 16, 64
QUESTIONS = ("single_qa", "multihop_qa")


@pytest.fixture(scope="module")
def splits():
    return {"training": Split(evaluation=False), "evaluation": Split(evaluation=True)}


@pytest.fixture(scope="module")
def rows(tokenizer, splits):
    return {
        name: build_examples(ExampleBuilder(tokenizer, split, LENGTH, SINK, WINDOW), 40, seed=0)
        for name, split in splits.items()
    }


@pytest.fixture(scope="module")
def of_task(rows):
    every = rows["training"] + rows["evaluation"]
    return lambda task: [
        (r["prompt"][0]["content"], r["completion"][0]["content"]) for r in every if r["task"] == task
    ]


def query_of(prompt):
    return re.findall(r"`([^`\n]+)`", prompt)[-1]


def test_tasks_are_the_adapters():
    assert set(TASKS) == set(ElasticConfig().t_values)


@pytest.mark.parametrize("split", ["training", "evaluation"])
def test_five_neighbours_hold_one_of_each_task(rows, split):
    tasks = [row["task"] for row in rows[split]]
    assert all(tuple(tasks[i : i + 5]) == TASKS for i in range(0, len(tasks), 5))


def test_examples_are_the_same_at_every_call(tokenizer, rows):
    builder = ExampleBuilder(tokenizer, Split(evaluation=True), LENGTH, SINK, WINDOW)
    assert build_examples(builder, 10, seed=0) == rows["evaluation"][:10]


def test_another_seed_gives_other_examples(tokenizer, splits, rows):
    builder = ExampleBuilder(tokenizer, splits["evaluation"], LENGTH, SINK, WINDOW)
    assert all(a["prompt"] != b["prompt"] for a, b in zip(build_examples(builder, 5, seed=1), rows["evaluation"]))


@pytest.mark.parametrize("task", TASKS)
def test_every_phrasing_occurs(of_task, task):
    openings = {phrasing.split("\n")[0] for phrasing in PHRASINGS[task]}
    assert {prompt.split("\n")[0] for prompt, _ in of_task(task)} == openings


@pytest.mark.parametrize("task", TASKS)
def test_length_is_bounded_and_used(tokenizer, rows, task):
    chats = [row["prompt"] + row["completion"] for row in rows["training"] if row["task"] == task]
    lengths = [len(tokenizer.apply_chat_template(chat, return_dict=False)) for chat in chats]
    assert max(lengths) <= LENGTH
    assert min(lengths) >= LENGTH // 3


def test_splits_share_no_file(splits):
    names = [{module.name for module in split.modules} for split in splits.values()]
    assert names[0].isdisjoint(names[1])


@pytest.mark.parametrize("field", ["qualified_name", "summary"])
def test_splits_share_no_name_and_no_sentence(splits, field):
    values = [{getattr(d, field) for d in split.definitions} - {""} for split in splits.values()]
    assert values[0].isdisjoint(values[1])


@pytest.mark.parametrize("task", QUESTIONS)
def test_answer_stands_once_in_the_prompt(of_task, task):
    assert [prompt.count(f": {answer}\n") for prompt, answer in of_task(task)] == [1] * len(of_task(task))


def test_single_qa_answer_follows_its_name(of_task):
    for prompt, answer in of_task("single_qa"):
        assert f"`{query_of(prompt)}`: {answer}\n" in prompt


def test_multihop_answer_takes_two_hops(of_task):
    for prompt, answer in of_task("multihop_qa"):
        owners = re.findall(
            rf"^`{re.escape(query_of(prompt))}` is defined by `([^`]+)`\.$", prompt, flags=re.MULTILINE
        )
        assert len(owners) == 1
        assert f"`{owners[0]}`: {answer}\n" in prompt


@pytest.mark.parametrize("task", QUESTIONS)
def test_evidence_lies_beyond_sink_and_window(tokenizer, rows, task):
    for row in rows["training"] + rows["evaluation"]:
        if row["task"] != task:
            continue
        prompt, answer = row["prompt"][0]["content"], row["completion"][0]["content"]
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        evidence = [f": {answer}\n"]
        if task == "multihop_qa":
            evidence.append(f"`{query_of(prompt)}` is defined by ")
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
        for line in evidence:
            start, stop = text.index(line), text.index(line) + len(line)
            assert sum(end <= start for _, end in offsets) >= SINK
            assert sum(begin >= stop for begin, _ in offsets) >= WINDOW


def test_label_shots_never_hold_the_query(of_task):
    for prompt, answer in of_task("in_context_learning"):
        assert answer in ("class", "function", "method")
        assert f"\n{query_of(prompt)} -> " not in prompt


def test_code_continues_the_file(splits, of_task):
    sources = [module.source for split in splits.values() for module in split.modules]
    for prompt, answer in of_task("code"):
        before = "\n".join(prompt.split("\n\n", 1)[1].rsplit("\n\n", 1)[0].splitlines()[-3:])
        first_line = answer.splitlines()[0]
        assert any(re.search(re.escape(before) + r"\s+" + re.escape(first_line), source) for source in sources)


def test_summary_is_not_given_away(of_task):
    assert not [answer for prompt, answer in of_task("summarization") if answer in prompt]


def test_too_short_a_length_is_refused(tokenizer, splits):
    with pytest.raises(ValueError, match="`length` must leave room for evidence"):
        build_examples(ExampleBuilder(tokenizer, splits["evaluation"], 160, SINK, WINDOW), 1, seed=0)


def test_unknown_task_is_refused(tokenizer, splits):
    builder = ExampleBuilder(tokenizer, splits["evaluation"], LENGTH, SINK, WINDOW)
    with pytest.raises(ValueError, match=r"`task` must be one of single_qa, .*, got 'poetry'"):
        builder.example("poetry", None)
