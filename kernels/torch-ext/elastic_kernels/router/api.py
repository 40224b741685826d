"""`router`: checks its arguments once and runs an implementation."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .._implementations import choose, gradient_obstacle, is_opaque, kernel_obstacle
from .._validation import check_device
from .reference import RouterOutput, RouterWeights, router_reference


def router(
    keys: Tensor,
    valid: Tensor,
    weights: RouterWeights,
    *,
    mean: Tensor | None = None,
    deviation: Tensor | None = None,
    sparsity_bias: float = 0.0,
    implementation: str | None = None,
) -> RouterOutput:
    """Which mode each key-value head of each sequence runs.

    `x = (mean over valid keys - mean) / deviation`, `y = task_down(silu(task_up(x)))`,
    `logits = router_out(silu(router_down(silu(router_up(y)))))`; a head is sparse where
    `logits[sparse] + sparsity_bias > logits[retrieval]`.

    Args:
        keys: `[N, T, H, head_dim]`, fp16, bf16, fp32 or fp64: keys of the prompt's boundary tokens before the rotary
            embedding.
        valid: bool `[N, T]`; other keys are not looked at. A sequence without any pools to zero.
        weights: the linear layers, of any floating-point dtype.
        mean: `[H, head_dim]`, subtracted from the pooled keys; None = no standardisation.
        deviation: `[H, head_dim]`, divides the difference; given exactly when `mean` is.
        sparsity_bias: added to the sparse logit before the decision, not to the result's logits.
        implementation: None to choose, or `"reference"` (plain torch, any device, differentiable) or `"triton"` (two
            fused launches, forward only); a named one never gives way to another.

    Returns:
        `RouterOutput(logits, gate, pooled)`: float32 `[N, H, 2]` in the order (retrieval, sparse), bool `[N, H]`,
        float32 `[N, H, head_dim]` before standardisation.

    Raises:
        ValueError: an argument that breaks a rule above.

    Numerics:
        Float32 throughout, whatever the dtype of keys and weights, autocast included (float64 for float64 keys).

    Source:
        Elastic Attention, arXiv 2601.17367; the standardisation is this project's.
    """
    _check_keys(keys, valid)
    _check_weights(weights, keys)
    _check_statistics(mean, deviation, keys)
    options: dict[str, Any] = {"mean": mean, "deviation": deviation, "sparsity_bias": sparsity_bias}
    if is_opaque((keys, *chain.from_iterable(weights))):
        from .._compiled import router_op

        return router_op(keys, valid, weights, implementation=implementation, **options)
    if choose(implementation, keys.device, lambda: _obstacle(keys, weights, mean, deviation)) == "triton":
        from .forward import router_forward as run
    else:
        run = router_reference
    return run(keys, valid, weights, **options)


def _check_keys(keys: Tensor, valid: Tensor) -> None:
    if keys.dim() != 4 or not keys.is_floating_point():
        raise ValueError(
            "`keys` must be floating point [sequences, tokens, heads, head_dim], "
            f"got {keys.dtype} {tuple(keys.shape)}."
        )
    check_device("valid", valid, keys, "keys'")
    if valid.dtype != torch.bool or valid.shape != keys.shape[:2]:
        raise ValueError(
            f"`valid` must be torch.bool of shape {tuple(keys.shape[:2])}, got {valid.dtype} {tuple(valid.shape)}."
        )


def _check_weights(weights: RouterWeights, keys: Tensor) -> None:
    head_dim, hidden = keys.shape[3], weights.task_up.weight.shape[0]
    shapes = ((hidden, head_dim), (head_dim, hidden), (hidden, head_dim), (head_dim, hidden), (2, head_dim))
    for name, layer, shape in zip(weights._fields, weights, shapes):
        check_device(f"weights.{name}", layer.weight, keys, "keys'")
        if layer.weight.shape != shape or layer.bias.shape != shape[:1]:
            raise ValueError(
                f"`weights.{name}` must have a weight {shape} and a bias {shape[:1]}, "
                f"got {tuple(layer.weight.shape)} and {tuple(layer.bias.shape)}."
            )


def _check_statistics(mean: Tensor | None, deviation: Tensor | None, keys: Tensor) -> None:
    if (mean is None) != (deviation is None):
        raise ValueError("`deviation` must be given exactly when `mean` is, got one of them.")
    for name, tensor in (("mean", mean), ("deviation", deviation)):
        if tensor is None:
            continue
        check_device(name, tensor, keys, "keys'")
        if tensor.shape != keys.shape[2:]:
            raise ValueError(f"`{name}` must have shape {tuple(keys.shape[2:])}, got {tuple(tensor.shape)}.")


def _obstacle(keys: Tensor, weights: RouterWeights, *statistics: Tensor | None) -> str | None:
    """Why the fused kernels cannot compute the call, None if they can."""
    tensors = [keys, *chain.from_iterable(weights), *(tensor for tensor in statistics if tensor is not None)]
    return kernel_obstacle(tensors, keys.shape[3]) or gradient_obstacle(tensors)
