"""GGUF on disk: value types, header limits, and what a file that is not GGUF seems to be.

Layout, all little-endian: magic "GGUF", version u32, tensor count u64, key count u64; then the keys (string, value
type u32, value), the tensor infos (string, dimension count u32, dimensions u64 with the row length first, kind u32,
offset u64), padding up to the alignment, and the tensors' bytes. A string is a length u64 and that many bytes; an array
is an item type u32, a count u64 and the items. Versions 2 and 3 share it; version 3 added big-endian files.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
SPLIT_KEYS = frozenset({"split.no", "split.count", "split.tensors.count"})


class ValueType(IntEnum):
    """The type of a metadata value, as stored."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


NUMBER_TYPES: dict[ValueType, np.dtype] = {
    ValueType.UINT8: np.dtype("u1"),
    ValueType.INT8: np.dtype("i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("?"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}

# Limits far above any real model. Without them a sparse file of many gigabytes could ask for hours and for gigabytes of
# Python objects while every count still fits inside the file.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = (1 << 16) - 1  # the specification's limit on keys
MAX_STRING_BYTES = 1 << 26  # a tokenizer.json kept in the metadata has some 30 MB
MAX_ARRAY_STRINGS = 1 << 23  # in all arrays of a file together; the largest vocabularies have some 800,000 with merges
MIN_ALIGNMENT = 8  # the specification wants a multiple of 8
MAX_ALIGNMENT = 1 << 24
MAX_DIMENSIONS = 4

# Kinds that GGUF files once held and that no reader takes any more.
REMOVED_KINDS = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

_OTHER_FORMATS = (
    (b"PK\x03\x04", "a zip archive (perhaps a PyTorch checkpoint or a wheel)"),
    (b"\x1f\x8b", "a gzip archive; unpack it first"),
    (b"\x80\x02", "a Python pickle (perhaps an old PyTorch checkpoint)"),
    (b"version https://git-lfs", "a Git LFS pointer: the model itself was not downloaded (git lfs pull fetches it)"),
    (b"lmgg", "a GGML file from before GGUF; convert it anew from the original model"),
    (b"fmgg", "a GGML file from before GGUF; convert it anew from the original model"),
    (b"tjgg", "a GGML file from before GGUF; convert it anew from the original model"),
    (b"FUGG", "a GGUF file whose bytes are swapped"),
)


def describe_foreign_file(head: bytes, size: int) -> str:
    """What a file of `size` bytes that starts with `head` (64 bytes or more, if it has them) seems to be."""
    for magic, description in _OTHER_FORMATS:
        if head.startswith(magic):
            return description
    header_length = int.from_bytes(head[:8], "little")
    if head[8:10] in (b'{"', b"{}") and header_length <= size:
        return "a safetensors file; convert it to GGUF first"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "a web page, not a model: the download went to a page of the site; fetch the file itself"
    if text.startswith(b"{"):
        return "JSON text, perhaps an error message of a download"
    return f"not a GGUF file: it starts with {head[:4]!r} instead of {MAGIC!r}"


def shown(name: str) -> str:
    """A key or name of the file as an error shows it: quoted, control characters escaped, at most 80 characters."""
    return repr(name if len(name) <= 80 else name[:77] + "...")
