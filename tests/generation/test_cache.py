"""The cache of a routed model: what it frees, what happens to it between tokens, and what it refuses."""

import copy
import pickle
import weakref
from functools import partial

import pytest
import torch
from generation.tiny import assert_same_logits, generate, left_padded, routed, tokens
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticLayer

from elastic_peft import forced_routing, last_routing, operators
from elastic_peft.cache import RoutedDynamicLayer, RoutedRaggedLayer, make_routing_memory
from elastic_peft.ragged_store import SLACK, _select


@pytest.fixture(scope="module")
def model():
    return routed()


@torch.no_grad()
def filled_cache(model, input_ids, decisions="sparse", **inputs):
    cache = DynamicCache(config=model.config)
    with forced_routing(model, decisions):
        model(input_ids, past_key_values=cache, **inputs)
    return cache


def held_bytes(cache):
    """Bytes of every tensor that the cache's layers refer to, each storage once."""
    storages = {}
    pending = list(cache.layers)
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            storages[item.data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, list | tuple):
            pending.extend(item)
        elif hasattr(item, "__dict__") and not isinstance(item, type):
            pending.extend(vars(item).values())
    return sum(storages.values())


def test_three_sparse_heads_of_four_leave_a_third_of_a_long_prompt(model):
    length = 1200
    decisions = torch.tensor([[True, True], [True, False], [True, True], [False, True]])
    whole = held_bytes(filled_cache(routed(decode="full"), tokens(length), decisions))
    freed = held_bytes(filled_cache(model, tokens(length), decisions))
    assert whole >= 2 * 4 * 2 * length * 16 * 4
    assert freed <= 0.33 * whole


@torch.no_grad()
def test_no_tensor_of_the_whole_prompt_outlives_its_layer(model):
    seen = []
    update = RoutedRaggedLayer.update

    def watch(layer, key, value, *args, **kwargs):
        assert all(reference() is None for reference in seen)
        seen.extend(weakref.ref(tensor) for tensor in (key, value))
        return update(layer, key, value, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoutedRaggedLayer, "update", watch)
        filled_cache(model, tokens(100))
    assert len(seen) == 8


@torch.no_grad()
def test_all_layers_read_the_order_of_beams_once(model, monkeypatch):
    ids, mask = left_padded([100, 60])
    cache = filled_cache(model, ids, attention_mask=mask)
    read = []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda index: read.append(index) or [index[0].item(), index[1].item()])
    for order in ([1, 1], [0, 0]):
        cache.reorder_cache(torch.tensor(order))
    assert len(read) == 1  # both rows are alike when the second order comes
    assert [layer.store.padding for layer in cache.layers] == [[40, 40]] * 4


def test_an_order_that_is_written_over_is_read_again():
    store_order = torch.tensor([1, 0])
    assert _select([5, 7], store_order) == [7, 5]
    store_order.fill_(0)
    assert _select([5, 7], store_order) == [5, 5]


def test_the_record_counts_the_bytes_that_are_held(model):
    ids, mask = left_padded([1000, 700])
    decisions = torch.tensor([[True, True], [True, False], [True, True], [False, True]])
    cache = filled_cache(model, ids, decisions, attention_mask=mask)
    record = last_routing(model)
    held = sum(2 * layer.store.keys.untyped_storage().nbytes() for layer in cache.layers)
    assert record.kv_bytes.sum() == held
    assert record.kv_bytes_dense.tolist() == [2 * 8 * length * 16 * 4 for length in (1000, 700)]
    assert record.kv_bytes[1] < record.kv_bytes[0] < 0.5 * record.kv_bytes_dense[0]


@torch.no_grad()
def test_without_a_cache_that_frees_the_record_counts_every_token():
    model = routed(decode="full")
    filled_cache(model, tokens(40))
    record = last_routing(model)
    assert torch.equal(record.kv_bytes, record.kv_bytes_dense)


def test_keys_that_need_gradients_are_kept_whole(model):
    cache = DynamicCache(config=model.config)
    model(tokens(40), past_key_values=cache)
    assert {type(layer) for layer in cache.layers} == {RoutedDynamicLayer}


@pytest.mark.parametrize("pair", ["FA-XA", "FA-SSA", "XA-SSA"])
@pytest.mark.parametrize("decode", ["routed", "full"])
@torch.no_grad()
def test_keys_are_freed_where_decoded_tokens_stream(pair, decode):
    cache = filled_cache(routed(pair, decode=decode), tokens(20))
    frees = decode == "routed" and pair != "FA-XA"
    assert {type(layer) for layer in cache.layers} == {RoutedRaggedLayer if frees else RoutedDynamicLayer}


def test_an_offloaded_cache_stays_whole(model):
    cache = DynamicCache(config=model.config)
    cache.offloading = True
    assert type(make_routing_memory(cache, 0, frees_keys=True)) is RoutedDynamicLayer


def test_a_cache_of_another_kind_is_refused(model):
    cache = DynamicCache(config=model.config)
    cache.layers[0] = DynamicSlidingWindowLayer(8)
    with pytest.raises(
        ValueError, match=r"`cache` must have DynamicLayer or StaticLayer layers .* got DynamicSliding"
    ):
        model(tokens(10), past_key_values=cache)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["deepcopy", "pickle"]
)
@torch.no_grad()
def test_a_copy_continues_on_its_own(model, copied):
    cache = filled_cache(model, tokens(60))
    other = copied(cache)
    expected = model(tokens(3, seed=1), past_key_values=cache).logits
    model(tokens(7, seed=2), past_key_values=cache)
    assert torch.equal(model(tokens(3, seed=1), past_key_values=other).logits, expected)


@pytest.mark.parametrize("added", [5, 40], ids=lambda n: f"{n}-tokens")
@torch.no_grad()
def test_selected_sequences_continue_as_their_own(model, added):
    ids, mask = left_padded([60, 40, 50])
    decisions = torch.rand(3, 4, 2, generator=torch.Generator().manual_seed(0)) < 0.5
    rows = torch.tensor([2, 0])
    suffix = torch.cat([tokens(added, seed) for seed in range(3)])
    mask_after = torch.nn.functional.pad(mask, (0, added), value=1)
    whole = filled_cache(model, ids, decisions, attention_mask=mask)
    chosen = copy.deepcopy(whole)
    chosen.batch_select_indices(rows)
    expected = model(suffix, attention_mask=mask_after, past_key_values=whole).logits[rows]
    assert_same_logits(model(suffix[rows], attention_mask=mask_after[rows], past_key_values=chosen).logits, expected)


@torch.no_grad()
def test_a_reset_cache_serves_the_model_without_its_adapter(model):
    cache = filled_cache(model, tokens(60))
    cache.reset()
    with model.disable_adapter():
        expected = generate(model, input_ids=tokens(20))
        assert torch.equal(generate(model, input_ids=tokens(20), past_key_values=cache).sequences, expected.sequences)


@torch.no_grad()
def test_a_cropped_cache_continues_as_if_the_rest_had_never_been(model):
    prompt, dropped, suffix = tokens(60), tokens(SLACK, seed=1), tokens(4, seed=2)
    expected = model(suffix, past_key_values=filled_cache(model, prompt)).logits
    cache = filled_cache(model, prompt)
    model(dropped, past_key_values=cache)
    cache.crop(-SLACK)
    assert cache.get_seq_length() == 60
    assert_same_logits(model(suffix, past_key_values=cache).logits, expected)


@torch.no_grad()
def test_cropping_what_is_freed_is_refused(model):
    cache = filled_cache(model, tokens(100))
    with pytest.raises(ValueError, match=f"`cache` must keep all but the last {SLACK} tokens .* got {SLACK + 1}"):
        cache.crop(-SLACK - 1)


CROPS_STATIC = pytest.mark.skipif(
    not hasattr(StaticLayer, "crop"), reason="this transformers cannot crop static caches"
)


@pytest.mark.parametrize(
    "make_cache",
    [DynamicCache, pytest.param(partial(StaticCache, max_cache_len=64), marks=CROPS_STATIC)],
    ids=["dynamic", "static"],
)
@torch.no_grad()
def test_a_cache_cropped_to_nothing_routes_its_next_prompt_afresh(model, make_cache):
    cache = make_cache(config=model.config)
    with forced_routing(model, "sparse"):
        model(tokens(60), past_key_values=cache)
    cache.crop(-60)
    assert_same_logits(model(tokens(40), past_key_values=cache).logits, model(tokens(40)).logits)


@torch.no_grad()
def test_freed_keys_are_not_continued_without_the_adapter(model):
    cache = filled_cache(model, tokens(60))
    with model.disable_adapter(), pytest.raises(ValueError, match="keys of its sparse heads are freed"):
        model(tokens(1), past_key_values=cache)


@pytest.mark.parametrize("decode", ["routed", "full"])
@torch.no_grad()
def test_a_prompt_padded_on_the_right_is_not_continued(decode):
    model = routed(decode=decode)
    cache = DynamicCache(config=model.config)
    ids, mask = torch.cat([tokens(20), tokens(20, seed=1)]), torch.ones(2, 20, dtype=torch.long)
    mask[1, 15:] = 0
    model(ids, attention_mask=mask, past_key_values=cache)
    with pytest.raises(ValueError, match="`attention_mask` must pad prompts on the left"):
        model(
            tokens(1).expand(2, 1),
            attention_mask=torch.nn.functional.pad(mask, (0, 1), value=1),
            past_key_values=cache,
        )


@torch.no_grad()
def test_padding_after_a_prompt_is_refused(model):
    ids, mask = left_padded()
    cache = filled_cache(model, ids, attention_mask=mask)
    later = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 1]])
    with pytest.raises(ValueError, match="`attention_mask` must be 1 for tokens that follow a prompt"):
        model(tokens(3).expand(3, 3), attention_mask=torch.cat([mask, later], dim=1), past_key_values=cache)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_float32_model_generates_under_autocast(model, dtype):
    # Rotary embedding leaves queries and keys in float32, values come in autocast's dtype.
    with torch.autocast("cpu", dtype):
        assert generate(model, input_ids=tokens(40)).sequences.shape == (1, 52)


def test_a_prompt_run_in_inference_mode_continues_without_it(model):
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(tokens(40), past_key_values=cache)
    with torch.no_grad():
        model(tokens(1), past_key_values=cache)
    assert cache.get_seq_length() == 41


def test_a_copied_prefix_continues_after_the_bias_changed():
    model = routed()
    prefix = copy.deepcopy(filled_cache(model, tokens(40)))
    model.peft_config["default"].sparsity_bias = 0.5
    with torch.no_grad():
        model(tokens(1), past_key_values=prefix)
    assert prefix.get_seq_length() == 41


@torch.no_grad()
def test_cropping_into_a_rows_padding_is_refused(model):
    input_ids, mask = left_padded([12, 3])
    cache = filled_cache(model, input_ids, attention_mask=mask)
    with pytest.raises(ValueError, match=r"`cache` must be cropped to 9 tokens at least, .* got 6"):
        cache.crop(-6)


def test_drafts_longer_than_the_slack_keep_the_cache_whole(model):
    prompt = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12] * 12])
    options = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    greedy = model.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=SLACK + 8, **options), greedy)


@pytest.mark.parametrize("operator", ["append_tokens", "routed_decode"])
@torch.no_grad()
def test_a_cache_after_a_pass_that_was_interrupted_is_refused_until_reset(model, monkeypatch, operator):
    def interrupt_the_second(*args, **kwargs):
        calls.append(operator)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(*args, **kwargs)

    calls, run = [], getattr(operators, operator)
    cache = filled_cache(model, tokens(40))
    with monkeypatch.context() as patch:
        patch.setattr(operators, operator, interrupt_the_second)
        with pytest.raises(KeyboardInterrupt):
            model(tokens(1), past_key_values=cache)
    with pytest.raises(ValueError, match="`cache` must hold the same tokens in every layer, got 40 to 41"):
        model(tokens(1), past_key_values=cache)
    cache.reset()
    assert_same_logits(model(tokens(40), past_key_values=cache).logits, model(tokens(40)).logits)
