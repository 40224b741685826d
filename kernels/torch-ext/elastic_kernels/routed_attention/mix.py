"""The mix of the two modes' outputs by a hard gate, and its gradient."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._sequences import segment_ids


def mix_by_gate(
    gate: Tensor,
    retrieval: Tensor,
    sparse: Tensor,
    cu_seqlens: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """The sparse output where the gate is 1 and the retrieval output where it is 0.

    The forward result is the selected output itself, so what the other mode holds (NaN included) cannot reach it.

    Args:
        gate: `[N, Hkv]`, exactly 0 or 1, one row a sequence: bool or int, or float to receive a gradient.
        retrieval: `[B, Hq, S, D]`, output of the pair's retrieval mode.
        sparse: `[B, Hq, S, D]`, output of the pair's sparse mode.
        cu_seqlens: int `[N + 1]`, bounds of packed segments in the flattened `B * S` tokens; None = N rows.
        weights: `[B, Hkv, S]`, what each token counts in the gate's gradient; None = 1.

    Returns:
        `[B, Hq, S, D]` in the outputs' dtype.

    Numerics:
        The gradient of the result goes to the selected output only. A float gate receives the inner product of that
        gradient with `sparse - retrieval`, summed over the group's query heads, the sequence's tokens and the
        dimensions, in float32 (float64 for float64 outputs).
    """
    batch, heads, length, _ = retrieval.shape
    if cu_seqlens is None:
        gate = gate[:, :, None, None]
    else:
        per_token = gate[segment_ids(cu_seqlens, batch * length)]
        gate = per_token.view(batch, length, -1).transpose(1, 2)[..., None]
    group = heads // gate.shape[1]
    gate = gate.repeat_interleave(group, dim=1)  # [B, Hq, 1 or S, 1]
    if gate.is_floating_point():
        if weights is not None:
            weights = weights.repeat_interleave(group, dim=1)[..., None]  # [B, Hq, S, 1]
        return _HardMix.apply(gate, retrieval, sparse, weights)
    return torch.where(gate.bool(), sparse, retrieval)


class _HardMix(torch.autograd.Function):
    """`(1 - gate) * retrieval + gate * sparse` at a gate of 0 or 1, with the unselected term left out."""

    @staticmethod
    def forward(ctx, gate: Tensor, retrieval: Tensor, sparse: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, retrieval, sparse, weights)
        return torch.where(gate.bool(), sparse, retrieval)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        gate, retrieval, sparse, weights = ctx.saved_tensors
        selected = gate.bool()
        zero = grad.new_zeros(())
        grad_gate = grad_retrieval = grad_sparse = None
        if ctx.needs_input_grad[0]:
            precision = torch.promote_types(grad.dtype, torch.float32)
            difference = sparse.to(precision) - retrieval.to(precision)
            product = grad.to(precision) * difference
            product = product if weights is None else product * weights
            grad_gate = product.sum_to_size(gate.shape).to(gate.dtype)
        if ctx.needs_input_grad[1]:
            grad_retrieval = torch.where(selected, zero, grad)
        if ctx.needs_input_grad[2]:
            grad_sparse = torch.where(selected, grad, zero)
        return grad_gate, grad_retrieval, grad_sparse, None
