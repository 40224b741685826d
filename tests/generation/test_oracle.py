"""However a text is generated, each token is what one pass over the whole text gives under the recorded decisions."""

import copy
from functools import partial

import pytest
import torch
from families_zoo import SUPPORTED, build, perturb_routers
from generation.tiny import LENGTHS, NEW_TOKENS, assert_same_logits, generate, left_padded, logits_of, routed, tokens
from peft import get_peft_model
from transformers import DynamicCache, StaticCache, TextStreamer

from elastic_peft import ElasticConfig, forced_routing, last_routing


PROMPT = tokens(40)


@pytest.fixture(scope="module", params=["FA-SSA", "FA-XA", "XA-SSA"])
def any_model(request):
    return routed(request.param)


@pytest.fixture(scope="module")
def model():
    return routed()


@torch.no_grad()
def assert_follows_one_pass(model, output, mask=None, prompt_end=None, decisions=None):
    """Compares each generated token's log-probability with that in one pass over its sequence.

    Args:
        output: what `generate` returned.
        mask: of the prompts, where they are padded.
        prompt_end: tokens of the prompts, if not all but the generated ones.
        decisions: of the sequences, if not those that were recorded last.
    """
    sequences = output.sequences
    new = len(output.logits)
    prompt_end = sequences.shape[1] - new if prompt_end is None else prompt_end
    decisions = last_routing(model).decisions if decisions is None else decisions
    assert decisions.any()
    assert not decisions.all()
    actual = model.compute_transition_scores(
        sequences, output.logits, getattr(output, "beam_indices", None), normalize_logits=True
    )
    if mask is not None:
        mask = torch.nn.functional.pad(mask, (0, sequences.shape[1] - 1 - mask.shape[1]), value=1)
    with forced_routing(model, decisions):
        logits = model(sequences[:, :-1], attention_mask=mask, prompt_end=prompt_end, use_cache=False).logits
    expected = logits[:, -new:].log_softmax(dim=-1).gather(2, sequences[:, -new:, None]).squeeze(2)
    assert_same_logits(actual, expected)


def test_greedy(any_model):
    assert_follows_one_pass(any_model, generate(any_model, input_ids=PROMPT))


def test_without_a_cache(model):
    assert_follows_one_pass(model, generate(model, input_ids=PROMPT, use_cache=False))


def test_a_left_padded_batch(any_model):
    ids, mask = left_padded([40, 3, 17, 39])
    assert_follows_one_pass(any_model, generate(any_model, input_ids=ids, attention_mask=mask), mask)


def test_samples_of_one_prompt(model):
    torch.manual_seed(3)
    output = generate(model, input_ids=PROMPT, do_sample=True, num_return_sequences=3)
    assert len(output.sequences.unique(dim=0)) == 3
    assert_follows_one_pass(model, output)


def test_beams_of_several_prompts(model):
    ids, mask = left_padded()
    output = generate(model, input_ids=ids, attention_mask=mask, num_beams=3, num_return_sequences=2)
    decisions = last_routing(model).decisions[::3].repeat_interleave(2, dim=0)
    assert_follows_one_pass(model, output, mask.repeat_interleave(2, dim=0), decisions=decisions)


@pytest.mark.parametrize("candidates", [3, 12, 30])
def test_prompt_lookup(model, candidates):
    prompt = tokens(20).repeat(1, 2)
    output = generate(model, input_ids=prompt, prompt_lookup_num_tokens=candidates, max_new_tokens=40)
    assert_follows_one_pass(model, output)


def test_a_draft_model(model):
    draft = build("llama", num_hidden_layers=1)
    assert_follows_one_pass(model, generate(model, input_ids=PROMPT, assistant_model=draft, max_new_tokens=40))


def test_rows_that_stop_early_leave_the_others_alone(model):
    ids, mask = left_padded()
    options = {"input_ids": ids, "attention_mask": mask, "min_new_tokens": 0}
    free = generate(model, **options).sequences[:, ids.shape[1] :]
    stop = int(free[0, 4])
    stopped = generate(model, **options, eos_token_id=stop).sequences[:, ids.shape[1] :]
    ends = [row.index(stop) + 1 if stop in row else NEW_TOKENS for row in free.tolist()]
    assert min(ends) < max(ends)
    for row, end in enumerate(ends):
        assert torch.equal(stopped[row, :end], free[row, :end]), f"row {row}"
        assert not stopped[row, end:].any(), f"row {row}"


@pytest.mark.parametrize("added", [1, 9, 33, 60], ids=lambda n: f"{n}-tokens")
def test_turns_that_append_to_a_cache(model, added):
    cache = DynamicCache(config=model.config)
    chat = PROMPT
    for turn in range(3):
        output = generate(model, input_ids=chat, past_key_values=cache)
        assert_follows_one_pass(model, output, prompt_end=PROMPT.shape[1])
        chat = torch.cat([output.sequences, tokens(added, seed=turn)], dim=1)


@pytest.mark.parametrize(
    "make_cache", [DynamicCache, partial(StaticCache, max_cache_len=200)], ids=["dynamic", "static"]
)
def test_a_turn_that_is_routed_anew(any_model, make_cache):
    cache = make_cache(config=any_model.config)
    first = generate(any_model, input_ids=PROMPT, past_key_values=cache).sequences
    before = last_routing(any_model).decisions
    chat = torch.cat([first, tokens(60, seed=9)], dim=1)
    output = generate(any_model, input_ids=chat, past_key_values=cache, reroute=True)
    decisions = last_routing(any_model).decisions
    assert not torch.equal(decisions, before)
    assert_follows_one_pass(any_model, output, prompt_end=chat.shape[1])
    generate(any_model, input_ids=chat)
    assert torch.equal(last_routing(any_model).decisions, decisions)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "llama4_text", "qwen3_next"])
@torch.no_grad()
def test_layers_beside_the_routed_ones_read_a_rerouted_turn_anew(family):
    config = ElasticConfig(sink_size=2, window_size=4, pool_size=4, standardize_input=False)
    mixed = get_peft_model(build(family, **SUPPORTED[family][0]), config).eval()
    perturb_routers(mixed)
    cache = DynamicCache(config=mixed.config)
    chat = torch.cat([generate(mixed, input_ids=PROMPT, past_key_values=cache).sequences, tokens(9, seed=9)], dim=1)
    options = {"input_ids": chat, "attention_mask": torch.ones_like(chat)}  # a token may be the one that pads
    rerouted = generate(mixed, **options, past_key_values=cache, reroute=True)
    assert_same_logits(logits_of(rerouted), logits_of(generate(mixed, **options)))


def test_only_a_cache_can_be_emptied_to_route_anew(model):
    with pytest.raises(ValueError, match="`cache` must be a transformers cache with layers, got tuple"):
        generate(model, input_ids=PROMPT, past_key_values=(), reroute=True)


def test_a_second_turn_of_a_left_padded_batch(any_model):
    cache = DynamicCache(config=any_model.config)
    ids, mask = left_padded()
    first = generate(any_model, input_ids=ids, attention_mask=mask, past_key_values=cache).sequences
    chat = torch.cat([first, torch.cat([tokens(40, seed=9 + row) for row in range(len(LENGTHS))])], dim=1)
    mask = torch.nn.functional.pad(mask, (0, chat.shape[1] - mask.shape[1]), value=1)
    output = generate(any_model, input_ids=chat, attention_mask=mask, past_key_values=cache)
    assert_follows_one_pass(any_model, output, mask, prompt_end=ids.shape[1])


def test_questions_after_one_cached_prefix(model):
    prefix = DynamicCache(config=model.config)
    with torch.no_grad():
        model(PROMPT, past_key_values=prefix)
    for seed, length in enumerate([2, 20]):
        prompt = torch.cat([PROMPT, tokens(length, seed)], dim=1)
        output = generate(model, input_ids=prompt, past_key_values=copy.deepcopy(prefix))
        assert_follows_one_pass(model, output, prompt_end=PROMPT.shape[1])


def test_several_answers_from_one_cached_prefix(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
    decisions = last_routing(model).decisions.expand(3, -1, -1)
    cache.batch_repeat_interleave(3)
    prompts = torch.cat([torch.cat([PROMPT, tokens(4, seed)], dim=1) for seed in range(3)])
    output = generate(model, input_ids=prompts, past_key_values=cache)
    assert_follows_one_pass(model, output, prompt_end=PROMPT.shape[1], decisions=decisions)


def test_streamed_tokens_are_those_returned(model):
    class Streamer(TextStreamer):
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens.extend(value.flatten().tolist())

        def end(self):
            self.tokens.append("end")

    streamer = Streamer()
    output = generate(model, input_ids=PROMPT, streamer=streamer)
    assert streamer.tokens == [*output.sequences[0].tolist(), "end"]
    assert len(output.logits) == NEW_TOKENS
