"""Rules for the numbers of a configuration; each returns the plain Python number, which JSON can hold."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


#: Largest int32: kernels take sizes as such, and no sum of sizes and positions leaves int64.
MAX_SIZE = 2**31 - 1


def is_number(value: Any) -> bool:
    """Whether a value is a number.

    Args:
        value: anything.

    Returns:
        True for integers, floats and numpy's; False for True, False and all else.
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether a value is a finite number.

    Args:
        value: anything.

    Returns:
        True for a number by `is_number` that is finite as a float.
    """
    try:
        return is_number(value) and math.isfinite(value)
    except OverflowError:
        return False


def is_integer(value: Any) -> bool:
    """Whether a value is an integer.

    Args:
        value: anything.

    Returns:
        True for integers and numpy's; False for True, False and all else, floats without a fraction included.
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def plain(value: Any) -> int | float:
    """A number as Python's own.

    Args:
        value: a number by `is_number`, within the range of floats.

    Returns:
        An int for an integer, else a float.
    """
    return int(value) if is_integer(value) else float(value)


def check_integer(name: str, value: Any, minimum: int) -> int:
    """An integer field.

    Args:
        name: the field's.
        value: what it was given.
        minimum: least value that it may have.

    Returns:
        The value as an int.

    Raises:
        ValueError: it is no integer, or not from `minimum` to `MAX_SIZE`.
    """
    if not is_integer(value) or value < minimum:
        raise ValueError(f"`{name}` must be an integer of at least {minimum}, got {value!r}.")
    if value > MAX_SIZE:
        raise ValueError(f"`{name}` must be at most {MAX_SIZE}, got {value}.")
    return int(value)


def check_number(name: str, value: Any, *, finite: bool = True) -> int | float:
    """A field of any number.

    Args:
        name: the field's.
        value: what it was given.
        finite: whether infinite ones are refused.

    Returns:
        The value as an int or a float.

    Raises:
        ValueError: it is no number, infinite where it must not be, or beyond the range of floats.
    """
    is_infinite = is_number(value) and abs(value) == math.inf
    if not is_finite(value) and (finite or not is_infinite):
        raise ValueError(f"`{name}` must be a {'finite ' if finite else ''}number, got {value!r}.")
    return plain(value)


def check_ratio(name: str, value: Any) -> int | float:
    """A field of a share.

    Args:
        name: the field's.
        value: what it was given.

    Returns:
        The value as an int or a float.

    Raises:
        ValueError: it is no number in [0, 1].
    """
    if not is_number(value) or not 0 <= value <= 1:
        raise ValueError(f"`{name}` must be in [0, 1], got {value!r}.")
    return plain(value)
