"""`ElasticLayer`: the child `self_attn.router` of a routed attention module, with one router per adapter."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from .attention import ElasticRoute
from .cache import make_routing_memory, routing_memory
from .config import ElasticConfig
from .context import ForwardState
from .families import RoutedLayer, pre_rotary_keys
from .gating import straight_through_gate
from .router import InputStandardizer, boundary_indices, decide, make_router


ROUTER_LAYERS = ("task_up", "task_down", "router_up", "router_down", "router_out")


class ElasticLayer(nn.Module, BaseTunerLayer):
    """Routers of one attention layer, by adapter name.

    Args:
        layer: which layer this is and its key heads.
        base_config: the attention module's configuration before it was routed.
    """

    adapter_layer_names = tuple(f"elastic_{name}" for name in ROUTER_LAYERS)
    other_param_names = ("elastic_standardizer", "configs", "_initial_weights")

    def __init__(self, layer: RoutedLayer, base_config: Any):
        super().__init__()
        self.layer = layer
        self.base_config = base_config
        for name in self.adapter_layer_names:
            setattr(self, name, nn.ModuleDict())
        self.elastic_standardizer = nn.ModuleDict()
        self.configs: dict[str, ElasticConfig] = {}
        self._initial_weights: dict[str, tuple[torch.Tensor, int]] = {}
        self._checked: set[str] = set()
        self._disable_adapters = False
        self._active_adapter: list[str] = []
        self.merged_adapters: list[str] = []

    def update_layer(self, adapter_name: str, config: ElasticConfig, device: torch.device) -> None:
        """Adds a router.

        Args:
            adapter_name: name of the adapter.
            config: its configuration.
            device: where the attention module's weights are.
        """
        for name, module in make_router(self.layer.head_dim, config.router_expansion).items():
            getattr(self, f"elastic_{name}")[adapter_name] = module
        if config.standardize_input:
            standardizer = InputStandardizer(self.layer.num_key_value_heads, self.layer.head_dim)
            self.elastic_standardizer[adapter_name] = standardizer
        self.configs[adapter_name] = config
        self._checked.discard(adapter_name)
        for name in (*self.adapter_layer_names, "elastic_standardizer"):
            modules = getattr(self, name)
            if adapter_name in modules and not any(t.is_meta for t in modules[adapter_name].state_dict().values()):
                modules[adapter_name].to(device)
        if config.is_saved:
            weight = self.elastic_router_out[adapter_name].weight
            self._initial_weights[adapter_name] = (weight, weight._version)

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Activates one adapter.

        Raises:
            ValueError: more than one adapter; a head follows one router.
        """
        if not isinstance(adapter_names, str) and len(adapter_names) > 1:
            raise ValueError(f"`adapter_names` must name one ELASTIC adapter, got {list(adapter_names)}.")
        super().set_adapter(adapter_names, inference_mode=inference_mode)

    @property
    def active_config(self) -> ElasticConfig | None:
        """Configuration of the adapter that routes this layer; `None` while adapters are disabled or absent."""
        if self.disable_adapters or not self.active_adapters:
            return None
        return self.configs.get(self.active_adapters[0])

    @property
    def standardizer(self) -> InputStandardizer | None:
        """Input standardisation of the active adapter, `None` where it takes the raw keys."""
        name = self.active_adapters[0]
        return self.elastic_standardizer[name] if name in self.elastic_standardizer else None  # noqa: SIM401

    def awaits_weights(self, adapter_name: str) -> bool:
        """Whether an adapter was made from a saved configuration and never got its saved weights."""
        if adapter_name not in self._initial_weights:
            return False
        weight = self.elastic_router_out[adapter_name].weight
        initial, version = self._initial_weights[adapter_name]
        return weight is initial and weight._version == version

    def check_loaded(self) -> None:
        """Checks once, before the active adapter first decides at inference, that it has something to decide with.

        Raises:
            ValueError: its saved weights were never loaded.
        """
        name = self.active_adapters[0]
        if name in self._checked:
            return
        if self.awaits_weights(name):
            raise ValueError(
                f"The weights of adapter {name!r} were never loaded: loading it failed, or only its configuration was "
                "read. Load the adapter again, or train it."
            )
        if self.standardizer is not None and not self.standardizer.calibrated:
            warnings.warn(
                f"The input standardisation of adapter {name!r} is not calibrated, so its routing hardly depends on "
                "the input: train it, or call `elastic_peft.calibrate_standardization`.",
                stacklevel=2,
            )
            return
        self._checked.add(name)

    def route(
        self, attention: nn.Module, hidden_states: torch.Tensor, state: ForwardState, cache: Any
    ) -> ElasticRoute | None:
        """Decides for every sequence and key-value head, or recalls what its prompt decided.

        Args:
            attention: the attention module.
            hidden_states: `[B, S, hidden_size]`, its input.
            state: what this forward pass knows.
            cache: the forward pass's cache, or `None`.

        Returns:
            The decisions for the attention function; `None` when the active adapter does not route this layer.

        Raises:
            ValueError: packed rows with a cache, or a cache that cannot remember its routing.
        """
        config = self.active_config
        if config is None:
            return None
        index = self.layer.index
        sequences = state.sequences
        if sequences is None:
            held = routing_memory(cache, index)
            gate, start = held.recall(config)
            return ElasticRoute(gate, config, index, start, memory=held)

        gate = self._decide(attention, hidden_states, state, config)
        memory = None
        if cache is not None:
            if sequences.cu_seqlens is not None:
                raise ValueError(
                    "`use_cache` must be False for packed rows, got True: a cache holds one sequence a row."
                )
            # Gradients, and graphs that are being compiled, need keys and values as they are.
            streams = config.sparse_mode == "SSA" and config.decode == "routed" and not state.keeps_keys
            frees_keys = streams and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
            memory = make_routing_memory(cache, index, frees_keys)
            memory.remember(gate.detach().bool(), sequences, config)
        counterfactual = state.counterfactual(index, gate.device)
        return ElasticRoute(gate, config, index, sequences.start, sequences, state.record, memory, counterfactual)

    def _boundary_keys(self, attention, hidden_states, state, pool_size) -> tuple[torch.Tensor, torch.Tensor]:
        """Pre-rotary keys `[N, T, H, head_dim]` of each prompt's ends and which count; see `boundary_indices`."""
        device = hidden_states.device
        if (pool_size, device) not in state.pooling:
            sequences = state.sequences
            bounds = (sequences.first.to(device), sequences.prompt_end.to(device))
            state.pooling[pool_size, device] = boundary_indices(*bounds, pool_size, sequences.shape[1])
        positions, valid = state.pooling[pool_size, device]
        boundary = hidden_states.flatten(0, 1)[positions]  # [N, T, hidden_size]
        return pre_rotary_keys(attention, boundary), valid

    def _decide(self, attention, hidden_states, state, config) -> torch.Tensor:
        index, name = self.layer.index, self.active_adapters[0]
        keys, valid = self._boundary_keys(attention, hidden_states, state, config.pool_size)
        layers = {layer: getattr(self, f"elastic_{layer}")[name] for layer in ROUTER_LAYERS}
        logits, gate, pooled = decide(keys, valid, layers, self.standardizer, config.sparsity_bias)
        if state.pooled is not None:
            state.pooled[index] = pooled.detach()

        record = state.record
        if state.forced is not None:
            gate = state.forced[index].to(logits.device).expand(logits.shape[:2])
        elif state.sampling:
            # A checkpoint's recomputed pass finds the first pass's decision and repeats it.
            uniform = state.noise[index].to(logits.device, non_blocking=True)
            temperature = state.tape.temperature
            gate = straight_through_gate(logits, uniform, temperature, record.decision_by_layer.get(index))
        if index not in record.decision_by_layer:
            record.decision_by_layer[index] = gate.detach().bool()
            record.logits_by_layer[index] = logits.detach()
            state.tape.gates[index] = gate
        return gate

    def get_base_layer(self) -> nn.Module:
        """The router wraps nothing: it is a child of the attention module."""
        return self

    @property
    def weight(self) -> torch.Tensor:
        """PEFT asks a tuner layer for its weight's device and dtype."""
        return next(iter(self.elastic_router_out.values())).weight

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refused: routing depends on the input.

        Raises:
            ValueError: always.
        """
        raise ValueError("An ELASTIC adapter cannot be merged: which heads are sparse depends on each input.")
