"""The shapes that all rows share, and random inputs of them."""

import torch
from torch import Tensor


HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SINK_SIZE, WINDOW_SIZE = 128, 2048
SIZES = {"mode_pair": "FA-SSA", "sink_size": SINK_SIZE, "window_size": WINDOW_SIZE}
SHAPES = (
    f"{HEADS} query heads, {KV_HEADS} key-value heads, head_dim {HEAD_DIM}, bf16, causal, "
    f"sink {SINK_SIZE}, window {WINDOW_SIZE}"
)


def label(length: int) -> str:
    """A number of tokens as row names write it: 512, 128K, 1M."""
    for unit, name in ((2**20, "M"), (2**10, "K")):
        if length >= unit:
            return f"{length // unit}{name}"
    return str(length)


def make_inputs(length: int, *, batch: int = 1, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    """Normal query, key and value `[batch, heads, length, HEAD_DIM]`, in memory as projections leave them."""
    generator = torch.Generator(device).manual_seed(length)
    options = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    query, key, value = (
        torch.randn(batch, length, heads, HEAD_DIM, **options).transpose(1, 2) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return query, key, value


def make_gate(share: float, *, batch: int = 1, device: str = "cuda") -> Tensor:
    """Gate bool `[batch, KV_HEADS]` in which the first `share` of the heads is sparse."""
    return (torch.arange(KV_HEADS, device=device) < round(share * KV_HEADS)).repeat(batch, 1)
