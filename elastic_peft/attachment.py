"""Puts routers and hooks into a model without touching its code, and takes them out again."""

from __future__ import annotations

import copy
import inspect
import weakref
from itertools import chain
from typing import Any

import torch
from torch import nn

from .attention import ATTENTION_NAME
from .cache import empty_cache
from .context import DecoderScopes, decoder_scope, routed_decoder
from .families import RoutedLayer
from .hooks import DecoderHook, active_routers, cache_argument, keep_record, pass_labels, route_attention
from .layer import ElasticLayer
from .ragged_store import SLACK


ROUTER_PREFIX = "elastic_"


def attach_router(attention: nn.Module, layer: RoutedLayer) -> ElasticLayer:
    """Gives an attention module its `router` and points it, and it alone, at the elastic attention function.

    Args:
        attention: the attention module of a decoder layer.
        layer: its place in the decoder, and its sizes.

    Returns:
        The router, without an adapter yet.
    """
    base_config = attention.config
    attention.router = ElasticLayer(layer, base_config)
    attention.router.train(attention.training)
    attention.config = copy.copy(base_config)
    attention.config._attn_implementation_internal = ATTENTION_NAME
    return attention.router


def attach_hooks(model: nn.Module, decoder: nn.Module) -> None:
    """Adds the hooks of the routed attention modules, of their decoder and of the model around it, each once.

    Args:
        model: a transformers model, whose `generate` is replaced if it has one.
        decoder: the decoder inside it, or the model itself.
    """
    for module in decoder.modules():
        if isinstance(getattr(module, "router", None), ElasticLayer) and not hasattr(module, "elastic_handles"):
            module.elastic_handles = [module.register_forward_pre_hook(route_attention, with_kwargs=True)]
    if hasattr(decoder, "elastic_handles"):
        return
    decoder.elastic_scopes = DecoderScopes()
    decoder.elastic_handles = [
        decoder.register_forward_pre_hook(DecoderHook(), with_kwargs=True),
        decoder.register_forward_hook(keep_record, with_kwargs=True),
        model.register_load_state_dict_pre_hook(check_router_weights),
    ]
    if model is not decoder:
        decoder.elastic_handles.append(model.register_forward_pre_hook(pass_labels, with_kwargs=True))
    if hasattr(model, "generate"):
        # PEFT reaches the model's own `generate` by several ways; all of them end here.
        model.generate = RoutedGenerate(model)
    if hasattr(model, "init_continuous_batching"):
        # Every way into continuous batching comes by here.
        model.init_continuous_batching = RefusedBatching(model)


def detach(model: nn.Module) -> None:
    """Removes every router and hook and gives the attention modules their configuration back.

    Args:
        model: a transformers model that an ELASTIC adapter was injected into.
    """
    for module in list(model.modules()):
        if isinstance(getattr(module, "router", None), ElasticLayer):
            _detach_router(module)
        _remove_handles(module)
        module.__dict__.pop("elastic_scopes", None)
    for name in ("generate", "init_continuous_batching"):
        model.__dict__.pop(name, None)


def discard_adapter(model: nn.Module, adapter_name: str) -> None:
    """Removes an adapter that could not be made or loaded, and leaves the model as it was before.

    Args:
        model: the model that the adapter was injected into.
        adapter_name: name of the adapter.
    """
    for module in list(model.modules()):
        router = getattr(module, "router", None)
        if isinstance(router, ElasticLayer):
            router.delete_adapter(adapter_name)
            if not router.configs:
                _detach_router(module)
    configs = getattr(model, "peft_config", {})
    configs.pop(adapter_name, None)
    if not any(isinstance(module, ElasticLayer) for module in model.modules()):
        detach(model)
        if not configs and hasattr(model, "peft_config"):
            del model.peft_config


class ModelMethod:
    """A method of one model that stands before its class's own.

    Args:
        model: the model that it becomes an attribute of; referred to weakly, so that the model is freed with its
            last user.
    """

    def __init__(self, model: nn.Module):
        self._model = weakref.ref(model)

    @property
    def model(self) -> Any:
        """The model whose method this is."""
        return self._model()

    def __deepcopy__(self, memo):
        return type(self)(memo.get(id(self.model), self.model))

    def __reduce__(self):
        return type(self), (self.model,)


class RefusedBatching(ModelMethod):
    """The model's own `init_continuous_batching`, for the base model alone.

    Raises:
        ValueError: when called while an adapter is active: pages of a shared cache hold every head's keys, and no
            routes.
    """

    def __call__(self, *args: Any, **kwargs: Any):
        if active_routers(routed_decoder(self.model)):
            raise ValueError(
                "Continuous batching must run without an active ELASTIC adapter, for its paged cache keeps no routes: "
                "call `generate` with a batch of prompts, or disable the adapter."
            )
        return type(self.model).init_continuous_batching(self.model, *args, **kwargs)


class RoutedGenerate(ModelMethod):
    """The model's own `generate`, with the prompt's length pinned so that no generated token is ever pooled.

    Called with `reroute=True` beside a cache, it empties the cache first: the whole conversation is read and routed
    again, where a later turn otherwise follows the routes of the first. Freed keys can only come back that way.

    Raises:
        ValueError: when called with `prefill_chunk_size`: a prompt is routed by both of its ends, which chunks keep
            apart; or when `reroute` is to empty what is no transformers cache.
    """

    def __call__(self, *args: Any, reroute: bool = False, **kwargs: Any):
        return _generate(self.model, reroute, *args, **kwargs)


def _generate(model: Any, reroute: bool, *args: Any, **kwargs: Any):
    given = inspect.signature(type(model).generate).bind_partial(model, *args, **kwargs).arguments
    given.update(given.pop("kwargs", {}))
    generation_config = given.get("generation_config") or model.generation_config
    chunk = given.get("prefill_chunk_size", getattr(generation_config, "prefill_chunk_size", None))
    if chunk is not None:
        raise ValueError(f"`prefill_chunk_size` must be None with an ELASTIC adapter, got {chunk}.")
    cache = cache_argument(given)
    if reroute and cache is not None:
        empty_cache(cache)
    names = ("inputs_embeds", "input_ids", "inputs")
    inputs = next((given[name] for name in names if given.get(name) is not None), None)
    scope = decoder_scope(routed_decoder(model))
    outer = scope.prompt_end, scope.keeps_keys
    scope.prompt_end = None if inputs is None else inputs.shape[1]
    # A freed cache takes back no more than its slack of a rejected draft, and an assistant may lengthen its drafts.
    lookup = given.get("prompt_lookup_num_tokens", getattr(generation_config, "prompt_lookup_num_tokens", None))
    scope.keeps_keys = given.get("assistant_model") is not None or (lookup or 0) > SLACK
    try:
        return type(model).generate(model, *args, **kwargs)
    finally:
        scope.prompt_end, scope.keeps_keys = outer


def check_router_weights(model: nn.Module, state_dict: dict[str, torch.Tensor], prefix: str, *unused: Any) -> None:
    """Before anything is loaded: a state dict that holds part of an adapter must hold all of it, whole and finite.

    Raises:
        ValueError: router weights are missing, too many, of another shape, or not finite; or an adapter awaits its
            weights and nothing in the state dict belongs to the model. An adapter that was only made for these weights
            is removed, so that the model is left as it was.
    """
    routers = {name: module for name, module in model.named_modules() if isinstance(module, ElasticLayer)}
    given = [key for key in state_dict if key.startswith(prefix)]
    known = {prefix + name for name, _ in chain(model.named_parameters(), model.named_buffers())}
    foreign = bool(given) and known.isdisjoint(given)
    for adapter in sorted({adapter for router in routers.values() for adapter in router.configs}):
        expected = {
            f"{prefix}{name}.{key}": tensor
            for name, router in routers.items()
            for key, tensor in router.state_dict().items()
            if key.split(".")[-2] == adapter
        }
        awaits_weights = all(r.awaits_weights(adapter) for r in routers.values() if adapter in r.configs)
        if foreign and awaits_weights:
            fault: str | None = f"none of its tensors but {given[0]}"
        else:
            held = {key for key in given if _is_router_key(key, adapter)}
            fault = _find_fault(expected, held, state_dict)
        if fault is not None:
            if awaits_weights:
                discard_adapter(model, adapter)
            raise ValueError(f"`state_dict` must hold the whole adapter {adapter!r}, got {fault}.")


def _find_fault(expected: dict[str, torch.Tensor], held: set[str], state_dict: dict[str, torch.Tensor]) -> str | None:
    if not held:
        return None  # another adapter's state dict
    missing = [key for key in expected if key not in held]
    if missing:
        return f"{len(expected) - len(missing)} of {len(expected)} tensors, without {missing[0]}"
    # PEFT puts the adapter's name only into keys that the model has.
    nameless = {key for key in state_dict if _is_router_key(key, None)}
    if surplus := sorted(nameless | held - expected.keys()):
        return f"{len(surplus)} tensors too many, such as {surplus[0]}"
    for key, tensor in expected.items():
        if state_dict[key].shape != tensor.shape:
            return f"shape {tuple(state_dict[key].shape)} instead of {tuple(tensor.shape)} for {key}"
        if not state_dict[key].is_meta and not state_dict[key].isfinite().all():
            return f"values that are not finite in {key}"
    return None


def _is_router_key(key: str, adapter_name: str | None) -> bool:
    """Whether `key` names a tensor of the adapter's routers, or of no adapter's."""
    container, name = (["", "", *key.split(".")])[-3:-1]
    if adapter_name is None:
        return name.startswith(ROUTER_PREFIX) and not container.startswith(ROUTER_PREFIX)
    return container.startswith(ROUTER_PREFIX) and name == adapter_name


def _detach_router(attention: nn.Module) -> None:
    attention.config = attention.router.base_config
    del attention.router
    _remove_handles(attention)


def _remove_handles(module: nn.Module) -> None:
    for handle in getattr(module, "elastic_handles", ()):
        handle.remove()
    if hasattr(module, "elastic_handles"):
        del module.elastic_handles
