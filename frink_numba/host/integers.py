"""Integer arguments, checked in one place."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from frink_numba.errors import SettingError


def checked_integer(name: str, value: SupportsIndex, low: int, high: int | None = None) -> int:
    """`value` as int; SettingError unless it is an integer (of NumPy too, bool is none) from `low` to `high`."""
    span = f"from {low} up" if high is None else f"from {low} to {high}"
    try:
        number = operator.index(value)
    except TypeError:
        raise SettingError(f"{name}={value!r}: expected an integer {span}") from None
    if isinstance(value, bool) or number < low or (high is not None and number > high):
        raise SettingError(f"{name}={value!r}: expected an integer {span}")
    return number
