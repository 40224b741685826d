"""Attention for heads that each run their own mode: full, streaming or block-sparse."""

from .block_selection import KeptBlocks, block_selection
from .routed_attention import routed_attention


__all__ = ["KeptBlocks", "block_selection", "routed_attention"]
