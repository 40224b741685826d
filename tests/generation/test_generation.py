"""Generation follows the prompt's routing: the same tokens as recomputing, alone or in a batch, with any cache."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from generation.tiny import LENGTHS, assert_same_logits, generate, left_padded, logits_of, routed, tokens
from transformers import DynamicCache, StaticCache

from elastic_peft import ElasticConfig, forced_routing, last_routing


@pytest.fixture(scope="module")
def model():
    return routed()


@torch.no_grad()
def test_decode_full_attends_everything_after_the_prompt():
    model = routed(decode="full")
    prompt = tokens(40)
    with forced_routing(model, "sparse"):
        output = generate(model, input_ids=prompt)
        cache = DynamicCache(config=model.config)
        model(prompt, past_key_values=cache)
    with model.disable_adapter():
        follow_up = model(output.sequences[:, 40:-1], past_key_values=cache).logits[0]
    assert_same_logits(logits_of(output)[1:], follow_up)


@pytest.mark.parametrize("mode_pair", ["FA-SSA", "FA-XA", "XA-SSA"])
@torch.no_grad()
def test_left_padded_batch_generates_what_each_row_generates_alone(mode_pair):
    model = routed(mode_pair)
    ids, mask = left_padded()
    together = generate(model, input_ids=ids, attention_mask=mask)
    decisions = last_routing(model).decisions
    assert (decisions != decisions[:1]).any()
    for index, length in enumerate(LENGTHS):
        alone = generate(model, input_ids=tokens(length, index))
        assert torch.equal(last_routing(model).decisions[0], decisions[index]), f"row {index}"
        assert_same_logits(logits_of(together, index), logits_of(alone))


@torch.no_grad()
def test_static_cache_equals_dynamic_cache(model):
    prompt = tokens(40)
    static = generate(model, input_ids=prompt, cache_implementation="static", disable_compile=True)
    assert_same_logits(logits_of(static), logits_of(generate(model, input_ids=prompt)))


@torch.no_grad()
def test_beams_equal_recomputing_every_step(model):
    prompt = tokens(40)
    cached = generate(model, input_ids=prompt, num_beams=3, num_return_sequences=3)
    recomputed = generate(model, input_ids=prompt, num_beams=3, num_return_sequences=3, use_cache=False)
    assert torch.equal(cached.sequences, recomputed.sequences)


@torch.no_grad()
def test_prompt_lookup_equals_greedy(model):
    prompt = tokens(20).repeat(1, 2)
    lookup = generate(model, input_ids=prompt, prompt_lookup_num_tokens=3)
    assert torch.equal(lookup.sequences, generate(model, input_ids=prompt).sequences)


@torch.no_grad()
def test_a_copied_prefix_cache_carries_its_routes(model):
    cache = DynamicCache(config=model.config)
    model(tokens(40), past_key_values=cache)
    copied = copy.deepcopy(cache)
    suffix = tokens(3, seed=9)
    with forced_routing(model, "retrieval"):
        assert torch.equal(model(suffix, past_key_values=copied).logits, model(suffix, past_key_values=cache).logits)


@pytest.mark.parametrize(
    "make_cache", [DynamicCache, partial(StaticCache, max_cache_len=64)], ids=["dynamic", "static"]
)
@torch.no_grad()
def test_a_reset_cache_routes_its_next_prompt_afresh(model, make_cache):
    cache = make_cache(config=model.config)
    with forced_routing(model, "sparse"):
        model(tokens(40), past_key_values=cache)
    cache.reset()
    fresh = model(tokens(40, seed=3), past_key_values=cache).logits
    assert_same_logits(fresh, model(tokens(40, seed=3)).logits)


@pytest.mark.parametrize("unused", ["inputs_embeds", "inputs"])
@torch.no_grad()
def test_an_input_given_as_none_leaves_the_prompt_pinned(model, unused):
    options = {"input_ids": tokens(40), "use_cache": False}
    expected = generate(model, **options)
    logits = last_routing(model).logits
    output = generate(model, **options, **{unused: None})
    assert torch.equal(last_routing(model).logits, logits)
    assert torch.equal(output.sequences, expected.sequences)


@torch.no_grad()
def test_sampling_with_a_seed_repeats(model):
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(generate(model, input_ids=tokens(40), do_sample=True).sequences)
    assert torch.equal(*outputs)


@torch.no_grad()
def test_packed_rows_give_the_logits_of_the_separate_sequences():
    model = routed()
    model.base_model.model.set_attn_implementation("sdpa")
    rows = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    position_ids = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    packed = model(torch.cat(rows, dim=1), position_ids=position_ids, use_cache=False).logits[0]
    decisions = last_routing(model).decisions
    for index, (row, part) in enumerate(zip(rows, packed.split(LENGTHS))):
        torch.testing.assert_close(part, model(row).logits[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(last_routing(model).decisions[0], decisions[index])


@torch.no_grad()
def test_later_set_attn_implementation_takes_effect_in_routed_layers():
    model = routed()
    prompt = tokens(40)
    with forced_routing(model, "retrieval"):
        for implementation in ("sdpa", "eager"):
            model.base_model.model.set_attn_implementation(implementation)
            routed_logits = model(prompt).logits
            with model.disable_adapter():
                assert torch.equal(model(prompt).logits, routed_logits)


@torch.no_grad()
def test_model_compiles_as_one_graph():
    model = routed()
    prompt = tokens(40)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_same_logits(compiled(prompt, use_cache=False).logits, model(prompt, use_cache=False).logits)


@pytest.mark.parametrize("decode", ["routed", "full"])
@pytest.mark.parametrize("mode_pair", ["FA-SSA", "FA-XA", "XA-SSA"])
@torch.no_grad()
def test_scoring_an_answer_equals_generating_it(mode_pair, decode):
    model = routed(mode_pair, decode=decode)
    prompt = tokens(40)
    output = generate(model, input_ids=prompt)
    decisions = last_routing(model).decisions
    recomputed = generate(model, input_ids=prompt, use_cache=False)
    assert_same_logits(logits_of(recomputed), logits_of(output))

    # Right padding and the answer itself must not take part in the prompt's block selection.
    whole = torch.nn.functional.pad(output.sequences, (0, 5))
    mask = torch.ones_like(whole)
    mask[:, -5:] = 0
    scored = model(whole, attention_mask=mask, prompt_end=torch.tensor([40])).logits[0, 39:-6]
    assert torch.equal(last_routing(model).decisions, decisions)
    assert_same_logits(logits_of(output), scored)


@pytest.mark.parametrize("mode_pair", ["FA-XA", "XA-SSA"])
@torch.no_grad()
def test_an_answers_later_tokens_do_not_reach_earlier_ones(mode_pair):
    model = routed(mode_pair)
    first = tokens(48)
    second = first.clone()
    second[0, 47] = (second[0, 47] + 1) % 90 + 3
    logits = [model(ids, prompt_end=torch.tensor([40])).logits[0, :47] for ids in (first, second)]
    assert_same_logits(*logits)


@torch.no_grad()
def test_right_padding_does_not_change_xattention_or_its_sparsity():
    model = routed("FA-XA")
    row = tokens(33)
    alone, esr = model(row).logits[0], last_routing(model).esr
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[:, 33:] = 0
    padded = model(torch.nn.functional.pad(row, (0, 7)), attention_mask=mask).logits[0, :33]
    assert_same_logits(padded, alone)
    torch.testing.assert_close(last_routing(model).esr, esr)


@torch.no_grad()
def test_an_answer_skips_no_pairs_under_xattention():
    model = routed("FA-XA")
    with forced_routing(model, "sparse"):
        model(tokens(40))
        prompt = last_routing(model).esr
        model(torch.cat([tokens(40), tokens(10, seed=1)], dim=1), prompt_end=torch.tensor([40]))
    torch.testing.assert_close(last_routing(model).esr, prompt * (40 * 41) / (50 * 51))


@torch.no_grad()
def test_a_cache_is_continued_by_the_adapter_that_routed_it(model):
    model.add_adapter("other", ElasticConfig(mode_pair="FA-XA", sink_size=2, window_size=6, task_type="CAUSAL_LM"))
    cache = DynamicCache(config=model.config)
    try:
        model(tokens(40), past_key_values=cache)
        model.set_adapter("other")
        with pytest.raises(ValueError, match="the adapter that routed its prompt"):
            model(tokens(1), past_key_values=cache)
    finally:
        model.delete_adapter("other")
        model.set_adapter("default")


def test_a_model_is_freed_with_its_last_reference():
    model = routed()
    reference = weakref.ref(model.base_model.model)
    generate(model, input_ids=tokens(20))
    gc.disable()
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_interrupted_generation_leaves_the_model_usable(model, error):
    expected = generate(model, input_ids=tokens(40))
    routing = last_routing(model)
    calls = []

    def interrupt(*_):
        calls.append(None)
        if len(calls) == 3:
            raise error

    with model.base_model.model.model.layers[2].register_forward_pre_hook(interrupt), pytest.raises(error):
        generate(model, input_ids=tokens(20))
    assert torch.equal(generate(model, input_ids=tokens(40)).sequences, expected.sequences)
    assert torch.equal(last_routing(model).decisions, routing.decisions)
    with torch.no_grad():
        model(tokens(60))
    assert last_routing(model).lengths.tolist() == [60], "the interrupted prompt's length must not be pinned"


@pytest.mark.parametrize("call", ["generate_batch", "init_continuous_batching", "paged"])
def test_continuous_batching_is_refused(model, call):
    prompts, twin = [tokens(20)[0].tolist()], copy.deepcopy(model)
    calls = {
        "generate_batch": lambda: model.generate_batch(inputs=prompts),
        "init_continuous_batching": lambda: twin.init_continuous_batching(),
        "paged": lambda: model.generate(tokens(20), cache_implementation="paged"),
    }
    with pytest.raises(ValueError, match="Continuous batching must run without an active ELASTIC adapter"):
        calls[call]()


def test_the_base_model_still_batches_continuously():
    model = routed("FA-SSA")  # its own: transformers before 5.24 leaves the paged attention set
    with model.disable_adapter():
        assert model.init_continuous_batching() is not None


def test_models_in_one_process_keep_their_own_routing(model):
    other = routed("XA-SSA")
    generate(model, input_ids=tokens(40))
    routing = last_routing(model)
    with forced_routing(other, "sparse"):
        generate(other, input_ids=tokens(30))
        assert torch.equal(generate(model, input_ids=tokens(40)).sequences[:, :40], tokens(40))
    assert torch.equal(last_routing(model).decisions, routing.decisions)
    assert last_routing(other).decisions.all()
