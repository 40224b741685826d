"""RULER's prompts: as long as asked, the same again, answered by their text alone, and scored as the paper does."""

import copy
import random
import re
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from tokenizers import normalizers

from elastic_peft.evaluation.ruler import ANSWER_ROOM, TASKS, Example, build_examples
from elastic_peft.evaluation.ruler_needles import NeedleTask, hide
from elastic_peft.evaluation.ruler_prompt import SLACK, Draft, fit_prompts


LENGTH = 1600
NEEDLE_TASKS = [name for name, task in TASKS.items() if isinstance(task.draft, NeedleTask)]


@pytest.fixture(scope="module")
def read(tokenizer, sources):
    """One prompt of a task: the example, its text before the question, and the question with the answer's start."""

    def read(task, length=LENGTH, seed=0):
        (example,) = build_examples(tokenizer, sources, length, tasks=[task], samples=1, seed=seed)
        context, _, question = tokenizer.decode(example.input_ids).rpartition("\n\n")
        return example, context, question

    return read


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1100, LENGTH])
def test_length_is_exact(tokenizer, sources, task, length):
    examples = build_examples(tokenizer, sources, length, tasks=[task], samples=2)
    assert [len(example.input_ids) for example in examples] == [length - ANSWER_ROOM] * 2


@pytest.mark.parametrize("length", range(700, 720))
def test_length_is_never_exceeded_where_dots_cannot_fill_it(byte_tokenizer, sources, length):
    (example,) = build_examples(byte_tokenizer, sources, length, tasks=["niah_single_1"], samples=1)
    assert length - ANSWER_ROOM - 1 <= len(example.input_ids) <= length - ANSWER_ROOM


@pytest.mark.parametrize("task", TASKS)
def test_length_is_exact_where_the_last_dot_joins_what_follows(joining_tokenizer, sources, task):
    examples = build_examples(joining_tokenizer, sources, 1100, tasks=[task], samples=6)
    assert {len(example.input_ids) for example in examples} == {1100 - ANSWER_ROOM}


def test_a_tokenizer_that_drops_dots_comes_to_an_end(tokenizer, sources):
    dropping = copy.deepcopy(tokenizer)
    dropping.backend_tokenizer.normalizer = normalizers.Replace(" .", "")
    (example,) = build_examples(dropping, sources, 700, tasks=["niah_single_2"], samples=1)
    assert 0 < 700 - ANSWER_ROOM - len(example.input_ids) < SLACK


def test_samples_must_be_some(tokenizer, sources):
    with pytest.raises(ValueError, match="`samples` must be at least 1, got 0"):
        build_examples(tokenizer, sources, LENGTH, samples=0)


def test_a_task_that_is_named_twice_is_built_once(tokenizer, sources):
    assert len(build_examples(tokenizer, sources, LENGTH, tasks=["vt", "vt"], samples=1)) == 1


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_in_the_text_and_not_in_the_question(read, task):
    example, context, question = read(task)
    assert [r for r in example.references if r not in context] == []
    assert [r for r in example.references if r in question] == []


def test_a_prompt_depends_on_seed_task_length_and_number_alone(tokenizer, sources):
    few = build_examples(tokenizer, sources, LENGTH, tasks=["vt"], samples=1)
    many = build_examples(tokenizer, sources, LENGTH, tasks=["fwe", "vt"], samples=2)
    assert few == many[2:3]


def test_seeds_and_numbers_give_other_prompts(tokenizer, sources):
    prompts = [
        tuple(example.input_ids)
        for seed in (0, 1)
        for example in build_examples(tokenizer, sources, LENGTH, tasks=["niah_single_2"], samples=2, seed=seed)
    ]
    assert len(set(prompts)) == 4


@pytest.mark.parametrize("task", NEEDLE_TASKS)
def test_the_asked_keywords_go_with_the_references(read, task):
    example, context, question = read(task)
    facts = re.findall(r"The keyword (\S+) goes with the \w+ (\S+)\.", context)
    assert {value for key, value in facts if key in question} == set(example.references)


@pytest.mark.parametrize(
    ("task", "keys", "values"),
    [("niah_single_2", 1, 1), ("niah_multikey_1", 4, 1), ("niah_multivalue", 1, 4), ("niah_multiquery", 4, 4)],
)
def test_numbers_of_keywords_and_of_asked_values(read, task, keys, values):
    example, context, _ = read(task)
    assert (len(set(re.findall(r"keyword (\S+) goes", context))), len(example.references)) == (keys, values)


def test_a_haystack_of_needles_holds_nothing_else(read):
    _, context, _ = read("niah_multikey_3")
    text = context.partition("\n\n")[2].rstrip(" .")
    assert re.sub(r"The keyword \S+ goes with the code \S+\.?", "", text).strip() == ""


def test_tracked_variables_are_those_that_hold_the_value(read):
    example, context, question = read("vt")
    (value,) = re.findall(r"hold (\d+),", question)
    holding = {value}
    for name, source in re.findall(r"\b([A-Z]{5}) = (\w+)\.", context):
        holding |= {name} if source in holding else set()
    assert holding - {value} == set(example.references)


@pytest.mark.parametrize(("length", "repeats"), [(LENGTH, 10), (4096, 30)])
def test_common_words_are_listed_most_often(read, length, repeats):
    example, context, _ = read("cwe", length)
    words = re.findall(r"\d+\. (\w+)", context.partition("\n\n")[2])
    most_common = Counter(words).most_common(11)
    assert {word for word, _ in most_common[:10]} == set(example.references)
    assert [count for _, count in most_common] == [repeats] * 10 + [repeats // 10]


def test_frequent_words_follow_the_zeta_distribution(read):
    example, context, _ = read("fwe")
    text = re.sub(r"( \.)+$", "", context.partition("\n\n")[2])
    (dots, first), *coded = Counter(text.split()).most_common(5)
    assert dots == "..."
    assert [word for word, _ in coded[:3]] == list(example.references)
    assert [count for _, count in coded] == [pytest.approx(first / rank**2, abs=1) for rank in range(2, 6)]


def test_a_question_keeps_all_of_its_evidence(read, sources):
    _, context, question = read("qa_2")
    (asked,) = [q for q in sources.multi_hop if q.text in question]
    assert all(text in context for text in asked.evidence)


def test_needles_in_order_stay_in_order():
    for seed in range(50):
        context = hide(["1", "2", "3", "4", "5"], lambda size: ["x"] * size, random.Random(seed), ordered=True)
        assert context(3).replace("x", "").replace(" ", "") == "12345"


@pytest.mark.parametrize(
    ("task", "answer", "score"),
    [
        ("vt", "ABC and DEF", 1.0),
        ("vt", "only abc", 0.5),
        ("vt", "none", 0.0),
        ("qa_1", "def", 1.0),
        ("qa_1", "none", 0.0),
    ],
)
def test_score(task, answer, score):
    assert Example(task, LENGTH, [], ("ABC", "DEF")).score(answer) == score


def test_a_task_that_does_not_exist_is_refused(tokenizer, sources):
    with pytest.raises(ValueError, match=r"`tasks` must be among niah_single_1, .*, got 'niah'"):
        build_examples(tokenizer, sources, LENGTH, tasks=["niah"])


def test_a_length_without_room_is_refused(tokenizer, sources):
    with pytest.raises(ValueError, match=r"`length` must leave room for a prompt of \d+ tokens in this task, got 22"):
        build_examples(tokenizer, sources, 150, tasks=["vt"])


@pytest.mark.parametrize(("task", "field"), [("qa_1", "single_hop"), ("qa_2", "multi_hop"), ("cwe", "words")])
def test_sources_that_hold_too_little_are_refused(tokenizer, sources, task, field):
    little = replace(sources, **{field: getattr(sources, field)[:25]})
    with pytest.raises(ValueError, match=rf"`{field}` must hold more"):
        build_examples(tokenizer, little, LENGTH, tasks=[task], samples=1)


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_source_is_refused_only_where_it_holds_too_little(tokenizer, lacking):
    def draft(largest):
        def context(size):
            if size > largest:
                raise ValueError(f"{size} of {largest}")
            return "license work copyright notice " * 5 * size

        return Draft("", context, "", "", (), largest=largest)

    prompt = partial(fit_prompts, tokenizer, length=1000)
    (expected,) = prompt([draft(10_000)])
    needed = tokenizer.decode(expected).count("license") // 5
    if lacking:
        with pytest.raises(ValueError, match=f"{needed} of {needed - 1}"):
            prompt([draft(needed - 1)])
    else:
        assert prompt([draft(needed)]) == [expected]


def test_prose_without_words_is_refused(tokenizer, sources):
    with pytest.raises(ValueError, match="`prose` must hold words"):
        build_examples(tokenizer, replace(sources, prose=" \n"), LENGTH, tasks=["niah_single_2"])


def test_needles_stand_at_any_depth_of_prose_without_sentences(tokenizer, sources):
    endless = replace(sources, prose=re.sub(r"[.!?]", "", sources.prose))
    examples = build_examples(tokenizer, endless, LENGTH, tasks=["niah_single_2"], samples=8)
    depths = [tokenizer.decode(example.input_ids).index(example.references[0]) for example in examples]
    assert len(set(depths)) > 4


def test_without_questions_their_task_is_refused(tokenizer, sources):
    with pytest.raises(ValueError, match="`single_hop` must hold questions for this task, got none"):
        build_examples(tokenizer, replace(sources, single_hop=()), LENGTH, tasks=["qa_1"])


def test_the_answer_begins_in_the_assistants_turn(read):
    _, _, question = read("qa_1")
    assert question.endswith("<|assistant|>\nAnswer:")


def test_without_a_chat_template_the_prompt_is_plain_text(byte_tokenizer, sources):
    (example,) = build_examples(byte_tokenizer, sources, 700, tasks=["qa_1"], samples=1)
    assert byte_tokenizer.decode(example.input_ids).endswith("?\nAnswer:")
