"""Attention in which each key-value head of each sequence runs the mode that its gate names."""

from .api import routed_attention


__all__ = ["routed_attention"]
