"""GGUF put together byte by byte, for files that no writer would write: wrong counts, lengths, types, offsets."""

from __future__ import annotations

import struct
from collections.abc import Sequence

UINT8, BOOL, UINT16, UINT32, INT32, FLOAT32, STRING, ARRAY = 0, 7, 2, 4, 5, 6, 8, 9
F32, Q4_0 = 0, 2


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw)) + raw


def key(name: str | bytes, value_type: int, value: bytes) -> bytes:
    return string(name) + u32(value_type) + value


def array(item_type: int, count: int, items: bytes) -> bytes:
    return u32(item_type) + u64(count) + items


def tensor(name: str | bytes, dims: Sequence[int], kind: int = F32, offset: int = 0) -> bytes:
    """`dims` in the file's order: the row length first."""
    return string(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def gguf(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A whole file: header, keys, tensor infos, padding to `alignment`, data. The counts are right unless given."""
    n_tensors = len(tensors) if n_tensors is None else n_tensors
    n_keys = len(keys) if n_keys is None else n_keys
    head = b"GGUF" + u32(version) + u64(n_tensors) + u64(n_keys) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data
