"""Rows of generation: what a whole routed model holds and how fast it decodes, against the same model dense."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from benchmark import Times, compare, milliseconds, peak_memory, wall_milliseconds
from inputs import label
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.models.llama import modeling_llama
from whole_model import compiled_parts, make_decisions, make_model

from elastic_peft import forced_routing, last_routing


NEW_TOKENS = 256
WARM_UP = 4096
# Together with the captured step, at most NEW_TOKENS: what a cache has room for without being laid out anew.
EAGER_STEPS, ROUNDS, REPLAYS = 8, 5, 47
CONDITIONS = (
    f"Llama-3.1-8B shapes, random bf16 weights, FA-SSA, decisions forced, room for {NEW_TOKENS} new tokens; baseline: "
    "the same model on cuDNN SDPA, adapter disabled, its cache written in place; decoding: greedy steps, on both "
    "sides replays of a CUDA graph with norms, rotary embeddings and MLPs compiled by torch.compile, rounds alternate "
    "at batch 1 and follow each other at the largest batch, median; eager: the same steps with neither, dense ones on "
    "FA2, by the host's clock; the largest batch: as many prompts as can be prefilled one after the other while the "
    "caches of those before stay, decoded together as copies of one"
)


class PreallocatedLayer(DynamicLayer):
    """A dense cache layer with room for `NEW_TOKENS`: `DynamicLayer` itself copies the cache at every token."""

    def update(self, key_states, value_states, *args, **kwargs):
        """Writes the next tokens; returns all so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            batch, heads, length, head_dim = key_states.shape
            self.storage = key_states.new_empty(2, batch, heads, length + NEW_TOKENS, head_dim)
            self.length = 0
        end = self.length + key_states.shape[2]
        self.storage[0, :, :, self.length : end] = key_states
        self.storage[1, :, :, self.length : end] = value_states
        self.length = end
        self.keys, self.values = self.storage[:, :, :, :end]
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats):
        """Copies each sequence."""
        self.storage = self.storage.repeat_interleave(repeats, dim=1)
        self.keys, self.values = self.storage[:, :, :, : self.length]


@dataclass
class Side:
    """One of the two that are compared.

    Args:
        model: the routed model.
        new_cache: makes an empty cache.
        context: makes what a forward pass runs in.
    """

    model: torch.nn.Module
    new_cache: Callable[[], Cache]
    context: Callable[[], AbstractContextManager]

    def forward(self, ids: Tensor, cache: Cache, **options: Any) -> Tensor:
        """Logits of the last token, `[B, 1, vocabulary]`."""
        with self.context():
            return self.model(ids, past_key_values=cache, logits_to_keep=1, **options).logits

    def prefill(self, ids: Tensor) -> Cache:
        """The cache of a prompt `[B, S]`."""
        cache = self.new_cache()
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            self.forward(ids, cache)
        return cache


def rows(lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The rows of each length."""
    with torch.no_grad():
        routed, dense = make_sides()
        for side in (routed, dense):
            side.prefill(make_prompt(WARM_UP))
        for length in lengths:
            yield from measure(routed, dense, length)


def make_sides() -> tuple[Side, Side]:
    """The routed model, and the same one with dense attention."""
    model, decisions = make_model(["FA-SSA"]), make_decisions().cuda()
    routed = Side(model, lambda: DynamicCache(config=model.config), lambda: forced_routing(model, decisions))
    return routed, Side(model, lambda: Cache(layer_class_to_replicate=PreallocatedLayer), model.disable_adapter)


def make_prompt(length: int) -> Tensor:
    return torch.randint(3, 512, (1, length), generator=torch.Generator().manual_seed(length)).cuda()


def measure(routed: Side, dense: Side, length: int) -> Iterator[dict[str, Any]]:
    """The rows of one length."""
    ids, name = make_prompt(length), label(length)
    sides = {"ours": routed, "dense": dense}
    caches, held, peak, times = {}, {}, {}, {}
    without_caches = allocated()
    for key, side in sides.items():
        before = allocated()

        def run(key=key, side=side):
            caches[key] = side.prefill(ids)

        peak[key] = peak_memory(lambda key=key, run=run: times.update({key: [wall_milliseconds(run)]}))
        peak[key] -= before - without_caches
        held[key] = allocated() - before
    msr = last_routing(routed.model).msr.mean().item()
    yield amounts(f"kv_bytes/{name}", held, "bytes", msr=msr)
    prefill = {"prefill_ms": times["ours"][0], "baseline_prefill_ms": times["dense"][0]}
    yield amounts(f"peak_memory/generate/{name}", peak, "bytes", **prefill)

    eager = {key: eager_milliseconds(side, caches[key], length) for key, side in sides.items()}
    steps = {key: capture_step(side, caches[key], length) for key, side in sides.items()}
    times = {key: [] for key in sides}
    for _ in range(ROUNDS):
        for key, step in steps.items():
            times[key] += milliseconds(step, REPLAYS)
    yield compare_steps(f"decode_tokens_per_s/{name}/batch1", times, eager, batch=1)
    steps.clear()
    caches.clear()

    batch = {key: largest_batch(side, ids, held[key], peak[key]) for key, side in sides.items()}
    yield amounts(f"max_batch/{name}", batch, "sequences")
    batched = {key: decode_batch(side, ids, batch["dense"]) for key, side in sides.items()}
    times, eager = ({key: result[place] for key, result in batched.items()} for place in (0, 1))
    yield compare_steps(f"decode_tokens_per_s/{name}/batchmax", times, eager, batch=batch["dense"])


def eager_milliseconds(side: Side, cache: Cache, length: int) -> float:
    """Milliseconds of one step of decoding by the host's clock; the first one does not count.

    Dense attention runs FA2 here: cuDNN prepares itself for each new length.
    """
    batch = batch_size(cache)
    ids, position = torch.full((batch, 1), 5, device="cuda"), torch.full((batch, 1), length, device="cuda")

    def steps():
        for _ in range(EAGER_STEPS):
            side.forward(ids, cache, position_ids=position)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        side.forward(ids, cache, position_ids=position)
        return wall_milliseconds(steps) / EAGER_STEPS


def capture_step(side: Side, cache: Cache, length: int) -> Callable[[], None]:
    """One greedy step of decoding as a replay: it reads its own token and position."""
    batch = batch_size(cache)
    ids = torch.full((batch, 1), 5, device="cuda")
    position = torch.full((batch, 1), length + 1 + EAGER_STEPS, device="cuda")
    graph = torch.cuda.CUDAGraph()
    # The newest token needs no mask: transformers makes one while a graph is captured, and repeats keys and values.
    no_mask = mock.patch.object(modeling_llama, "create_causal_mask", return_value=None)
    with no_mask, compiled_parts(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        side.forward(ids, cache, position_ids=position)
        with torch.cuda.graph(graph):
            logits = side.forward(ids, cache, position_ids=position)
            ids.copy_(logits.argmax(dim=-1))
            position.add_(1)
    return graph.replay


def decode_batch(side: Side, ids: Tensor, batch: int) -> tuple[list[float], float]:
    """Milliseconds of each replayed step of `batch` copies of one prompt, and of an eager step."""
    cache = side.prefill(ids)
    cache.batch_repeat_interleave(batch)
    release_memory()
    eager = eager_milliseconds(side, cache, ids.shape[1])
    step = capture_step(side, cache, ids.shape[1])
    times = [time for _ in range(ROUNDS) for time in milliseconds(step, REPLAYS)]
    del step, cache
    release_memory()
    return times, eager


def largest_batch(side: Side, ids: Tensor, held: int, peak: int) -> int:
    """How many prompts fit: prefilled one after the other, the caches of those before stay.

    Args:
        side: what prefills.
        ids: `[1, S]`, the prompt of each sequence.
        held: bytes that one cache holds.
        peak: bytes allocated at most while the first prompt is prefilled.
    """
    release_memory()
    estimate = (torch.cuda.mem_get_info()[1] - peak) // held
    for others in range(estimate, 0, -1):
        caches: list[Cache] = []
        try:
            caches = [side.prefill(ids)]
            caches[0].batch_repeat_interleave(others)
            while True:
                caches.append(side.prefill(ids))
        except torch.OutOfMemoryError:
            fitted = others + len(caches) - 1 if caches and batch_size(caches[0]) == others else 0
        caches.clear()
        release_memory()
        if fitted > others:
            return fitted
    return 1


def batch_size(cache: Cache) -> int:
    """Sequences of a cache of either side."""
    layer = cache.layers[-1]
    return len(layer.gate) if hasattr(layer, "gate") else layer.keys.shape[0]


def allocated() -> int:
    """Bytes allocated, after what nobody holds is freed."""
    release_memory()
    return torch.cuda.memory_allocated()


def release_memory() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def amounts(name: str, values: dict[str, int], unit: str, **fields: Any) -> dict[str, Any]:
    """A row of amounts; `ratio` = ours / dense."""
    row = {"name": name, f"ours_{unit}": values["ours"], "baseline": "dense", f"baseline_{unit}": values["dense"]}
    return row | {"ratio": values["ours"] / values["dense"]} | fields


def compare_steps(name: str, times: dict[str, list[float]], eager: dict[str, float], *, batch: int) -> dict[str, Any]:
    """A row of decoding; `speedup` = tokens a second, ours / dense."""
    row = compare(name, Times(times["ours"], "graph"), "cudnn", Times(times["dense"], "graph"), batch=batch)
    for prefix in ("ours", "baseline"):
        row[f"{prefix}_tokens_per_s"] = batch / row[f"{prefix}_ms"] * 1e3
    return row | {
        "eager_ms": eager["ours"],
        "baseline_eager_ms": eager["dense"],
        "eager_speedup": eager["dense"] / eager["ours"],
    }
