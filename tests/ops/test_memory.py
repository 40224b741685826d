"""Long sequences: no tensor as large as the whole score matrix, and no repeat of keys and values."""

import functools

import pytest
import torch
from numerics import make_qkv
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_kernels import KeptBlocks, block_selection
from elastic_kernels.routed_attention import reference
from elastic_kernels.routed_attention.reference import block_sparse_attention, full_attention, streaming_attention


LENGTH = 6000


class ShapeRecorder(TorchDispatchMode):
    """Records the shape of every tensor that an operator returns."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.shapes.add(tuple(tensor.shape))
        return result

    @property
    def largest(self):
        return max(torch.Size(shape).numel() for shape in self.shapes)


def modes(length, heads):
    blocks = -(-length // 128)
    kept = KeptBlocks.from_mask(torch.ones(1, heads, blocks, blocks, dtype=torch.bool).tril(), 128)
    return {
        "FA": full_attention,
        "SSA": functools.partial(streaming_attention, sink_size=4, window_size=64),
        "XA": functools.partial(block_sparse_attention, kept_blocks=kept),
    }


@pytest.mark.parametrize("mode", ["FA", "SSA", "XA"])
def test_training_never_holds_the_score_matrix(mode):
    inputs = make_qkv(heads=1, kv_heads=1, length=LENGTH, dtype=torch.float32, requires_grad=True)
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with ShapeRecorder() as recorder:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output, _ = modes(LENGTH, heads=1)[mode](*inputs)
        kept_for_backward = sum(saved.values()) // 4
        output.sum().backward()
    assert recorder.largest < LENGTH * LENGTH / 4, f"a tensor of {recorder.largest} elements"
    assert kept_for_backward < LENGTH * LENGTH / 4, f"{kept_for_backward} elements kept for the backward"


def test_block_selection_never_holds_the_score_matrix():
    query, key, _ = make_qkv(heads=1, kv_heads=1, length=LENGTH, dtype=torch.float32)
    with ShapeRecorder() as recorder:
        block_selection(query, key)
    assert recorder.largest < LENGTH * LENGTH / 4, f"a tensor of {recorder.largest} elements"


def test_more_heads_make_shorter_chunks(monkeypatch):
    monkeypatch.setattr(reference, "_MAX_SCORES", 2**18)
    inputs = make_qkv(heads=12, kv_heads=2, length=600)
    with ShapeRecorder() as recorder:
        full_attention(*inputs)
    assert recorder.largest <= 2**18, f"a tensor of {recorder.largest} elements"


@pytest.mark.parametrize("mode", ["FA", "SSA", "XA"])
def test_keys_and_values_are_never_repeated(mode):
    inputs = make_qkv(heads=6, kv_heads=2, length=211, query_length=7, head_dim=64)
    blocks = modes(211, heads=6)
    with ShapeRecorder() as recorder:
        blocks[mode](*inputs)
    repeated = [shape for shape in recorder.shapes if torch.Size(shape).numel() >= 6 * 71 * 64]
    assert all(torch.Size(shape).numel() <= 2 * 211 * 64 for shape in repeated), f"repeated: {repeated}"
