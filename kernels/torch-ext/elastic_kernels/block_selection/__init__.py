"""XAttention's choice of key blocks for every query block and head."""

from .api import block_selection
from .kept_blocks import KeptBlocks


__all__ = ["KeptBlocks", "block_selection"]
