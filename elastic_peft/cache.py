"""Remembers a prompt's routing with its cache, so that every later token of a sequence follows the same decisions.

transformers' Cache calls each of its layers to reorder, repeat, select and reset sequences: the decisions live in the
layer objects and follow the keys through each of those calls.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer

from .config import ElasticConfig


class RoutingMemory(CacheLayerMixin):
    """Adds one sequence's decisions to a cache layer.

    Attributes:
        gate: bool `[B, H]`, True = sparse; `None` before a prompt was routed.
        start: int64 `[B]`, first valid key of each row; `None` without left padding.
        config: configuration of the adapter that decided.
    """

    gate: torch.Tensor | None = None
    start: torch.Tensor | None = None
    config: ElasticConfig | None = None

    def remember(self, gate: torch.Tensor, start: torch.Tensor | None, config: ElasticConfig) -> None:
        """Keeps the decisions of the prompt whose keys this layer is about to receive, and whose they are."""
        self.gate, self.start, self.config = gate, start, config

    def recall(self, config: ElasticConfig) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The remembered decisions and starts.

        Raises:
            ValueError: no prompt was routed into this layer, or another adapter routed it.
        """
        if self.gate is not None and self.config != config:
            raise ValueError("`cache` must be continued with the adapter that routed its prompt, got another one.")
        if self.gate is None:
            raise ValueError("`cache` must have been filled with this adapter active, got one without routes.")
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

    def batch_repeat_interleave(self, repeats):
        super().batch_repeat_interleave(repeats)
        self._apply(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices):
        super().batch_select_indices(indices)
        self._apply(lambda rows: rows[indices])


class RoutedStaticLayer(RoutingMemory, StaticLayer):
    """A `StaticLayer` that remembers its routing."""


ROUTED_LAYERS = {DynamicLayer: RoutedDynamicLayer, StaticLayer: RoutedStaticLayer}


def routing_memory(cache: Cache, index: int) -> RoutingMemory:
    """The memory of one layer of `cache`, added on first use.

    Args:
        cache: a transformers cache with dynamic or static layers.
        index: layer index.

    Raises:
        ValueError: the layer is of a kind that cannot remember its routing yet.
    """
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, RoutingMemory):
        return layer
    routed = ROUTED_LAYERS.get(type(layer))
    if routed is None:
        raise ValueError(
            f"`cache` must have {' or '.join(kind.__name__ for kind in ROUTED_LAYERS)} layers where heads are routed, "
            f"got {type(layer).__name__}."
        )
    twin = routed.__new__(routed)
    twin.__dict__ = layer.__dict__
    cache.layers[index] = twin
    return twin
