"""Other tasks over the sets' documents: what they ask, what they answer, and what stays of the document."""

import random

import pytest
from recipes.reproduction_place import make_tokenizer, prompt_and_answer
from reproduction.crossed import CONTINUED_CHARACTERS, CONTINUING, OPENINGS, continuations, crossed, questions
from reproduction.examples import CONTINUED, QUESTION, TASKS, Example


SYSTEM = "<|im_start|>system\nhelp<|im_end|>\n<|im_start|>user\n"
ASSISTANT = "<|im_end|>\n<|im_start|>assistant\n"
#: A document of each set, a question about it and its answer.
DOCUMENTS = {
    "sqa_foldoc": (
        'Glossary.\n\nABI: what a program and its libraries agree on at run time, in short\n\nSay what is "ABI"?',
        'Which term is explained with the words "what a program and its libraries agree on"?',
        "ABI",
    ),
    "sqa_pkg": (
        'Packages.\n\nPackage: less\nVersion: 1.2-3\nDescription: a pager\n\nWhat is "less"?',
        "version of less",
        "1.2-3",
    ),
    "niah_single": (
        "Read this.\n" + " ".join(f"w{i}" for i in range(15)) + "\nWhat is the special magic number?",
        'Which words follow "w0 w1 w2 w3 w4 w5"?',
        "w6 w7 w8 w9 w10 w11 w12 w13",
    ),
    "mhop_wordnet": (
        "Facts.\n\n* oak is a kind of tree.\n\nThe meaning of what oak is a kind of?",
        "What is oak a kind of?",
        "tree.",
    ),
    "summ_rfc": (
        "Report.\n\n" + "\n".join(f"w{i}" for i in range(15)) + "\n\nNow summarize it.",
        'Which words follow "w0 w1 w2 w3 w4 w5"?',
        "w6 w7 w8 w9 w10 w11 w12 w13",
    ),
    "code_stdlib": (
        f"Complete this.{ASSISTANT}import os\n    def read(self, size=-1):\n        pass",
        "What are the parameters of read?",
        "self, size=-1",
    ),
    "icl_wordnet": (
        "Label.\n\nWord: oak (a tree)\nClass: plant\n\nWord: carp (a fish)",
        'Which class was given to "oak"?',
        "plant",
    ),
}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def make_example(tokenizer, name, text):
    prompt = tokenizer(SYSTEM + text + ("" if ASSISTANT in text else ASSISTANT)).input_ids
    return Example(name, (*prompt, *tokenizer("answer").input_ids), len(prompt))


def text_and_answer(tokenizer, example):
    return tokenizer.decode(example.ids[: example.prompt_end]), tokenizer.decode(example.ids[example.prompt_end :])


@pytest.mark.parametrize("name", TASKS)
def test_a_question_is_about_the_document_and_has_its_answer(tokenizer, name):
    text, question, answer = DOCUMENTS[name]
    (example,) = questions(tokenizer, [make_example(tokenizer, name, text)], random.Random(0))
    prompt, answered = text_and_answer(tokenizer, example)
    assert question in prompt.splitlines()[-2]
    assert answered == f"{answer}<|im_end|>"


def test_a_package_is_asked_for_fields_that_it_has(tokenizer):
    example = make_example(tokenizer, "sqa_pkg", DOCUMENTS["sqa_pkg"][0])
    answers = {text_and_answer(tokenizer, questions(tokenizer, [example], random.Random(s))[0])[1] for s in range(9)}
    assert answers == {"1.2-3<|im_end|>"}


def test_a_document_that_states_nothing_is_not_asked_about(tokenizer):
    example = make_example(tokenizer, "code_stdlib", f"Complete this.{ASSISTANT}import os\nos.getcwd()")
    assert questions(tokenizer, [example], random.Random(0)) == []


@pytest.mark.parametrize("name", CONTINUED)
def test_a_continuation_goes_on_where_the_document_stops(tokenizer, name):
    prompt, _ = prompt_and_answer(name, 0)
    example = make_example(tokenizer, name, prompt.split(ASSISTANT)[0])
    document = "x" * CONTINUED_CHARACTERS + "y" * CONTINUED_CHARACTERS
    for seed in range(6):
        (continued,) = continuations(tokenizer, [grow(tokenizer, example, document)], random.Random(seed))
        text, answer = text_and_answer(tokenizer, continued)
        assert answer == "y" * CONTINUED_CHARACTERS
        assert "x" * CONTINUED_CHARACTERS in text
        assert "y" not in body(text)


def grow(tokenizer, example, document):
    """The example with its records replaced by one."""
    text = tokenizer.decode(example.ids[: example.prompt_end])
    before, _, user = text.partition("<|im_start|>user\n")
    opening, closing = user.split("\n")[0], user.split(ASSISTANT)[0].split("\n")[-1]
    gaps = ("\n", "\n") if example.set == "niah_single" else ("\n\n", "\n\n")
    ids = tokenizer(f"{before}<|im_start|>user\n{opening}{gaps[0]}{document}{gaps[1]}{closing}{ASSISTANT}").input_ids
    return Example(example.set, tuple(ids), len(ids))


def body(text):
    """What stands there besides the words of the instructions."""
    for words in (*CONTINUING, *OPENINGS, "system", "assistant"):
        text = text.replace(words, "")
    return text


@pytest.mark.parametrize("name", TASKS)
def test_documents_come_with_their_own_task_and_with_another(tokenizer, name):
    examples = [make_example(tokenizer, name, DOCUMENTS[name][0])] * 4
    members = crossed(tokenizer, {name: examples}, seed=0)[name]
    expected = [name] * 4 + [QUESTION[name]] * 2 + ([CONTINUED[name]] * 2 if name in CONTINUED else [])
    assert [example.set for example in members] == expected


def test_other_tasks_have_targets_of_their_own(tokenizer):
    examples = [make_example(tokenizer, "icl_wordnet", DOCUMENTS["icl_wordnet"][0])] * 2
    members = crossed(tokenizer, {"icl_wordnet": examples}, seed=0)["icl_wordnet"]
    assert [example.task for example in members][2:] == ["single_qa", "continuation"]


def test_the_seed_alone_decides(tokenizer):
    examples = {"sqa_pkg": [make_example(tokenizer, "sqa_pkg", DOCUMENTS["sqa_pkg"][0])] * 4}
    assert crossed(tokenizer, examples, 1) == crossed(tokenizer, examples, 1)
