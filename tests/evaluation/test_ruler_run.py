"""Running RULER: the answers that each prompt alone would get, in every way and batch, and no longer than needed."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from elastic_peft import forced_routing, last_routing
from elastic_peft.evaluation import ruler_run
from elastic_peft.evaluation.ruler import TASKS, Example
from elastic_peft.evaluation.ruler_run import CHECK_EVERY, Decided, evaluate, read_answers


LENGTH = 48
MASK = torch.tensor([[True, True], [False, False]])


@pytest.fixture
def model(make_base, make_routed, tokenizer):
    return make_routed(make_base(vocab_size=len(tokenizer)))


@pytest.fixture
def prompts(tokenizer):
    return torch.randint(3, len(tokenizer), (2, LENGTH), generator=torch.Generator().manual_seed(4))


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    for task in ("vt", "qa_1"):
        monkeypatch.setitem(TASKS, task, replace(TASKS[task], answer_tokens=10))


def example(input_ids, *references, task="vt", length=LENGTH):
    return Example(task, length, input_ids.tolist(), references)


WAYS = {
    "full": lambda model: model.disable_adapter(),
    "all_sparse": lambda model: forced_routing(model, "sparse"),
    "routed": lambda model: nullcontext(),
    "mask": lambda model: forced_routing(model, MASK),
}


def answers_alone(model, tokenizer, prompts):
    """What the model says to each prompt by itself, by way."""
    answers = {}
    for way, enter in WAYS.items():
        with enter(model):
            rows = [model.generate(input_ids=p[None], max_new_tokens=10, do_sample=False)[0] for p in prompts]
        answers[way] = [tokenizer.decode(row[LENGTH:], skip_special_tokens=True) for row in rows]
    return answers


@pytest.mark.parametrize("batch_tokens", [1, 3 * LENGTH, 2**20], ids=["one_prompt", "three_prompts", "all_prompts"])
def test_answers_are_those_of_each_prompt_alone(model, tokenizer, prompts, batch_tokens):
    answers = answers_alone(model, tokenizer, prompts)
    assert len({answer for of_way in answers.values() for answer in of_way}) == 8, "ways must differ to be told apart"
    # One row for each way, by its length: only that way says what is asked for there.
    examples = [
        example(prompt, answer, length=number)
        for number, of_way in enumerate(answers.values())
        for prompt, answer in zip(prompts, of_way)
    ]
    rows = evaluate(model, tokenizer, examples, static={"mask": MASK}, batch_tokens=batch_tokens)
    for number, row in enumerate(rows):
        assert row["score"] == {way: 100 * (index == number) for index, way in enumerate(WAYS)}


def test_ratios_are_those_of_the_routed_prompts(model, tokenizer, prompts):
    (row,) = evaluate(model, tokenizer, [example(prompt, "x") for prompt in prompts], static={"mask": MASK})
    with torch.no_grad():
        model(input_ids=prompts)
    record = last_routing(model)
    assert 0 < record.msr.mean() < 1
    assert row["msr"] == pytest.approx(record.msr.mean().item())
    assert row["esr"] == pytest.approx(record.esr.mean().item())


def test_one_row_for_each_task_and_length(model, tokenizer, prompts):
    examples = [
        example(prompts[0], "x"),
        example(prompts[1], "x"),
        example(prompts[1], "x", task="qa_1"),
        example(prompts[0, :32], "x", length=32),
    ]
    rows = evaluate(model, tokenizer, examples)
    assert [(row["task"], row["length"], row["n"], row["mode_pair"]) for row in rows] == [
        ("vt", LENGTH, 2, "FA-SSA"),
        ("qa_1", LENGTH, 1, "FA-SSA"),
        ("vt", 32, 1, "FA-SSA"),
    ]


def test_batches_that_do_not_fit_the_memory_become_smaller(model, tokenizer, prompts, monkeypatch):
    sizes = []
    answer = ruler_run._generate

    def generate(model, tokenizer, examples):
        sizes.append(len(examples))
        if len(examples) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return answer(model, tokenizer, examples)

    monkeypatch.setattr(ruler_run, "_generate", generate)
    (row,) = evaluate(model, tokenizer, [example(prompt, "x") for prompt in prompts])
    assert sizes == [2] + [1, 1] * 3, "the size that fits is found once"
    assert row["n"] == 2


def test_a_mask_with_the_name_of_another_way_is_refused(model, tokenizer, prompts):
    with pytest.raises(ValueError, match="`static` must have names other than full, all_sparse, routed, got 'full'"):
        evaluate(model, tokenizer, [example(prompts[0], "x")], static={"full": MASK})


def test_masks_are_checked_before_anything_runs(model, tokenizer, prompts, monkeypatch):
    monkeypatch.setattr(ruler_run, "_generate", None)
    with pytest.raises(ValueError, match="`decisions` must cover 2 routed layers with"):
        evaluate(model, tokenizer, [example(prompts[0], "x")], static={"mask": MASK[:1]})


def test_a_model_in_training_decides_as_in_evaluation(model, tokenizer, prompts):
    examples = [example(prompt, "x") for prompt in prompts]
    expected = evaluate(model, tokenizer, examples)
    assert evaluate(model.train(), tokenizer, examples) == expected
    assert model.training


@pytest.mark.parametrize("mode_pair", ["FA-XA", "XA-SSA"])
def test_batches_change_nothing_of_pairs_with_chosen_blocks(make_base, make_routed, tokenizer, prompts, mode_pair):
    sizes = {"xattn_block_size": 8, "xattn_stride": 4, "xattn_threshold": 0.4}
    model = make_routed(make_base(vocab_size=len(tokenizer)), mode_pair=mode_pair, **sizes)
    references = [model.generate(input_ids=p[None], max_new_tokens=10, do_sample=False)[0, LENGTH:] for p in prompts]
    examples = [example(prompt, tokenizer.decode(answer)) for prompt, answer in zip(prompts, references)]
    alone, batched = (evaluate(model, tokenizer, examples, batch_tokens=tokens) for tokens in (1, 2**20))
    assert batched[0]["score"] == alone[0]["score"]
    assert alone[0]["score"]["routed"] == 100
    assert alone[0]["esr"] == pytest.approx(batched[0]["esr"])


def test_a_model_without_an_adapter_is_refused(make_base, tokenizer, prompts):
    with pytest.raises(ValueError, match="`model` must have an ELASTIC adapter"):
        evaluate(make_base(vocab_size=len(tokenizer)), tokenizer, [example(prompts[0], "x")])


@pytest.fixture
def decided(tokenizer):
    """Asks after how many new tokens a row with this text would end."""

    def run(text, *references, task="vt"):
        prompt = torch.tensor([5, 6, 7])
        stop = Decided(tokenizer, [Example(task, 3, prompt.tolist(), references)], torch.device("cpu"))
        answer = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
        return next(n for n in range(1, 200) if stop(torch.cat([prompt, answer[:n]])[None], None).item())

    return run


FIRST = "granted "


def test_a_row_ends_when_all_references_are_found(decided):
    assert decided(FIRST + "and more of it " * 20, "granted") == CHECK_EVERY


def test_a_row_goes_on_while_a_reference_is_missing(decided):
    assert decided(FIRST + "and more of it " * 20, "granted", "refused") == 10


def test_a_question_ends_with_any_of_its_references(decided):
    assert decided(FIRST + "and more of it " * 20, "granted", "refused", task="qa_1") == CHECK_EVERY


def test_an_answer_is_cut_at_its_tasks_length(tokenizer):
    sequences = torch.arange(100, 240)[None]
    examples = [Example("vt", 10, list(range(100, 110)), ("x",))]
    assert read_answers(tokenizer, examples, sequences) == [tokenizer.decode(range(110, 120))]
