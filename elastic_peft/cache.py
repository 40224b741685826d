"""Remembers a prompt's routing with its cache, so that every later token of a sequence follows the same decisions.

transformers' Cache calls each of its layers to reorder, repeat, select and reset sequences: the decisions live in the
layer objects and follow the keys through each of those calls. Where heads stream, the layer also frees the keys and
values that they never attend again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer

from .config import ElasticConfig
from .ragged_store import RaggedStore
from .sequences import Sequences


class LaterRules(NamedTuple):
    """What the tokens after a prompt follow of an adapter's configuration."""

    mode_pair: str
    decode: str
    sink_size: int
    window_size: int

    @classmethod
    def of(cls, config: ElasticConfig) -> LaterRules:
        """The part of `config` that later tokens follow."""
        return cls(config.mode_pair, config.decode, config.sink_size, config.window_size)


class RoutingMemory(CacheLayerMixin):
    """Adds one sequence's decisions to a cache layer.

    Attributes:
        plain: the kind of cache layer that it was.
        gate: bool `[B, H]`, True = sparse; `None` before a prompt was routed.
        start: int64 `[B]`, first valid key of each row; `None` without left padding.
        rules: what later tokens follow of the adapter that decided.
        store: the keys and values where the layer frees some; `None` where it holds them as ever, or is empty.
    """

    plain: type[CacheLayerMixin]
    gate: torch.Tensor | None = None
    start: torch.Tensor | None = None
    rules: LaterRules | None = None
    store: RaggedStore | None = None
    _is_padded_right = False

    def remember(self, gate: torch.Tensor, sequences: Sequences, config: ElasticConfig) -> None:
        """Keeps the decisions of the prompts whose keys this layer is about to receive, and whose they are.

        Args:
            gate: bool `[B, H]`, True = sparse.
            sequences: the prompts' sequences, one a row.
            config: configuration of the adapter that decided.
        """
        self.gate, self.rules = gate, LaterRules.of(config)
        self.start = None if sequences.start is None else sequences.start.to(gate.device)
        self._is_padded_right = sequences.is_padded_right

    def recall(self, config: ElasticConfig) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The remembered decisions and starts, for tokens that this layer is about to receive.

        Args:
            config: the active adapter's configuration.

        Returns:
            `gate` and `start`, as the attributes.

        Raises:
            ValueError: no prompt was routed into this layer, or another adapter routed it, or padding follows it.
        """
        if self.gate is None:
            raise ValueError("`cache` must have been filled with this adapter active, got one without routes.")
        if self.rules != LaterRules.of(config):
            raise ValueError(
                "`cache` must be continued with the adapter that routed its prompt, its modes and sizes unchanged, "
                "got another one."
            )
        if self._is_padded_right:
            raise ValueError(
                "`attention_mask` must pad prompts on the left where more tokens follow in the cache, got padding on "
                "the right."
            )
        return self.gate, self.start

    def _apply(self, function):
        self.gate = None if self.gate is None else function(self.gate)
        self.start = None if self.start is None else function(self.start)

    def reset(self):
        super().reset()
        self.gate = self.start = None

    def reorder_cache(self, beam_idx):
        super().reorder_cache(beam_idx)
        self._apply(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))


class RoutedDynamicLayer(RoutingMemory, DynamicLayer):
    """A `DynamicLayer` that remembers its routing."""

    plain = DynamicLayer

    def reset(self):
        """Drops keys and values, which `DynamicLayer` zeroes and keeps before transformers 5.18."""
        self.keys = self.values = None
        self.is_initialized = False
        super().reset()

    def batch_repeat_interleave(self, repeats):
        super().batch_repeat_interleave(repeats)
        self._apply(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices):
        super().batch_select_indices(indices)
        self._apply(lambda rows: rows[indices])


class RoutedStaticLayer(RoutingMemory, StaticLayer):
    """A `StaticLayer` that remembers its routing."""

    plain = StaticLayer

    def crop(self, tokens_to_remove: int) -> None:
        """As `StaticLayer.crop`; an empty layer routes its next prompt afresh. Waits for the device to tell."""
        super().crop(tokens_to_remove)
        if self.gate is not None and not self.cumulative_length > 0:
            self.gate = self.start = None


class RoutedRaggedLayer(RoutedDynamicLayer):
    """A `DynamicLayer` that remembers its routing and frees what its streaming heads never attend again."""

    _padding: list[int]
    _is_announced = False

    def remember(self, gate, sequences, config):
        """As `RoutingMemory.remember`; these tokens alone may be written next."""
        super().remember(gate, sequences, config)
        self._padding = sequences.padding
        self._is_announced = True

    def recall(self, config):
        """As `RoutingMemory.recall`; these tokens alone may be written next."""
        remembered = super().recall(config)
        self._is_announced = True
        return remembered

    def update(self, key_states, value_states, *args, **kwargs):
        """Takes a prompt's keys and values, or those of tokens that follow it.

        Returns:
            Those given; all keys and values for more tokens than `store` takes in one step.

        Raises:
            ValueError: the tokens come from a model that is not routed.
        """
        if not self._is_announced and self.store is None:
            return super().update(key_states, value_states, *args, **kwargs)
        if not self._is_announced:
            raise ValueError(
                "`cache` must be continued with the adapter that routed its prompt, got a pass without it: the keys "
                "of its sparse heads are freed."
            )
        self._is_announced = False
        if self.store is None:
            assert self.gate is not None
            assert self.rules is not None
            sizes = (self.rules.sink_size, self.rules.window_size)
            self.store = RaggedStore(key_states, value_states, self.gate, self.start, self._padding, *sizes)
        elif self.store.takes(key_states.shape[2]):
            self.store.append(key_states, value_states)
        else:
            return self.store.extend(key_states, value_states)
        return key_states, value_states

    def get_seq_length(self):
        """Tokens of a row that nothing was freed from, padding included."""
        return super().get_seq_length() if self.store is None else self.store.length

    def reset(self):
        super().reset()
        self.store = None
        self._is_announced = False

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest tokens, as `DynamicLayer.crop` does.

        Args:
            tokens_to_remove: minus their number; a positive number is the length to keep, as before transformers 5.18.

        Raises:
            ValueError: more tokens than streaming heads can give back; see `RaggedStore.take_back`.
        """
        if self.store is None:
            return super().crop(tokens_to_remove)
        length = self.store.length
        count = -tokens_to_remove if tokens_to_remove <= 0 else length - tokens_to_remove
        if count >= length:
            self.reset()
        elif count > 0:
            self.store.take_back(count)

    def reorder_cache(self, beam_idx):
        if self.store is None:
            return super().reorder_cache(beam_idx)
        self._select(self.store, beam_idx)

    def batch_repeat_interleave(self, repeats):
        if self.store is None:
            return super().batch_repeat_interleave(repeats)
        self._select(self.store, torch.arange(len(self.store.padding)).repeat_interleave(repeats))

    def batch_select_indices(self, indices):
        if self.store is None:
            return super().batch_select_indices(indices)
        self._select(self.store, torch.arange(len(self.store.padding), device=indices.device)[indices])

    def _select(self, store: RaggedStore, index: torch.Tensor) -> None:
        index = index.to(store.gate.device)
        self._apply(lambda rows: rows[index])
        store.select(index)


ROUTED_LAYERS = {DynamicLayer: RoutedDynamicLayer, StaticLayer: RoutedStaticLayer}


def empty_cache(cache: Cache) -> None:
    """Resets a cache such that its next prompt is the first.

    Args:
        cache: a transformers cache.

    Raises:
        ValueError: it is no cache with layers.
    """
    if not isinstance(cache, Cache):
        raise ValueError(f"`cache` must be a transformers cache with layers, got {type(cache).__name__}.")
    cache.reset()
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):  # before transformers 5.18 it zeroes its keys and keeps them
            layer.keys = layer.values = None
            layer.is_initialized = False


def make_routing_memory(cache: Cache, index: int, frees_keys: bool) -> RoutingMemory:
    """Gives an empty layer of `cache` a memory for the prompts that it is about to receive.

    Args:
        cache: a transformers cache with dynamic or static layers.
        index: layer index.
        frees_keys: whether a dynamic layer shall free what streaming heads never attend again; an offloaded one stays
            whole.

    Returns:
        The layer, now of a kind that is a `RoutingMemory`, in its place in `cache`.

    Raises:
        ValueError: the layer is of a kind that cannot remember its routing yet.
    """
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    plain = layer.plain if isinstance(layer, RoutingMemory) else type(layer)
    if plain not in ROUTED_LAYERS:
        raise ValueError(
            f"`cache` must have {' or '.join(kind.__name__ for kind in ROUTED_LAYERS)} layers where heads are routed, "
            f"got {type(layer).__name__}."
        )
    frees_keys = frees_keys and plain is DynamicLayer and not cache.offloading
    routed = RoutedRaggedLayer if frees_keys else ROUTED_LAYERS[plain]
    if type(layer) is not routed:
        twin = routed.__new__(routed)
        twin.__dict__ = layer.__dict__
        cache.layers[index] = twin
    return cache.layers[index]


def routing_memory(cache: Cache, index: int) -> RoutingMemory:
    """The memory of a layer of `cache` that holds routed prompts.

    Args:
        cache: a transformers cache.
        index: layer index.

    Returns:
        The layer itself.

    Raises:
        ValueError: the layer was filled without routing.
    """
    layer = cache.layers[index]
    if not isinstance(layer, RoutingMemory):
        raise ValueError("`cache` must have been filled with this adapter active, got one without routes.")
    return layer
