"""Metadata of a GGUF file as a read-only mapping whose strings and arrays are decoded on first access."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from frink_numba.errors import GgufError
from frink_numba.host.gguf_format import NUMBER_TYPES, ValueType, shown


@dataclass(frozen=True, slots=True, eq=False)
class StoredValue:
    """Where a checked metadata value lies in its file: bytes `start` to `stop`, behind its type words.

    `read(start, stop)` gives bytes of the mapped file as a uint8 view, or raises GgufError once it is closed. For an
    array `item` is the type of its `count` items; an array of strings has `starts`, int64 [count + 1]: where each
    string's length word is, and the end of the last string.
    """

    read: Callable[[int, int], np.ndarray]
    type: ValueType
    start: int
    stop: int
    item: ValueType | None = None
    count: int = 1
    starts: np.ndarray | None = None

    def is_equal(self, other: StoredValue) -> bool:
        """Whether both values have the same type and the same bytes."""
        return (
            (self.type, self.item, self.count) == (other.type, other.item, other.count)
            and self.stop - self.start == other.stop - other.start
            and np.array_equal(self.read(self.start, self.stop), other.read(other.start, other.stop))
        )


class Metadata(Mapping[str, Any]):
    """Keys and values of a GGUF file.

    Numbers are int, float or bool; arrays of numbers are read-only NumPy arrays of the stored type; strings are str and
    arrays of strings list[str]. A string that is not valid UTF-8 is decoded with U+FFFD in place of the bad bytes, so
    that it can always be shown and encoded; `raw` gives the exact bytes, which a tokenizer needs. Strings and arrays
    are decoded once, at the first access, and kept: do not change a list that was handed out. After the file was closed
    only numbers and what was already decoded can be read; the rest raises GgufError.
    """

    def __init__(self, values: Mapping[str, StoredValue]) -> None:
        self._values = dict(values)
        self._decoded: dict[str, Any] = {
            key: _decode(value)
            for key, value in values.items()
            if value.item is None and value.type is not ValueType.STRING
        }

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            self._decoded[key] = _decode(self._values[key])
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def raw(self, key: str) -> bytes | list[bytes]:
        """The exact bytes of a string, or of each string of an array; GgufError when the value is neither."""
        value = self._values[key]
        if value.type is ValueType.STRING:
            return value.read(value.start + 8, value.stop).tobytes()
        if value.starts is None:
            raise GgufError(f"key {shown(key)} holds no strings but {self.type_name(key)}")
        return _string_bytes(value, value.starts)

    def type_name(self, key: str) -> str:
        """The stored type, for display: "uint32", "string", "array of string"."""
        value = self._values[key]
        if value.item is not None:
            return f"array of {value.item.name.lower()}"
        return value.type.name.lower()

    def count(self, key: str) -> int:
        """How many items an array has, without decoding it; 1 for any other value."""
        return self._values[key].count


def _decode(value: StoredValue) -> Any:
    if value.type is ValueType.STRING:
        return value.read(value.start + 8, value.stop).tobytes().decode("utf-8", "replace")
    if value.starts is not None:
        return _decoded_strings(value, value.starts)
    # A copy: the file aligns no metadata value, and the array must outlive the mapping.
    dtype = NUMBER_TYPES[value.type if value.item is None else value.item]
    numbers = np.frombuffer(value.read(value.start, value.stop).tobytes(), dtype=dtype)
    return numbers if value.item is not None else numbers[0].item()


def _decoded_strings(value: StoredValue, starts: np.ndarray) -> list[str]:
    """Each string as UTF-8; at once where none holds a NUL, which ends an unfinished character as an end does."""
    if not value.count:
        return []
    text, words = value.read(value.start, value.stop).copy(), starts[:-1] - value.start
    # A NUL in place of each length word: its last byte is set, the others are left out.
    text[words + 7] = 0
    kept = np.ones(text.size, bool)
    for byte in range(7):
        kept[words + byte] = False
    together = text[kept].tobytes()
    if together.count(b"\0") != value.count:
        return [text.decode("utf-8", "replace") for text in _string_bytes(value, starts)]
    return together.decode("utf-8", "replace").split("\0")[1:]


def _string_bytes(value: StoredValue, starts: np.ndarray) -> list[bytes]:
    text = value.read(value.start, value.stop).tobytes()
    return [text[start + 8 : stop] for start, stop in pairwise((starts - value.start).tolist())]
