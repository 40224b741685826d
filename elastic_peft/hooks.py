"""The hooks that carry routing through a forward pass: on the model, its decoder and its attention modules."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from .context import ForwardState, RoutingRecord, RoutingTape, decoder_scope, forced_by_layer
from .counterfactual import counterfactual_noise
from .gating import uniform_noise
from .layer import ElasticLayer
from .sequences import find_sequences


class DecoderHook:
    """Pre-forward hook of the decoder: works out the forward pass's `ForwardState` and hands it to the layers."""

    def __call__(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any]):
        if len(args) > 1:  # a decoder that is called directly may be given its mask or cache by position
            args, kwargs = (), {**dict(zip(inspect.signature(decoder.forward).parameters, args)), **kwargs}
        given = {name: kwargs.pop(name, None) for name in ("elastic_tape", "elastic_labels", "prompt_end")}
        routers = active_routers(decoder)
        if not routers:
            return args, kwargs
        if kwargs.get("output_attentions"):
            raise ValueError("`output_attentions` must be False: routed layers mix two attentions, got True.")
        state = ForwardState()
        if _continues(cache_argument(kwargs), routers):
            _check_later_tokens(kwargs.get("attention_mask"), _inputs(args, kwargs).shape[1])
        else:
            _check_ready(decoder, routers)
            _begin_sequences(state, decoder, routers, args, kwargs, **given)
        kwargs["elastic_state"] = state
        return args, kwargs


def _begin_sequences(state, decoder, routers, args, kwargs, *, elastic_tape, elastic_labels, prompt_end) -> None:
    """Fills the state of a pass that routes: a prompt, or a training batch."""
    if elastic_tape is not None and not isinstance(elastic_tape, RoutingTape):
        raise ValueError(f"`elastic_tape` must be a RoutingTape, got {type(elastic_tape).__name__}.")
    inputs = _inputs(args, kwargs)
    scope = decoder_scope(decoder)
    state.sequences = find_sequences(
        inputs.shape[0],
        inputs.shape[1],
        inputs.device,
        attention_mask=kwargs.get("attention_mask"),
        position_ids=kwargs.get("position_ids"),
        cu_seqlens=kwargs.get("cu_seq_lens_q"),
        labels=elastic_labels,
        prompt_end=scope.prompt_end if prompt_end is None else prompt_end,
        packed=not _fills_cache(decoder, kwargs),
    )
    lengths = state.sequences.lengths
    config = routers[0].active_config
    key_bytes = 2 * routers[0].layer.head_dim * getattr(decoder, "dtype", torch.float32).itemsize
    state.record = RoutingRecord(config.mode_pair, config.sink_size, config.window_size, lengths, key_bytes)
    state.tape = RoutingTape() if elastic_tape is None else elastic_tape
    state.tape.lengths = lengths
    heads = {router.layer.index: router.layer.num_key_value_heads for router in routers}
    if scope.forced:
        state.forced = forced_by_layer(scope.forced[-1], heads, lengths.shape[0])
    elif decoder.training:
        state.sampling = True
        _draw_noise(state, state.tape, inputs.shape[1], lengths.shape[0], heads)
    state.pooled = scope.pooled
    state.keeps_keys = scope.keeps_keys


def _inputs(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """The decoder's input, `[B, S]` tokens or `[B, S, hidden_size]` embeddings."""
    inputs = kwargs.get("inputs_embeds")
    if inputs is None:
        inputs = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(inputs, torch.Tensor):
        raise ValueError(f"`input_ids` or `inputs_embeds` must be a tensor, got {type(inputs).__name__}.")
    return inputs


def keep_record(decoder: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of the decoder: a pass that routed and came to its end is the last one."""
    state = kwargs.get("elastic_state")
    if state is not None and state.record is not None:
        decoder_scope(decoder).record = state.record


def _draw_noise(
    state: ForwardState, tape: RoutingTape, length: int, num_sequences: int, heads: dict[int, int]
) -> None:
    """Noise of a pass that samples its decisions, for `num_sequences` in rows of `length` columns."""
    seeds, fraction = tape.seeds, tape.counterfactual_fraction
    if seeds is None:
        seeds = torch.randint(2**63 - 1, (num_sequences,)).tolist()
    if len(seeds) != num_sequences:
        raise ValueError(f"`seeds` must hold one seed for each of the {num_sequences} sequences, got {len(seeds)}.")
    indices = sorted(heads)
    counts = [heads[index] for index in indices]
    state.noise = dict(zip(indices, uniform_noise(seeds, counts)))
    if fraction < 1:
        state.counterfactual_noise = dict(zip(indices, counterfactual_noise(seeds, counts, length, fraction)))


def cache_argument(kwargs: dict[str, Any]) -> Any:
    """The cache argument, under its name in transformers 5.24 or before."""
    cache = kwargs.get("cache")
    return kwargs.get("past_key_values") if cache is None else cache


def _fills_cache(decoder: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether the decoder will run with a cache, its own if need be: transformers then takes rows as unpacked."""
    if cache_argument(kwargs) is not None:
        return True
    checkpoints = getattr(decoder, "gradient_checkpointing", False) and decoder.training and torch.is_grad_enabled()
    use_cache = kwargs.get("use_cache")
    return not checkpoints and bool(getattr(decoder.config, "use_cache", False) if use_cache is None else use_cache)


def _continues(cache, routers) -> bool:
    """Whether the cache already holds the routing that this pass must follow."""
    if cache is None:
        return False
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise ValueError(f"`cache` must be a transformers cache with layers, got {type(cache).__name__}.")
    index = routers[0].layer.index
    layer = layers[index] if index < len(layers) else None
    past = 0 if layer is None else layer.get_seq_length()
    if getattr(layer, "gate", None) is not None:
        if isinstance(past, torch.Tensor):  # a static layer counts on the device: decoding must not wait for it
            return True
        if past > 0 and not torch.compiler.is_compiling():
            _check_lengths(layers, [router.layer.index for router in routers])
        return past > 0
    if past > 0:
        raise ValueError(
            f"`cache` must have been filled with this adapter active, got one with {int(past)} tokens and no routing."
        )
    return False


def _check_lengths(layers: Any, indices: list[int]) -> None:
    """Layers that free keys would go on from lengths of their own, where transformers' masks would not fit.

    Raises:
        ValueError: the layers hold different numbers of tokens.
    """
    lengths = {layers[index].get_seq_length() if index < len(layers) else 0 for index in indices}
    if len(lengths) > 1:
        raise ValueError(
            f"`cache` must hold the same tokens in every layer, got {min(lengths)} to {max(lengths)}: a pass did not "
            "come to its end; reset it, and read the whole text again."
        )


def _check_later_tokens(attention_mask: Any, count: int) -> None:
    """Single tokens are valid; to look at more waits for the device.

    Raises:
        ValueError: some of several tokens that follow a prompt are padding.
    """
    if count == 1 or torch.compiler.is_compiling():
        return
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2 and not attention_mask[:, -count:].all():
        raise ValueError(
            "`attention_mask` must be 1 for tokens that follow a prompt in the cache, got padding among them: rows "
            "with fewer new tokens continue in a pass of their own."
        )


def _check_ready(decoder: nn.Module, routers: list[ElasticLayer]) -> None:
    _refuse_reentrant_checkpoints(decoder)
    if not (decoder.training or decoder_scope(decoder).forced or torch.compiler.is_compiling()):
        routers[0].check_loaded()


def _refuse_reentrant_checkpoints(decoder: nn.Module) -> None:
    if not (decoder.training and torch.is_grad_enabled()):
        return
    for layer in decoder.layers:
        checkpoint: Any = getattr(layer, "_gradient_checkpointing_func", None)
        if getattr(layer, "gradient_checkpointing", False) and checkpoint.keywords.get("use_reentrant", True):
            raise ValueError(
                "`gradient_checkpointing_kwargs` must set use_reentrant to False, got True: a reentrant checkpoint "
                "would leave the routers without gradients."
            )


def pass_labels(model: nn.Module, args: tuple, kwargs: dict[str, Any]):
    """Pre-forward hook of the outer model: lets the decoder see the labels, so that answers are never pooled."""
    labels = kwargs.get("labels")
    if labels is None and len(args) > 1:
        labels = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments.get("labels")
    if labels is not None and kwargs.get("prompt_end") is None:
        kwargs["elastic_labels"] = labels
    return args, kwargs


def route_attention(attention: nn.Module, args: tuple, kwargs: dict[str, Any]):
    """Pre-forward hook of a routed attention module: turns the forward state into this layer's decisions."""
    state = kwargs.pop("elastic_state", None)
    router = attention.router
    if "elastic_route" in kwargs or router.active_config is None:
        return args, kwargs
    if state is None:
        raise RuntimeError(
            f"`elastic_state` must reach every routed layer, layer {router.layer.index} got none: the decoder layer "
            "dropped it, or the attention module was called outside its decoder."
        )
    hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    kwargs["elastic_route"] = router.route(attention, hidden_states, state, cache_argument(kwargs))
    return args, kwargs


def active_routers(decoder: nn.Module) -> list[ElasticLayer]:
    """The routers of `decoder` that route with the active adapter, in layer order; empty while disabled."""
    routers = (getattr(getattr(layer, "self_attn", None), "router", None) for layer in decoder.layers)
    return [router for router in routers if isinstance(router, ElasticLayer) and router.active_config is not None]
