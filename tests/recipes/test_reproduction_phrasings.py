"""Other words for instructions: they change, and text, question and answer stay."""

import random
import re

import pytest
from recipes.reproduction_place import make_tokenizer, prompt_and_answer
from reproduction.examples import TASKS, Example
from reproduction.phrasings import CLOSINGS, OPENINGS, SUBJECTS, VARIANTS, varied, vary


@pytest.fixture(scope="module")
def words():
    return make_tokenizer()


def make_example(words, name, index=0):
    prompt, answer = prompt_and_answer(name, index)
    ids = words("<|im_start|>user\n" + prompt).input_ids
    return Example(name, (*ids, *words(answer).input_ids), len(ids))


def parts(words, example):
    """Opening, the rest of what the user says, the prompt's end, and the answer."""
    user, end = words.decode(example.ids[: example.prompt_end]).split("<|im_end|>", 1)
    opening, _, rest = user.removeprefix("<|im_start|>user\n").partition("\n")
    return opening, rest, end, words.decode(example.ids[example.prompt_end :])


@pytest.mark.parametrize("name", TASKS)
def test_opening_is_of_the_set(words, name):
    assert parts(words, vary(words, make_example(words, name), random.Random(0)))[0] in OPENINGS[name]


@pytest.mark.parametrize("name", TASKS)
def test_text_and_answer_stay(words, name):
    example = make_example(words, name)
    (_, before, *ends), (_, after, *new_ends) = (
        parts(words, example),
        parts(words, vary(words, example, random.Random(0))),
    )
    if name in CLOSINGS:
        before, after = (rest.rsplit("\n", 1)[0] for rest in (before, after))
    assert (after, new_ends) == (before, ends)


@pytest.mark.parametrize("name", ["sqa_foldoc", "sqa_pkg", "niah_single", "mhop_wordnet"])
def test_question_is_about_the_same(words, name):
    example = make_example(words, name)
    asked = re.search(SUBJECTS[name], parts(words, example)[1])[1]
    closing = parts(words, vary(words, example, random.Random(0)))[1].rsplit("\n", 1)[1]
    assert closing in [form.format(asked) for form in CLOSINGS[name]]


def test_a_closing_of_another_form_is_refused(words):
    example = make_example(words, "sqa_pkg")
    with pytest.raises(ValueError, match="`example` must close as its set niah_single does"):
        vary(words, Example("niah_single", example.ids, example.prompt_end), random.Random(0))


def test_words_depend_on_the_seed_alone(words):
    examples = {name: [make_example(words, name, index) for index in range(3)] for name in TASKS}
    assert varied(words, examples, 1) == varied(words, examples, 1)
    assert varied(words, examples, 1) != varied(words, examples, 2)


def test_examples_come_as_they_are_and_in_other_words(words):
    examples = {"code_stdlib": [make_example(words, "code_stdlib", index) for index in range(3)]}
    members = varied(words, examples, 0)["code_stdlib"]
    assert members[:3] == examples["code_stdlib"]
    assert len(members) == 3 * (1 + VARIANTS)
