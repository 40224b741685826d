"""`ElasticModel`: PEFT's tuner for ELASTIC adapters. Decides what is routed; the routers do the rest."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from .config import ElasticConfig
from .context import decoder_scope, routed_decoder
from .families import DecoderSpec, check_pre_rotary_keys, describe_model
from .hooks import attach_hooks, attach_router, detach
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
        """Adds one router per routed layer; see `BaseTuner.inject_adapter`. `state_dict` is not needed for it."""
        self._spec = describe_model(model)
        decoder = model.get_submodule(self._spec.decoder_name)
        super().inject_adapter(model, adapter_name, autocast_adapter_dtype, low_cpu_mem_usage=low_cpu_mem_usage)
        if not hasattr(decoder, "elastic_handles"):
            try:
                check_pre_rotary_keys(model, self._spec)
            except Exception:
                detach(model)
                raise
        attach_hooks(model, decoder)

    def generate(self, *args: Any, **kwargs: Any):
        """The model's own `generate`, with the prompt's length pinned so that no generated token is ever pooled.

        Raises:
            ValueError: `prefill_chunk_size` is set: a prompt is routed by both of its ends, which chunks keep apart.
        """
        generation_config = kwargs.get("generation_config") or self.model.generation_config
        chunk = kwargs.get("prefill_chunk_size", getattr(generation_config, "prefill_chunk_size", None))
        if chunk is not None:
            raise ValueError(f"`prefill_chunk_size` must be None with an ELASTIC adapter, got {chunk}.")
        inputs = kwargs.get("inputs_embeds", kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None)))
        scope = decoder_scope(routed_decoder(self.model))
        outer = scope.prompt_end
        scope.prompt_end = None if inputs is None else inputs.shape[1]
        try:
            return self.model.generate(*args, **kwargs)
        finally:
            scope.prompt_end = outer

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


def _chosen_layers(config: ElasticConfig, spec: DecoderSpec) -> set[int]:
    available = {layer.index for layer in spec.layers}
    wanted = available if config.layers_to_transform is None else set(config.layers_to_transform)
    if config.is_saved and config.num_key_value_heads is not None:
        wanted = set(config.num_key_value_heads)
    for index in sorted(wanted - available):
        reason = spec.skipped.get(index, f"the model has {len(spec.layers) + len(spec.skipped)} layers")
        raise ValueError(f"`layers_to_transform` must name layers that can be routed, got {index}: {reason}.")
    return wanted


def _refuse_tensor_parallel(weight: torch.Tensor, name: str) -> None:
    from torch.distributed.tensor import DTensor

    if isinstance(weight, DTensor):
        raise ValueError(f"`tp_plan` must not shard a routed model, got a sharded weight in {name}.")
