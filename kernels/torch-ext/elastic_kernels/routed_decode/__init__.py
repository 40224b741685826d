"""Attention of the newest tokens over a cache, each key-value head in the mode that its gate names."""

from .api import routed_decode
from .storage import RaggedRows


__all__ = ["RaggedRows", "routed_decode"]
