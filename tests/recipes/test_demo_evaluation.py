"""What the demo's model is given to continue."""

from types import SimpleNamespace

import pytest
import torch
from demo_evaluation import generate, print_answer


class Model:
    """Repeats a word; keeps the prompt that it was given."""

    device = torch.device("cpu")

    def __init__(self, answer):
        self.answer = torch.tensor([answer])

    def generate(self, input_ids, **kwargs):
        self.prompt = input_ids[0]
        return torch.cat([input_ids, self.answer], dim=1)


QUESTION = {"role": "user", "content": "What is it?"}


@pytest.fixture
def answered(tokenizer, monkeypatch):
    """Generates for a row; returns the prompt's text and the answer."""
    monkeypatch.setattr("demo_evaluation.last_routing", lambda model: SimpleNamespace(msr=torch.tensor([0.5])))

    def answered(**row):
        model = Model(tokenizer(" a lamp\n").input_ids)
        answer, _ = generate(model, tokenizer, {"task": "code", **row}, 8)
        return tokenizer.decode(model.prompt), answer

    return answered


def test_question_is_answered_in_a_turn_of_its_own(answered):
    prompt, _ = answered(prompt=[QUESTION])
    assert prompt == "<|user|>\nWhat is it?<|end|>\n<|assistant|>\n"


def test_answer_begun_is_continued_where_it_broke_off(answered):
    prompt, _ = answered(prompt=[QUESTION, {"role": "assistant", "content": "x = [\n"}])
    assert prompt == "<|user|>\nWhat is it?<|end|>\n<|assistant|>\nx = [\n"


def test_only_what_was_generated_is_the_answer(answered):
    assert answered(prompt=[QUESTION])[1]["generated"] == "a lamp"


def test_true_answer_is_none_where_there_is_no_single_one(answered):
    assert answered(prompt=[QUESTION])[1]["expected"] is None


def test_true_answer_that_is_not_known_is_not_printed(answered, capsys):
    print_answer(answered(prompt=[QUESTION])[1])
    assert "expected" not in capsys.readouterr().out
