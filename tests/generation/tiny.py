"""A tiny routed model and what the tests of generation do with it."""

import torch
from families_zoo import build, perturb_routers
from peft import get_peft_model

from elastic_peft import ElasticConfig, calibrate_standardization


LENGTHS = [40, 17, 25]
NEW_TOKENS = 12


def tokens(length, seed=0):
    return torch.randint(3, 96, (1, length), generator=torch.Generator().manual_seed(seed))


SIZES = {
    "sink_size": 2,
    "window_size": 6,
    "pool_size": 4,
    "xattn_block_size": 4,
    "xattn_stride": 2,
    "xattn_threshold": 0.6,
}


def routed(mode_pair="FA-SSA", **overrides):
    config = ElasticConfig(mode_pair=mode_pair, task_type="CAUSAL_LM", **{**SIZES, **overrides})
    model = perturb_routers(get_peft_model(build("llama", num_hidden_layers=4), config))
    calibrate_standardization(model, [{"input_ids": torch.cat([tokens(30, seed) for seed in range(8)])}])
    return model


def left_padded(lengths=LENGTHS):
    """Rows of these lengths and their mask."""
    width = max(lengths)
    rows = [torch.nn.functional.pad(tokens(length, seed), (width - length, 0)) for seed, length in enumerate(lengths)]
    mask = torch.stack([torch.arange(width) >= width - length for length in lengths]).long()
    return torch.cat(rows), mask


def generate(model, **inputs):
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    return model.generate(**{**options, **inputs}, output_logits=True, return_dict_in_generate=True)


def logits_of(output, row=0):
    return torch.stack([step[row] for step in output.logits])


def assert_same_logits(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
