"""Random requests to generate: every row is what recomputing it alone gives under its decisions."""

import functools
import math
import random

import pytest
import torch
from generation.tiny import assert_same_logits, left_padded, routed, tokens
from transformers import DynamicCache

from elastic_peft import forced_routing


REQUESTS, PER_TEST = 1000, 50
MAX_LENGTH = 4096  # of a prompt; a batch holds about twice as many tokens
NEW_TOKENS = 24
PAIRS = ["FA-SSA", "FA-XA", "XA-SSA"]
SINKS_AND_WINDOWS = [(2, 6), (0, 1), (5, 64), (128, 2048)]
STRATEGIES = ["greedy", "sampled", "beams", "prompt lookup", "second turn", "no cache"]


@functools.cache
def model_of(pair, sink_size, window_size):
    blocks = {"xattn_block_size": 64, "xattn_stride": 8}
    model = routed(pair, sink_size=sink_size, window_size=window_size, **blocks)
    model.base_model.model.set_attn_implementation("sdpa")
    return model


class Request:
    """A request that follows from its seed alone."""

    def __init__(self, seed):
        draw = random.Random(seed)
        self.draw = draw
        self.strategy = draw.choice(STRATEGIES)
        self.model = model_of(draw.choice(PAIRS), *draw.choice(SINKS_AND_WINDOWS))
        self.copies = draw.randint(2, 3) if self.strategy in ("sampled", "beams") else 1
        rows = 1 if self.strategy == "prompt lookup" else draw.randint(1, 8)
        longest = 64 if self.strategy == "no cache" else MAX_LENGTH
        lengths, left = [], 2 * longest // self.copies
        while left > 0 and len(lengths) < rows:
            lengths.append(min(left, round(math.exp(draw.uniform(0, math.log(longest))))))
            left -= lengths[-1]
        self.lengths = lengths
        self.ids, self.mask = left_padded(lengths)
        self.decisions = torch.rand(len(lengths), 4, 2, generator=torch.Generator().manual_seed(seed)) < draw.random()
        self.stops = draw.sample(range(3, 96), draw.choice([0, 3, 12])) if self.strategy != "second turn" else []

    def __str__(self):
        config = self.model.peft_config["default"]
        return (
            f"{self.strategy}, {config.mode_pair}, sink {config.sink_size}, window {config.window_size}, "
            f"prompts of {self.lengths} tokens, stops {self.stops}"
        )

    def generate(self, **options):
        inputs = {"input_ids": self.ids, "attention_mask": self.mask, "pad_token_id": 0}
        if self.strategy == "sampled":
            options |= {"do_sample": True, "num_return_sequences": self.copies}
        if self.strategy == "beams":
            options |= {"num_beams": self.copies, "num_return_sequences": self.copies}
        if self.strategy == "prompt lookup":
            options["prompt_lookup_num_tokens"] = self.draw.randint(1, 30)
        if self.strategy == "no cache":
            options["use_cache"] = False
        options |= {"max_new_tokens": self.draw.randint(2, NEW_TOKENS), "do_sample": options.get("do_sample", False)}
        decisions = self.decisions.repeat_interleave(self.copies, dim=0)
        with forced_routing(self.model, decisions):
            return self.model.generate(
                **inputs,
                **options,
                eos_token_id=self.stops or None,
                output_logits=True,
                return_dict_in_generate=True,
            )

    def run(self):
        """What `generate` returned, and where its generated tokens begin."""
        if self.strategy != "second turn":
            return self.generate(), self.ids.shape[1]
        cache = DynamicCache(config=self.model.config)
        first = self.generate(past_key_values=cache).sequences
        added = self.draw.choice([1, 8, 33, 34, 200])
        self.ids = torch.cat([first, tokens(added, seed=1).expand(len(first), -1)], dim=1)
        self.mask = torch.nn.functional.pad(self.mask, (0, self.ids.shape[1] - self.mask.shape[1]), value=1)
        return self.generate(past_key_values=cache), self.ids.shape[1]


@torch.no_grad()
def check(request):
    width = max(request.lengths)
    output, begin = request.run()
    scores = request.model.compute_transition_scores(
        output.sequences, output.logits, getattr(output, "beam_indices", None), normalize_logits=True
    )
    for row, sequence in enumerate(output.sequences):
        index = row // request.copies
        new = sequence[begin:].tolist()
        end = next((i + 1 for i, token in enumerate(new) if token in request.stops), len(new))
        own = sequence[width - request.lengths[index] : begin + end]
        with forced_routing(request.model, request.decisions[index]):
            logits = request.model(own[None, :-1], prompt_end=request.lengths[index], use_cache=False).logits[0, -end:]
        expected = logits.log_softmax(dim=-1)
        assert_same_logits(scores[row, :end], expected.gather(1, own[-end:, None]).squeeze(1))
        if request.strategy not in ("sampled", "beams"):
            assert_same_logits(scores[row, :end], expected.amax(dim=1))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, REQUESTS, PER_TEST))
def test_requests_give_what_recomputing_each_row_gives(first):
    for seed in range(first, first + PER_TEST):
        request = Request(seed)
        try:
            check(request)
        except Exception as error:
            error.add_note(f"request {seed}: {request}")
            raise
