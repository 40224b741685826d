"""Tile shapes of the decode kernels, by query rows, head dimension, element size and device.

A fixed table rather than autotuning: the choice depends on shapes only and costs no host time at a step.
"""

from typing import NamedTuple


class DecodeConfig(NamedTuple):
    """Query rows and keys per tile, warps per program, pipeline stages, programs per multiprocessor."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int


INTERPRETER = DecodeConfig(16, 16, 4, 1, programs=3)
# Entries whose spans a program sums up at a time.
MAX_BLOCK_E = 1024

_KIB = 1024
# Shared memory of one multiprocessor.
_SHARED = {80: 163 * _KIB, 87: 163 * _KIB, 90: 227 * _KIB, 100: 227 * _KIB, 103: 227 * _KIB}
# Keys and values of one tile, how many tiles may be on their way, and the query rows and scores that registers hold.
_TILE = 32 * _KIB
_MAX_BUFFERS = 2
_MAX_QUERY, _MAX_SCORES, _MAX_BLOCK_M = 16 * _KIB, 64 * 64, 64


def decode_config(rows: int, head_dim: int, element_size: int, capability: int) -> DecodeConfig:
    """Tile shape of the decode kernel: as many bytes in flight on a multiprocessor as its shared memory holds.

    Args:
        rows: query tokens times query heads of a group.
        head_dim: channels per head, 16 to 256.
        element_size: bytes per element, 2 or 4.
        capability: compute capability as 10 * major + minor.

    Returns:
        The configuration; its shared memory fits the device's limit (99 KiB where the capability is unknown).
    """
    shared = _SHARED.get(capability, 99 * _KIB)
    programs = 2 if capability in _SHARED else 1
    row = max(16, 1 << (head_dim - 1).bit_length()) * element_size
    block_m = min(max(16, 1 << (rows - 1).bit_length()), _MAX_QUERY // row, _MAX_BLOCK_M)
    block_n = min(max(16, _TILE // (2 * row)), _MAX_SCORES // block_m, 128)
    # The query, the probabilities and the reductions' scratch lie beside the tiles.
    beside = block_m * (row + block_n * element_size) + 2 * _KIB
    buffers = (shared // programs - beside) // (2 * block_n * row)
    return DecodeConfig(block_m, block_n, 4, 1 + max(1, min(_MAX_BUFFERS, buffers)), programs)
