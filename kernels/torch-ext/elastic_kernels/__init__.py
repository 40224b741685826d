"""Attention for heads that each run their own mode: full, streaming or block-sparse."""

from .block_selection import KeptBlocks, block_selection
from .routed_attention import routed_attention
from .routed_decode import RaggedRows, routed_decode
from .router import LinearWeights, RouterOutput, RouterWeights, router


from . import _compiled  # noqa: F401  # isort: skip, registers the operators


__all__ = [
    "KeptBlocks",
    "LinearWeights",
    "RaggedRows",
    "RouterOutput",
    "RouterWeights",
    "block_selection",
    "routed_attention",
    "routed_decode",
    "router",
]
