"""Odd prompts and wrong arguments have a defined result or one clear error."""

import numpy as np
import pytest
import torch
from peft import get_peft_model
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

from elastic_peft import (
    ElasticConfig,
    RoutingTape,
    calibrate_standardization,
    forced_routing,
    last_routing,
)
from elastic_peft.sequences import find_sequences


@pytest.fixture
def model(make_routed):
    return make_routed()


def forward(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("mode_pair", "SSA-FA", "`mode_pair` must be one of 'FA-SSA', 'FA-XA', 'XA-SSA', got 'SSA-FA'"),
        ("decode", "dense", "`decode` must be one of 'routed', 'full', got 'dense'"),
        ("target_sparsity", 1.5, r"`target_sparsity` must be in \[0, 1\], got 1.5"),
        ("target_sparsity", float("nan"), r"`target_sparsity` must be in \[0, 1\], got nan"),
        ("t_values", {}, "`t_values` must map at least one task name to its target, got {}"),
        ("t_values", {"qa": -0.1}, r"`t_values\['qa'\]` must be in \[0, 1\], got -0.1"),
        ("sink_size", -1, "`sink_size` must be an integer of at least 0, got -1"),
        ("window_size", 0, "`window_size` must be an integer of at least 1, got 0"),
        ("window_size", 2.0, "`window_size` must be an integer of at least 1, got 2.0"),
        ("window_size", 2**31, "`window_size` must be at most 2147483647, got 2147483648"),
        ("window_size", np.float64(2.0), r"`window_size` must be an integer of at least 1, got np.float64\(2.0\)"),
        ("window_size", np.int64(0), r"`window_size` must be an integer of at least 1, got np.int64\(0\)"),
        ("xattn_block_size", 100, r"`xattn_block_size` must be a multiple of `xattn_stride` \(16\), got 100"),
        ("xattn_stride", 0, "`xattn_stride` must be an integer of at least 1, got 0"),
        ("xattn_threshold", 0.0, r"`xattn_threshold` must be in \(0, 1\], got 0.0"),
        ("pool_size", 0, "`pool_size` must be an integer of at least 1, got 0"),
        ("router_expansion", 0, "`router_expansion` must be an integer of at least 1, got 0"),
        ("standardize_input", "yes", "`standardize_input` must be True or False, got 'yes'"),
        ("format_version", 2, "`format_version` must be at most 1 .*, got 2: upgrade elastic_peft"),
        ("format_version", 0, "`format_version` must be an integer of at least 1, got 0"),
        ("format_version", True, "`format_version` must be an integer of at least 1, got True"),
        ("sparsity_bias", float("nan"), "`sparsity_bias` must be a number, got nan"),
        ("sparsity_bias", 10**400, "`sparsity_bias` must be a number, got 10+[.]$"),
        ("layers_to_transform", [], r"`layers_to_transform` must be None or layer indices from 0, got \[\]"),
        ("layers_to_transform", [True], r"`layers_to_transform` must be None or layer indices from 0, got \[True\]"),
        ("layers_to_transform", [-1], r"`layers_to_transform` must be None or layer indices from 0, got \[-1\]"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else None,
)
def test_config_refuses(field, value, message):
    with pytest.raises(ValueError, match=message):
        ElasticConfig(**{field: value})


def test_a_prompt_of_one_token_is_routed_and_dense(model, make_base, inputs):
    token = inputs["input_ids"][:1, :1]
    assert torch.equal(forward(model, input_ids=token), forward(make_base(), input_ids=token))
    record = last_routing(model)
    assert record.implementation == "dense", "one token lies within every sink and window"
    assert record.esr.tolist() == [0.0]


def test_a_row_of_one_token_equals_that_token_alone(model, inputs):
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, :-1] = 0
    together = forward(model, input_ids=inputs["input_ids"], attention_mask=mask)
    decisions = last_routing(model).decisions[1]
    alone = forward(model, input_ids=inputs["input_ids"][1:, -1:])
    assert torch.equal(last_routing(model).decisions[0], decisions)
    torch.testing.assert_close(together[1, -1], alone[0, -1], rtol=1e-4, atol=1e-4)


def test_generation_from_one_token_crosses_the_window(model, inputs):
    token = inputs["input_ids"][:1, :1]
    assert model.generate(input_ids=token, max_new_tokens=12, do_sample=False).shape == (1, 13)
    assert last_routing(model).lengths.tolist() == [1]


def test_an_empty_prompt_pools_the_whole_sequence(model, inputs):
    expected = forward(model, **inputs)
    logits = last_routing(model).logits
    assert torch.equal(forward(model, **inputs, prompt_end=torch.tensor([0, 0])), expected)
    assert torch.equal(last_routing(model).logits, logits)


def test_a_prompt_end_beyond_the_row_is_its_end(model, inputs):
    expected = forward(model, **inputs)
    assert torch.equal(forward(model, **inputs, prompt_end=torch.tensor([1000, 40])), expected)


def test_a_row_of_padding_leaves_the_other_rows_alone(model, inputs):
    mask = torch.ones_like(inputs["input_ids"])
    mask[1] = 0
    logits = forward(model, input_ids=inputs["input_ids"], attention_mask=mask)
    record = last_routing(model)
    alone = forward(model, input_ids=inputs["input_ids"][:1])
    torch.testing.assert_close(logits[:1], alone, rtol=1e-4, atol=1e-4)
    assert logits.isfinite().all()
    assert record.lengths.tolist() == [40, 0]
    assert record.esr[1] == 0, "there is no pair to skip in an empty row"


def test_a_row_of_padding_has_finite_gradients(model, inputs):
    mask = torch.ones_like(inputs["input_ids"])
    mask[1] = 0
    labels = inputs["input_ids"].masked_fill(mask == 0, -100)
    tape = RoutingTape()
    model.train()
    output = model(input_ids=inputs["input_ids"], attention_mask=mask, labels=labels, elastic_tape=tape)
    (output.loss + tape.msr().sum()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.requires_grad)


def test_padding_inside_a_row_is_refused(model, inputs):
    inputs["attention_mask"][0, 10] = 0
    with pytest.raises(ValueError, match="`attention_mask` must not have padding between valid tokens of a row"):
        forward(model, **inputs)


def visible_to(*, documents=(40,), image=()):
    """A 4D mask of packed documents, whose tokens in `image` see each other in both directions."""
    mask = torch.block_diag(*(torch.ones(size, size).tril() for size in documents)).bool()
    for token in image:
        mask[token, list(image)] = True
    return mask[None, None].expand(2, 1, -1, -1)


@pytest.mark.parametrize(
    "mask", [visible_to(documents=(25, 15)), visible_to(image=(8, 9, 10))], ids=["two-documents", "two-directions"]
)
def test_a_mask_that_sparse_heads_would_not_follow_is_refused(model, inputs, mask):
    with pytest.raises(ValueError, match="`attention_mask` of 4 dimensions must hide padding and later tokens"):
        forward(model, input_ids=inputs["input_ids"], attention_mask=mask)


def test_a_causal_mask_of_four_dimensions_equals_none(model, inputs):
    given = forward(model, input_ids=inputs["input_ids"], attention_mask=visible_to())
    assert torch.equal(given, forward(model, input_ids=inputs["input_ids"]))


def test_a_mask_of_another_kind_is_refused():
    mask = create_block_mask(lambda b, h, q, k: k <= q, 2, None, 40, 40, device="cpu")
    with pytest.raises(ValueError, match=r"`attention_mask` must be a tensor of 2 or 4 dimensions .* BlockMask"):
        find_sequences(2, 40, torch.device("cpu"), attention_mask=mask)


@pytest.mark.parametrize(
    ("prompt_end", "message"),
    [
        (torch.tensor([3]), r"`prompt_end` must hold one value for each of the 2 sequences, got shape \(1,\)"),
        (torch.tensor([[3, 3]]), r"`prompt_end` must hold one value for each of the 2 sequences, got shape \(1, 2\)"),
        (torch.tensor([3.5, 3.0]), "`prompt_end` must hold integers, got torch.float32"),
    ],
    ids=["too-few", "two-dimensional", "fractions"],
)
def test_prompt_end_of_another_form_is_refused(model, inputs, prompt_end, message):
    with pytest.raises(ValueError, match=message):
        forward(model, **inputs, prompt_end=prompt_end)


def test_seeds_for_other_sequences_are_refused(model, inputs):
    model.train()
    with pytest.raises(ValueError, match="`seeds` must hold one seed for each of the 2 sequences, got 1"):
        forward(model, **inputs, elastic_tape=RoutingTape(seeds=[1]))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(ValueError, match="`temperature` must be positive"):
        RoutingTape(temperature=temperature)


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        ("dense", "`decisions` must be 'retrieval', 'sparse' or a bool tensor, got 'dense'"),
        (torch.ones(2, 2), r"`decisions` must be a bool tensor .*, got torch.float32 \(2, 2\)"),
        (torch.ones(3, 2, dtype=torch.bool), r"must cover 2 routed layers with \[2\] heads each, got .* \(3, 2\)"),
        (torch.ones(3, 2, 2, dtype=torch.bool), r"must cover 2 sequences, got torch.bool \(3, 2, 2\)"),
    ],
    ids=["word", "float", "layers", "sequences"],
)
def test_forced_decisions_of_another_form_are_refused_and_do_not_stay(model, inputs, logits, decisions, message):
    expected = logits(model)
    with pytest.raises(ValueError, match=message), forced_routing(model, decisions):
        forward(model, **inputs)
    assert torch.equal(logits(model), expected)


def test_reentrant_checkpointing_is_refused(model, inputs):
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    with pytest.raises(ValueError, match="`gradient_checkpointing_kwargs` must set use_reentrant to False, got True"):
        model(**inputs)


@pytest.mark.parametrize("task_type", [None, "CAUSAL_LM"])
@pytest.mark.parametrize("given", ["argument", "generation_config", "generation_config_by_position"])
def test_chunked_prefill_is_refused(make_routed, inputs, given, task_type):
    args, options = (), {**inputs, "prefill_chunk_size": 8}
    if given != "argument":
        options["generation_config"] = GenerationConfig(prefill_chunk_size=options.pop("prefill_chunk_size"))
    if given == "generation_config_by_position":
        args = (options.pop("input_ids"), options.pop("generation_config"))
    with pytest.raises(ValueError, match="`prefill_chunk_size` must be None with an ELASTIC adapter, got 8"):
        make_routed(task_type=task_type).generate(*args, **options, max_new_tokens=2)


def test_a_cache_filled_without_routing_is_refused(model, inputs):
    cache = DynamicCache()
    ids = inputs["input_ids"]
    with model.disable_adapter():
        forward(model, input_ids=ids[:, :20], past_key_values=cache)
    with pytest.raises(ValueError, match="`cache` must have been filled with this adapter active, got one with 20"):
        forward(model, input_ids=ids[:, 20:], past_key_values=cache)


class OtherLayer(DynamicLayer):
    pass


def test_a_cache_that_cannot_remember_routing_is_refused(model, inputs):
    cache = DynamicCache()
    cache.layers = [OtherLayer(), OtherLayer()]
    with pytest.raises(ValueError, match=r"`cache` must have DynamicLayer or StaticLayer layers .*, got OtherLayer"):
        forward(model, **inputs, past_key_values=cache)


def test_a_cache_without_layers_is_refused(model, inputs):
    with pytest.raises(ValueError, match="`cache` must be a transformers cache with layers, got tuple"):
        forward(model, **inputs, past_key_values=((torch.zeros(2, 2, 3, 16),) * 2,) * 2)


def test_logits_that_are_not_numbers_choose_retrieval(model, inputs):
    with torch.no_grad():
        model.get_base_model().model.layers[0].self_attn.router.elastic_task_up["default"].weight[0, 0] = float("nan")
    assert forward(model, **inputs).isfinite().all()
    assert not last_routing(model).decisions[:, 0].any()


def test_a_model_without_an_adapter_has_no_routing(make_base):
    with pytest.raises(ValueError, match="`model` must have an ELASTIC adapter, got LlamaForCausalLM without one"):
        last_routing(make_base())


@pytest.mark.parametrize("given", [None, "x"], ids=["none", "text"])
def test_what_is_no_model_has_no_routing(given):
    with pytest.raises(ValueError, match=f"`model` must have an ELASTIC adapter, got {type(given).__name__} without"):
        last_routing(given)


def test_a_tape_of_another_kind_is_refused(model, inputs):
    with pytest.raises(ValueError, match="`elastic_tape` must be a RoutingTape, got dict"):
        model(**inputs, elastic_tape={})


def test_a_pass_without_input_is_refused(model):
    with pytest.raises(ValueError, match="`input_ids` or `inputs_embeds` must be a tensor, got NoneType"):
        model(use_cache=False)


def test_calibration_needs_two_sequences(model, inputs):
    with pytest.raises(ValueError, match="`batches` must hold at least one batch, got none"):
        calibrate_standardization(model, [])
    with pytest.raises(ValueError, match="`batches` must hold at least 2 sequences, got 1"):
        calibrate_standardization(model, [{"input_ids": inputs["input_ids"][:1]}])


def test_failed_calibration_keeps_the_statistics(model, inputs, logits):
    expected = logits(model)
    base = model.get_base_model()
    weight = base.model.layers[1].self_attn.k_proj.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="`model` must give finite keys, got others in layer 1"):
        calibrate_standardization(model, [{"input_ids": inputs["input_ids"].flip(1)}])
    with torch.no_grad():
        weight.copy_(good)
    assert torch.equal(logits(model), expected)


def test_calibration_of_raw_input_is_refused(make_base, make_config, inputs):
    model = get_peft_model(make_base(), make_config(standardize_input=False))
    with pytest.raises(ValueError, match="`model` must have an active adapter with `standardize_input=True`"):
        calibrate_standardization(model, [inputs])


def test_attention_weights_are_refused(model, inputs):
    with pytest.raises(ValueError, match="`output_attentions` must be False"):
        forward(model, **inputs, output_attentions=True)


@pytest.mark.parametrize("task_type", ["SEQ_CLS", "TOKEN_CLS", "SEQ_2_SEQ_LM", "QUESTION_ANS"])
def test_heads_that_need_training_are_refused(make_config, task_type):
    with pytest.raises(ValueError, match="`task_type` must be CAUSAL_LM, FEATURE_EXTRACTION or None"):
        make_config(task_type=task_type)
