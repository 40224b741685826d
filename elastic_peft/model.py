"""`ElasticModel`: PEFT's tuner for ELASTIC adapters. Decides what is routed; the routers do the rest."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from . import operators
from .attachment import attach_hooks, attach_router, detach, discard_adapter
from .config import ElasticConfig
from .families import DecoderSpec, check_pre_rotary_keys, describe_model
from .layer import ElasticLayer


class ElasticModel(BaseTuner):
    """A decoder with an attention router in every routed layer.

    Args:
        model: a transformers decoder, alone or under a head; its weights stay frozen.
        peft_config: an `ElasticConfig`.
        adapter_name: name of the adapter.

    Raises:
        ValueError: no layer of `model` can be routed, or the adapter was made for another base model.
    """

    prefix = "elastic_"
    tuner_layer_cls = ElasticLayer
    target_module_mapping: dict[str, list[str]] = {}

    def inject_adapter(
        self,
        model: nn.Module,
        adapter_name: str,
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        state_dict: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Adds one router per routed layer; see `BaseTuner.inject_adapter`. `state_dict` is not needed for it.

        Raises:
            ValueError: see the class; or `adapter_name` cannot be part of a parameter's name. The model is left as it
                was.
        """
        _check_adapter_name(adapter_name)
        operators.load()  # from where it is told to, or not at all
        # Binding it to this model must not change a configuration that its owner gives to several models.
        self.peft_config[adapter_name] = copy.copy(self.peft_config[adapter_name])
        self._spec = describe_model(model)
        known = any(adapter_name in router.configs for router in model.modules() if isinstance(router, ElasticLayer))
        try:
            super().inject_adapter(model, adapter_name, autocast_adapter_dtype, low_cpu_mem_usage=low_cpu_mem_usage)
            check_pre_rotary_keys(model, self._spec.decoder_name, list(self._targets.values()))
        except Exception:
            if not known:
                discard_adapter(model, adapter_name)
            raise
        attach_hooks(model, model.get_submodule(self._spec.decoder_name))

    def unload(self) -> nn.Module:
        """Removes the routers and returns the base model as it was."""
        detach(self.model)
        if hasattr(self.model, "peft_config"):
            del self.model.peft_config
        return self.model

    def _prepare_adapter_config(self, peft_config: ElasticConfig, model_config: dict) -> ElasticConfig:
        chosen = _chosen_layers(peft_config, self._spec)
        layers = {layer.index: layer for layer in self._spec.layers if layer.index in chosen}
        head_dims = {layer.head_dim for layer in layers.values()}
        if len(head_dims) > 1:
            raise ValueError(f"`model` must have one head dimension in its routed layers, got {sorted(head_dims)}.")
        peft_config.bind(head_dims.pop(), {index: layer.num_key_value_heads for index, layer in layers.items()})
        self._targets = {layer.name: layer for layer in layers.values()}
        return peft_config

    def _check_target_module_exists(self, peft_config, key: str) -> bool:
        return key in self._targets

    def _create_and_replace(self, peft_config, adapter_name, target, target_name, parent, current_key, **kwargs):
        weight = next(target.parameters())
        _refuse_tensor_parallel(weight, current_key)
        router = getattr(target, "router", None)
        if router is None:
            router = attach_router(target, self._targets[current_key])
        router.update_layer(adapter_name, peft_config, weight.device)

    def _check_merge_allowed(self):
        raise ValueError("An ELASTIC adapter cannot be merged: which heads are sparse depends on each input.")

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Refused: routing depends on the input."""
        self._check_merge_allowed()

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any):
        if kwargs.get("adapter_names") is not None:
            raise ValueError(
                "`adapter_names` must be None with ELASTIC adapters, one adapter routes the whole batch, "
                f"got {kwargs['adapter_names']}."
            )
        yield


def _check_adapter_name(adapter_name: str) -> None:
    if not adapter_name or "." in adapter_name or hasattr(nn.ModuleDict(), adapter_name):
        raise ValueError(
            "`adapter_name` must be a name without dots that is no attribute of torch.nn.ModuleDict, "
            f"got {adapter_name!r}."
        )


def _chosen_layers(config: ElasticConfig, spec: DecoderSpec) -> set[int]:
    available = {layer.index for layer in spec.layers}
    wanted = available if config.layers_to_transform is None else set(config.layers_to_transform)
    for index in sorted(wanted - available):
        reason = spec.skipped.get(index, f"the model has {len(spec.layers) + len(spec.skipped)} layers")
        raise ValueError(f"`layers_to_transform` must name layers that can be routed, got {index}: {reason}.")
    return wanted


def _refuse_tensor_parallel(weight: torch.Tensor, name: str) -> None:
    from torch.distributed.tensor import DTensor

    if isinstance(weight, DTensor):
        raise ValueError(f"`tp_plan` must not shard a routed model, got a sharded weight in {name}.")
