"""Tile shapes of the block selection kernel, by head dimension, element size and device. A fixed table: see there."""

from typing import NamedTuple


class TileConfig(NamedTuple):
    """Query groups, key groups and channels per tile, warps per program, pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


INTERPRETER = TileConfig(16, 32, 32, 4, 1)


def selection_config(head_dim: int, element_size: int, capability: int) -> TileConfig:
    """Tile shape of the kernel.

    Args:
        head_dim: channels per head, 1 to 256.
        element_size: bytes per element, 2 or 4.
        capability: compute capability as 10 * major + minor.

    Returns:
        The configuration; its shared memory fits the device's limit (99 KiB where the capability is unknown).
    """
    if element_size == 4:
        return TileConfig(64, 64, 32, 4, 3)
    if capability == 90:
        return TileConfig(128, 256, 64, 8, 4)
    if capability in (80, 87, 100, 103):
        return TileConfig(128, 128, 64, 8, 3)
    return TileConfig(128, 128, 32, 8, 3)
