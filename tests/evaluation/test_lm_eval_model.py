"""The model `elastic` of lm_eval: answers never reach the routing, and batches change nothing."""

import json
import sys

import pytest
import torch

from elastic_peft import last_routing, run


pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'elastic_peft[evaluation]'")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from elastic_peft.evaluation.lm_eval_model import ElasticLM, report_routing


CONTEXTS = [
    "The licence of the work is granted by the copyright owner to",
    "You may reproduce and distribute copies of the work in any medium, with or without modifications, and in",
    "Contributions are",
]
CHOICES = [" source form", " the licensor of a work", " a"]


@pytest.fixture
def routed(make_base, make_routed, tokenizer):
    return make_routed(make_base(vocab_size=len(tokenizer)))


@pytest.fixture
def make_lm(routed, tokenizer):
    return lambda batch_size=1, **kwargs: ElasticLM(
        pretrained=routed, tokenizer=tokenizer, batch_size=batch_size, backend="causal", **kwargs
    )


def requests(kind="loglikelihood", tasks=("a", "b")):
    arguments = {
        "loglikelihood": [(context, choice) for context in CONTEXTS for choice in CHOICES],
        "generate_until": [(context, {"until": [], "max_gen_toks": 12, "do_sample": False}) for context in CONTEXTS],
    }
    return [
        Instance(kind, {}, argument, index, metadata=(tasks[index % len(tasks)], index, 1))
        for index, argument in enumerate(arguments[kind])
    ]


@pytest.mark.parametrize("batch_size", [2, 4, 9])
def test_likelihoods_do_not_depend_on_the_batch_size(make_lm, batch_size):
    alone = make_lm(1).loglikelihood(requests(), disable_tqdm=True)
    batched = make_lm(batch_size).loglikelihood(requests(), disable_tqdm=True)
    assert [greedy for _, greedy in batched] == [greedy for _, greedy in alone]
    assert [value for value, _ in batched] == pytest.approx([value for value, _ in alone], rel=1e-4)


def test_answers_do_not_depend_on_the_batch_size(make_lm):
    alone, batched = (
        make_lm(batch_size).generate_until(requests("generate_until"), disable_tqdm=True) for batch_size in (1, 3)
    )
    assert batched == alone
    assert len(set(alone)) == len(CONTEXTS)


@pytest.mark.parametrize("kind", ["loglikelihood", "generate_until"])
def test_ratios_do_not_depend_on_the_batch_size(make_lm, kind):
    alone, batched = (make_lm(batch_size) for batch_size in (1, 4))
    for lm in (alone, batched):
        getattr(lm, kind)(requests(kind), disable_tqdm=True)
    assert set(alone.routing()) == {"a", "b"}
    assert {task: pytest.approx(ratios) for task, ratios in alone.routing().items()} == batched.routing()


def test_likelihood_is_that_of_the_continuation_after_its_prompt(make_lm, routed, tokenizer):
    lm = make_lm(4)
    context, choice = CONTEXTS[1], CHOICES[1]
    prompt = lm.tok_encode(context)
    answer = lm.tok_encode(context + choice)[len(prompt) :]
    with torch.no_grad():
        logits = routed(input_ids=torch.tensor([prompt + answer]), prompt_end=len(prompt)).logits[0]
    log_probs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    expected = log_probs.gather(1, torch.tensor(answer)[:, None]).sum().item()
    likelihoods = lm.loglikelihood(requests(), disable_tqdm=True)
    assert len(answer) > 1
    assert likelihoods[4][0] == pytest.approx(expected, rel=1e-4)


def test_the_greedy_continuation_is_told_from_others(make_lm):
    lm = make_lm(2)
    prompt = [3, 4, 5, 6, 7, 8]
    with torch.no_grad():
        best = lm.model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax().item()
    answers = lm._loglikelihood_tokens([(None, prompt, [best]), (None, prompt, [best - 1])], disable_tqdm=True)
    assert [greedy for _, greedy in answers] == [True, False]


def test_the_answer_does_not_reach_the_routing(make_lm, routed):
    lm = make_lm(1)
    prompt = torch.randint(3, 96, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    answers = torch.randint(3, 96, (6, 20), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        routed(input_ids=torch.tensor([prompt]))
    expected = last_routing(routed).logits
    for answer in answers:
        lm._loglikelihood_tokens([(None, prompt, answer)], disable_tqdm=True)
        torch.testing.assert_close(last_routing(routed).logits, expected)


def test_choices_of_one_token_share_a_pass(make_lm, routed):
    lm = make_lm(1)
    passes = []
    handle = routed.register_forward_pre_hook(lambda *_: passes.append(1))
    lm._loglikelihood_tokens([(None, [3, 4, 5], [choice]) for choice in range(6, 10)], disable_tqdm=True)
    handle.remove()
    assert len(passes) == 1


def test_prompts_that_end_elsewhere_do_not_share_a_pass(make_lm, routed):
    lm = make_lm(1)
    passes = []
    handle = routed.register_forward_pre_hook(lambda *_: passes.append(1))
    lm._loglikelihood_tokens([(None, [3, 4, 5], [6, 7]), (None, [3, 4, 5, 6], [7])], disable_tqdm=True)
    handle.remove()
    assert len(passes) == 2


def test_a_context_that_is_too_long_loses_its_beginning(make_lm):
    lm = make_lm(1, max_length=10)
    context = list(range(10, 40))
    long, short = ([(None, tokens, [5, 6])] for tokens in (context, context[-9:]))
    assert lm._loglikelihood_tokens(long, disable_tqdm=True) == lm._loglikelihood_tokens(short, disable_tqdm=True)


def test_a_context_that_is_too_long_is_told_of(make_lm, caplog):
    make_lm(1, max_length=10)._loglikelihood_tokens([(None, [3] * 30, [5, 6])], disable_tqdm=True)
    assert "31 tokens, of which 10 fit" in caplog.text


def test_a_batch_makes_logits_of_answers_alone(make_lm, routed):
    lm = make_lm(3)
    sizes = []
    head = routed.get_base_model().lm_head
    handle = head.register_forward_hook(lambda _, __, logits: sizes.append(logits.shape[1]))
    lm._loglikelihood_tokens([(None, [3] * length, [5, 6]) for length in (10, 40, 60)], disable_tqdm=True)
    handle.remove()
    assert sizes == [6]


def test_an_automatic_batch_size_is_that_of_the_longest_request(make_lm, monkeypatch):
    lm = make_lm("auto")
    asked = []
    monkeypatch.setattr(lm, "_detect_batch_size", lambda requests: asked.append(requests) or 2)
    requests = [(None, [3] * length, [5]) for length in (10, 40, 20)]
    lm._loglikelihood_tokens(requests, disable_tqdm=True)
    assert asked == [[requests[1]]]


def test_an_answer_that_is_too_long_is_refused(make_lm):
    with pytest.raises(ValueError, match="`max_length` must be at least 11 for this answer, got 10"):
        make_lm(1, max_length=10)._loglikelihood_tokens([(None, [3], [4] * 11)], disable_tqdm=True)


def test_a_model_without_an_adapter_is_refused(make_base, tokenizer):
    base = make_base(vocab_size=len(tokenizer))
    with pytest.raises(ValueError, match="`model` must have an ELASTIC adapter"):
        ElasticLM(pretrained=base, tokenizer=tokenizer, backend="causal")


def test_likelihoods_of_whole_texts_are_refused(make_lm):
    with pytest.raises(ValueError, match="`tasks` must score answers to prompts"):
        make_lm(1).loglikelihood_rolling([])


@pytest.fixture
def files(routed, tokenizer, tmp_path, monkeypatch):
    """A base model, an adapter and a task of lm_eval, on this disk."""
    routed.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "base")
    routed.unload().save_pretrained(tmp_path / "base")
    rows = [{"context": context, "choices": CHOICES, "gold": index} for index, context in enumerate(CONTEXTS)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "licence.yaml").write_text(
        f"""\
task: licence
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.json"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: choices
doc_to_target: gold
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
    )
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


@pytest.fixture
def model_args(files):
    return f"pretrained={files / 'base'},peft={files / 'adapter'},dtype=float32"


def check_scores(results):
    assert 0 <= results["acc,none"] <= 1
    assert 0 < results["msr,none"] < 1
    assert 0 < results["esr,none"] < results["msr,none"]


@pytest.fixture
def evaluate(monkeypatch):
    """`lm_eval.simple_evaluate` as `elastic_peft.run` leaves it."""
    monkeypatch.setattr(lm_eval, "simple_evaluate", lm_eval.simple_evaluate, raising=False)
    report_routing()
    return lm_eval.simple_evaluate


def test_msr_and_esr_stand_beside_each_score(evaluate, files, model_args):
    manager = TaskManager(include_path=str(files), include_defaults=False)
    results = evaluate(
        model="elastic", model_args=model_args, tasks=["licence"], task_manager=manager, device="cpu", batch_size=2
    )
    check_scores(results["results"]["licence"])


@pytest.mark.slow
def test_the_command_reports_msr_and_esr(files, model_args, monkeypatch, capsys):
    monkeypatch.setattr(lm_eval, "simple_evaluate", lm_eval.simple_evaluate, raising=False)
    command = ["run", "lm_eval", "--model", "elastic", "--model_args", model_args, "--device", "cpu"]
    command += ["--tasks", "licence", "--include_path", str(files), "--batch_size", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--output_path", str(files / "out")])
    run.main()
    (written,) = (files / "out").rglob("results*.json")
    check_scores(json.loads(written.read_text())["results"]["licence"])
    assert "|msr" in capsys.readouterr().out.replace(" ", "")
