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
        raise SettingError(f"{name}={shown(value)}: expected an integer {span}") from None
    if isinstance(value, bool) or number < low or (high is not None and number > high):
        raise SettingError(f"{name}={shown(value)}: expected an integer {span}")
    return number


def shown(value: object) -> str:
    """`value` for a message, cut where it is long; a number may have more digits than Python writes out."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."
