"""Routed attention on the fused kernels as a differentiable function."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .counterfactual import SampledTiles


def differentiable(
    forward: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    *,
    sinks: Tensor | None,
    with_lse: bool,
    sampled: SampledTiles | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Runs a fused forward such that its output has gradients where an input requires them.

    Args:
        forward: launcher of a fused forward.
        query, key, value, gate, sinks, options: what it takes, as `routed_attention`.
        sampled: the tiles of queries that the gate's gradient is estimated from; None = all.
        with_lse: whether the caller reads the log-denominator.

    Returns:
        The output, and the log-denominator without gradient, or None where nobody reads it.
    """
    inputs = (query, key, value, gate, sinks)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return _RoutedAttention.apply(*inputs, forward, sampled, options)
    return forward(query, key, value, gate, sinks=sinks, with_lse=with_lse, **options)


class _RoutedAttention(torch.autograd.Function):
    """The fused forward and the backward of the modes that ran.

    Kept between the passes: the inputs, the output and the log-denominator. The output of the mode that a head did not
    run, which only the gate's gradient needs, is computed by the backward: its memory is short-lived, and a
    checkpointed layer, whose forward runs twice, computes it once.
    """

    @staticmethod
    def forward(ctx, query, key, value, gate, sinks, forward, sampled, options):
        output, lse = forward(query, key, value, gate, sinks=sinks, **options)
        ctx.save_for_backward(query, key, value, gate, sinks, output, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.forward, ctx.sampled, ctx.options = forward, sampled, options
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, _):
        from .backward import routed_attention_backward

        if grad_output is None:
            return (None,) * 8
        *inputs, output, lse = ctx.saved_tensors
        needs = ctx.needs_input_grad[: len(inputs)]
        grads = routed_attention_backward(
            grad_output, inputs, (output, lse), needs, ctx.forward, ctx.sampled, **ctx.options
        )
        return *grads, None, None, None
