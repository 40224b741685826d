"""The three prompts that show what a trained adapter routes."""

from pathlib import Path

import demo_data
import pytest
from demo_shipped import KEY, NUMBER, build_prompts


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return {row["task"]: row for row in build_prompts(tokenizer)}


def test_number_stands_once_in_the_question(prompts):
    assert prompts["single_qa"]["prompt"][0]["content"].count(NUMBER) == 1


def test_number_lies_beyond_sink_and_window(prompts, tokenizer):
    before, after = prompts["single_qa"]["prompt"][0]["content"].split(NUMBER)
    assert len(tokenizer(before).input_ids) > 128
    assert len(tokenizer(after).input_ids) > 1024


def test_question_asks_for_the_key_of_the_number(prompts):
    question = prompts["single_qa"]["prompt"][0]["content"]
    assert f"for {KEY} is: {NUMBER}. " in question
    assert question.endswith(f"for {KEY} mentioned in the provided text?")


def test_code_and_its_answer_are_this_projects(prompts):
    begun, answer = (prompts["code"][part][-1]["content"] for part in ("prompt", "completion"))
    assert Path(demo_data.__file__).read_text(encoding="utf-8").startswith(begun + answer)


def test_code_is_continued_by_the_assistant(prompts):
    assert [message["role"] for message in prompts["code"]["prompt"]] == ["user", "assistant"]


def test_code_breaks_off_at_the_end_of_a_line(prompts):
    assert prompts["code"]["prompt"][-1]["content"].endswith("\n")


def test_summary_claims_no_right_answer(prompts):
    assert "completion" not in prompts["summarization"]
