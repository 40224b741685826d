"""Tile shapes of the routed attention kernels, by head dimension, element size and device.

A fixed table rather than autotuning: the choice then depends on shapes only, costs no host time at the first call of a
length, and cannot differ between the ranks of one job.
"""

from typing import NamedTuple


class TileConfig(NamedTuple):
    """Queries and keys per tile, warps per program, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


INTERPRETER = TileConfig(32, 16, 4, 1)


def prefill_config(head_dim: int, element_size: int, capability: int) -> TileConfig:
    """Tile shape of the portable prefill kernel.

    Args:
        head_dim: channels per head, 16 to 256.
        element_size: bytes per element, 2 or 4.
        capability: compute capability as 10 * major + minor.

    Returns:
        The configuration; its shared memory fits the device's limit (99 KiB where the capability is unknown).
    """
    large = capability in (80, 87, 90, 100, 103)
    if element_size == 4:
        if head_dim <= 64:
            return TileConfig(64, 32, 4, 2)
        return TileConfig(64, 32, 8, 2) if head_dim <= 128 and large else TileConfig(32, 16, 4, 1)
    if head_dim <= 64:
        return TileConfig(128, 64, 4, 3)
    if head_dim <= 128:
        return TileConfig(128, 64, 8, 3 if large else 2)
    return TileConfig(128, 64, 8, 2) if large else TileConfig(64, 32, 4, 1)


def dq_config(head_dim: int, element_size: int, capability: int) -> TileConfig:
    """Tile shape of the kernel for the gradient of the queries; arguments as for `prefill_config`."""
    large = capability in (80, 87, 90, 100, 103)
    if element_size == 4:
        return TileConfig(32, 16, 4, 1)
    if head_dim <= 64:
        return TileConfig(128, 64, 8, 3)
    if head_dim <= 128:
        return TileConfig(64, 64, 4, 2) if large else TileConfig(64, 32, 4, 2)
    return TileConfig(64, 32, 8, 2) if large else TileConfig(32, 32, 4, 1)


def dkv_config(head_dim: int, element_size: int, capability: int) -> TileConfig:
    """Tile shape of the kernel for the gradients of keys and values; arguments as for `prefill_config`."""
    large = capability in (80, 87, 90, 100, 103)
    if element_size == 4:
        return TileConfig(16, 32 if head_dim <= 128 else 16, 4, 1)
    if head_dim <= 64:
        return TileConfig(64, 128, 8, 2)
    if head_dim <= 128:
        return TileConfig(64, 128, 8, 2) if large else TileConfig(32, 64, 4, 2)
    return TileConfig(32, 64, 8, 2) if large else TileConfig(32, 32, 4, 1)
