"""One tolerance rule for every numeric test, and the makers of its data."""

import torch
from torch import Tensor


def assert_as_accurate_as(
    actual: Tensor, reference: Tensor, eager: Tensor, *, what: str = "result", units: int = 2
) -> None:
    """Assert that `actual` is as near to the float64 `reference` as the same-dtype `eager` result, plus rounding.

    Rounding is `units` units in the last place of the largest reference value.

    Args:
        actual: the tensor under test, in the dtype under test.
        reference: the same quantity computed in float64.
        eager: the same quantity computed step by step in actual's dtype.
        what: name of the quantity in the message.
        units: 2; more for float32 where a kernel takes a GPU's exponential, which is off by up to two of them itself.
    """
    assert actual.shape == reference.shape, f"{what} has shape {tuple(actual.shape)}, not {tuple(reference.shape)}"
    assert actual.dtype == eager.dtype, f"{what} has dtype {actual.dtype}, not {eager.dtype}"
    assert reference.dtype == torch.float64, f"the reference of {what} must be float64, got {reference.dtype}"
    assert actual.isfinite().all(), f"{what} has {int((~actual.isfinite()).sum())} values that are not finite"
    error, eager_error = ((tensor.double() - reference).abs().max().item() for tensor in (actual, eager))
    rounding = units * torch.finfo(actual.dtype).eps * reference.abs().max().item()
    assert error <= eager_error + rounding, (
        f"{what} is off by {error:.3e}; eager {actual.dtype} by {eager_error:.3e}, rounding allows {rounding:.3e} more"
    )


def assert_equal_in_float64(actual: Tensor, expected: Tensor, *, what: str = "result") -> None:
    """Assert that two float64 computations of one quantity differ by rounding only; infinities must coincide."""
    assert actual.dtype == torch.float64, f"{what} has dtype {actual.dtype}, not float64"
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11, msg=lambda text: f"{what}: {text}")


def make_qkv(
    *,
    batch: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    length: int = 40,
    query_length: int | None = None,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float64,
    requires_grad: bool = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal query `[batch, heads, query_length or length, head_dim]`, key and value with `kv_heads` and `length`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, length if query_length is None else query_length), (kv_heads, length), (kv_heads, length)]
    tensors = (
        torch.randn(batch, count, tokens, head_dim, generator=generator, dtype=torch.float64)
        for count, tokens in shapes
    )
    query, key, value = (tensor.to(dtype).requires_grad_(requires_grad) for tensor in tensors)
    return query, key, value


def make_like(tensor: Tensor, *, seed: int = 1) -> Tensor:
    """A normal tensor of the same shape and dtype, such as an output's gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
