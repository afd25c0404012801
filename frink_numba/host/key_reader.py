"""Typed access to the hyper-parameters `ARCH.*` of a file; an error names the file and the whole key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any, NoReturn

import numpy as np

from frink_numba.errors import GgufError, UnsupportedModelError

_SMALLEST, _LARGEST = 2.0**-126, 3.4e38  # of float32
_MAX = 1 << 31  # no dimension or length of a sound file reaches it


class KeyReader:
    """Keys are given without the prefix. GgufError for what is missing or malformed."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str, where: str) -> None:
        self.metadata, self.prefix, self.where = metadata, prefix, where

    def fail(self, key: str, problem: str) -> NoReturn:
        raise GgufError(f"{self.where}: {self.prefix}.{key} {problem}")

    def refuse(self, key: str, problem: str) -> NoReturn:
        raise UnsupportedModelError(f"{self.where}: {self.prefix}.{key} {problem}; this is not served")

    def refuse_unknown(self, consumed: Set[str], neutral: Mapping[str, Any]) -> None:
        """Refuse every key of this prefix but those `consumed` and those of their `neutral` value."""
        for key in self.names():
            if key in consumed:
                continue
            if key not in neutral:
                self.refuse(key[:80], "is not known to this version, and may change the result")
            value, wanted = self.metadata[f"{self.prefix}.{key}"], neutral[key]
            if not isinstance(value, bool | int | float) or value != wanted:
                shown = value if isinstance(value, bool | int | float) else f"a {type(value).__name__}"
                self.refuse(key, f"is {shown}, not {wanted}")

    def require(self, keys: Set[str]) -> None:
        """GgufError for the first of `keys`, in alphabetical order, that is missing."""
        for key in sorted(keys):
            self._get(key)

    def names(self) -> list[str]:
        """All keys of this prefix that the file holds."""
        return [full.removeprefix(f"{self.prefix}.") for full in self.metadata if full.startswith(f"{self.prefix}.")]

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.metadata

    def integer(self, key: str, *, default: int | None = None, low: int = 1) -> int:
        if default is not None and not self.has(key):
            return default
        return self._checked_integer(key, self._get(key), low)

    def per_layer(self, key: str, layers: int, *, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """One integer a layer, from an array of that length or a single number for all."""
        if default is not None and not self.has(key):
            return default
        value = self._get(key)
        if not isinstance(value, np.ndarray):
            return (self._checked_integer(key, value, 1),) * layers
        self._check_length(key, value, layers)
        if 0 in value:
            self.refuse(key, f"is 0 in layer {int(np.argmin(value))}: a layer without this part")
        return tuple(self._checked_integer(key, entry, 1) for entry in value.tolist())

    def pattern(self, key: str, layers: int, *, period: int) -> tuple[bool, ...]:
        """One flag a layer, from an array of them, or from a number n: all but each n-th; `period` without the key."""
        value = self._get(key) if self.has(key) else period
        if isinstance(value, np.ndarray):
            self._check_length(key, value, layers)
            if value.dtype != np.bool_ and not np.isin(value, (0, 1)).all():
                self.fail(key, "holds other values than true and false")
            return tuple(bool(entry) for entry in value)
        period = self._checked_integer(key, value, 1)
        return tuple(layer % period != period - 1 for layer in range(layers))

    def number(self, key: str, *, default: float | None = None) -> float:
        """A positive number that float32 holds without loss of digits."""
        if default is not None and not self.has(key):
            return default
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(key, f"holds a {type(value).__name__}; it must be a number")
        if not 0 < value < math.inf:
            self.fail(key, f"is {value}; it must be a positive number")
        if not _SMALLEST <= value <= _LARGEST:
            self.fail(key, f"is {value}; it must be a number that float32 can hold")
        return float(value)

    def text(self, key: str, *, default: str) -> str:
        value = self.metadata.get(f"{self.prefix}.{key}", default)
        if not isinstance(value, str):
            self.fail(key, f"holds a {type(value).__name__}; it must be a string")
        return value

    def _get(self, key: str) -> Any:
        if not self.has(key):
            self.fail(key, "is missing, and the model cannot be built without it")
        return self.metadata[f"{self.prefix}.{key}"]

    def _checked_integer(self, key: str, value: Any, low: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, f"holds a {type(value).__name__}; it must be an integer")
        if not low <= value < _MAX:
            self.fail(key, f"is {value}; it must be from {low} up to {_MAX - 1}")
        return value

    def _check_length(self, key: str, value: np.ndarray, layers: int) -> None:
        if value.shape != (layers,):
            self.fail(key, f"has {len(value)} entries for {layers} layers")
