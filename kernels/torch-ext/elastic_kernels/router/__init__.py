"""The attention router: from boundary keys to each head's decision."""

from .api import router
from .reference import LinearWeights, RouterOutput, RouterWeights


__all__ = ["LinearWeights", "RouterOutput", "RouterWeights", "router"]
