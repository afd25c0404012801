"""Map one GGUF file and read its header: every count, length and offset is checked before it is used."""

from __future__ import annotations

import mmap
import os
import stat
import struct
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from frink_numba.errors import GgufError, ModelNotFoundError, ShapeError
from frink_numba.host import gguf_format as layout
from frink_numba.host.gguf_format import NUMBER_TYPES, ValueType, shown
from frink_numba.host.gguf_metadata import StoredValue
from frink_numba.quant import KINDS_BY_ID, QuantKind

_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the file: `shape` in NumPy's order (rows first, row length last), `offset` in bytes from the start of
    the file that is number `part` (from 0) of the model."""

    name: str
    kind: QuantKind
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    part: int = 0


@dataclass(slots=True)
class GgufPart:
    """One mapped file: its checked header, and its bytes until it is closed."""

    path: Path
    version: int = 0
    values: dict[str, StoredValue] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    _mapping: mmap.mmap | None = None
    _data: np.ndarray | None = None

    def read(self, start: int, stop: int) -> np.ndarray:
        """Bytes `start` to `stop` as a read-only uint8 view of the mapping; GgufError after close."""
        if self._data is None:
            raise GgufError(f"{self.path}: the file was closed; what was not read before cannot be read now")
        return self._data[start:stop]

    def close(self) -> None:
        """Unmap the file now, or as soon as the last view of its bytes is gone."""
        self._data = None
        if self._mapping is not None:
            # Views still out there hold the mapping: it stays until they go, so none of them can point nowhere.
            with suppress(BufferError):
                self._mapping.close()
            self._mapping = None


def read_part(path: Path, number: int = 0) -> GgufPart:
    """Map the file at `path` and read its header, as part `number` of a model.

    GgufError: not a sound little-endian GGUF file of version 2 or 3. ModelNotFoundError: no such file.
    """
    mapping = _map(path)
    part = GgufPart(path, _mapping=mapping, _data=np.frombuffer(mapping, dtype=np.uint8))
    try:
        with memoryview(mapping) as view:
            _Header(part, view, number).read()
    except BaseException:
        part.close()
        raise
    return part


def _map(path: Path) -> mmap.mmap:
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise GgufError(f"{path}: is a folder; give the path of a .gguf file in it")
        if not stat.S_ISREG(status.st_mode):
            # Opening a pipe would wait for its writer, and nothing but a file can be mapped.
            raise GgufError(f"{path}: is not a regular file, so it cannot be mapped into memory")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise GgufError(f"{path}: the file is empty; fetch it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        if isinstance(error, GgufError):
            raise
        raise GgufError(f"{path}: cannot be opened: {error}") from None


class _Header:
    """Reads a header from front to back. `at` is the position of the next byte that was not read yet."""

    def __init__(self, part: GgufPart, view: memoryview, number: int) -> None:
        self.part = part
        self.view = view
        self.size = len(view)
        self.number = number
        self.at = 0
        self.array_strings = 0

    def read(self) -> None:
        self._read_magic_and_version()
        n_tensors = self._u64("the number of tensors")
        n_keys = self._u64("the number of keys")
        # The smallest key: a length word, one character, a type word, a byte. The smallest tensor info: a length word,
        # one character, the number of dimensions, none of them, a kind word, an offset.
        self._check_count(n_keys, layout.MAX_KEYS, 14, "keys")
        self._check_count(n_tensors, layout.MAX_TENSORS, 25, "tensors")
        for index in range(n_keys):
            self._read_key(index)
        alignment = self._alignment()
        infos = [self._read_tensor_info(index, alignment) for index in range(n_tensors)]
        self._place_tensors(infos, self.at + -self.at % alignment)

    def _fail(self, message: str) -> GgufError:
        return GgufError(f"{self.part.path}: {message}")

    def _check_count(self, count: int, limit: int, smallest: int, what: str) -> None:
        if count > limit:
            raise self._fail(f"the header announces {count} {what}, more than the {limit} that are read")
        self._need(count * smallest, f"the header announces {count} {what}, which take")

    def _need(self, n: int, what: str) -> None:
        if n > self.size - self.at:
            left = self.size - self.at
            raise self._fail(f"{what} {n} bytes from byte {self.at}, but only {left} are left: damaged or cut off")

    def _u32(self, what: str) -> int:
        self._need(4, f"{what} takes")
        value: int = _U32(self.view, self.at)[0]
        self.at += 4
        return value

    def _u64(self, what: str) -> int:
        self._need(8, f"{what} takes")
        value: int = _U64(self.view, self.at)[0]
        self.at += 8
        return value

    def _read_magic_and_version(self) -> None:
        head = bytes(self.view[:256])
        if not head.startswith(layout.MAGIC):
            raise self._fail(layout.describe_foreign_file(head, self.size))
        self.at = 4
        version = self._u32("the version")
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in layout.VERSIONS:
            if swapped <= 0xFFFF and swapped:
                raise self._fail(
                    f"is a big-endian GGUF file (version {swapped}), only little-endian ones are read; "
                    "gguf-convert-endian of the gguf package converts it"
                )
            raise self._fail(f"has GGUF version {version}; versions 2 and 3 are read: convert the model anew")
        self.part.version = version

    def _name(self, what: str) -> str:
        length = self._u64(f"the length of {what}")
        if not 0 < length <= layout.MAX_NAME_BYTES:
            raise self._fail(f"{what} has a length of {length} bytes; 1 to {layout.MAX_NAME_BYTES} are possible")
        self._need(length, f"{what} takes")
        raw = bytes(self.view[self.at : self.at + length])
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._fail(f"{what} is not valid UTF-8: {shown(raw.decode('utf-8', 'replace'))}") from None

    def _read_key(self, index: int) -> None:
        key = self._name(f"the name of key {index}")
        what = f"key {shown(key)}"
        if key in self.part.values:
            raise self._fail(f"{what} occurs twice")
        value_type = self._value_type(what)
        if value_type is ValueType.STRING:
            value = self._read_string(what)
        elif value_type is ValueType.ARRAY:
            value = self._read_array(what)
        else:
            value = self._read_numbers(what, value_type, None, 1)
        self.part.values[key] = value

    def _value_type(self, what: str) -> ValueType:
        number = self._u32(f"the type of {what}")
        try:
            return ValueType(number)
        except ValueError:
            raise self._fail(f"{what} has the unknown value type {number}; types 0 to 12 are known") from None

    def _read_string(self, what: str) -> StoredValue:
        start = self.at
        length = self._u64(f"the length of {what}")
        if length > layout.MAX_STRING_BYTES:
            raise self._fail(
                f"{what} is a string of {length} bytes, more than the {layout.MAX_STRING_BYTES} that are read"
            )
        self._need(length, f"the string of {what} takes")
        self.at += length
        return StoredValue(self.part.read, ValueType.STRING, start, self.at)

    def _read_array(self, what: str) -> StoredValue:
        item = self._value_type(f"the items of {what}")
        count = self._u64(f"the length of {what}")
        if item is ValueType.ARRAY:
            raise self._fail(f"{what} is an array of arrays, which is not read")
        if item is ValueType.STRING:
            return self._read_string_array(what, count)
        return self._read_numbers(what, ValueType.ARRAY, item, count)

    def _read_numbers(self, what: str, value_type: ValueType, item: ValueType | None, count: int) -> StoredValue:
        number_type = value_type if item is None else item
        start = self.at
        n_bytes = count * NUMBER_TYPES[number_type].itemsize
        self._need(n_bytes, f"the value of {what} takes")
        self.at += n_bytes
        if number_type is ValueType.BOOL and count and self.part.read(start, self.at).max() > 1:
            raise self._fail(f"{what} holds a boolean that is neither 0 nor 1")
        return StoredValue(self.part.read, value_type, start, self.at, item, count)

    def _read_string_array(self, what: str, count: int) -> StoredValue:
        self.array_strings += count
        if self.array_strings > layout.MAX_ARRAY_STRINGS:
            raise self._fail(f"{what} has {count} strings; all arrays together may have {layout.MAX_ARRAY_STRINGS}")
        self._need(8 * count, f"{what} has {count} strings, which take")
        starts = self._short_strings(count)
        if starts is None:
            starts = self._long_strings(what, count)
        start, self.at = self.at, starts[-1]
        stops = np.frombuffer(starts, dtype=np.int64)
        return StoredValue(self.part.read, ValueType.ARRAY, start, self.at, ValueType.STRING, count, stops)

    # One pass over the length words alone: a vocabulary has 50,000 to 300,000 of them, so the loops stay bare. A length
    # that leads out of the file stops them at the next step.

    def _short_strings(self, count: int) -> array[int] | None:
        """Where the length word of each of `count` strings is, and the last one's end; None if one has 256 bytes."""
        at, view = self.at, self.view
        starts = array("q")
        append = starts.append
        try:
            for _ in range(count):
                append(at)
                at += 8 + view[at]  # its lowest byte: half the time of reading the whole word
        except IndexError:
            return None
        if at > self.size:
            return None
        words, data = np.array(starts, dtype=np.int64), self.part.read(0, self.size)
        if any(data[words + byte].any() for byte in range(1, 8)):
            return None
        append(at)
        return starts

    def _long_strings(self, what: str, count: int) -> array[int]:
        """`_short_strings` for strings of any length; GgufError for one that reaches past the end of the file."""
        at, view = self.at, self.view
        starts = array("q")
        append = starts.append
        try:
            for _ in range(count):
                append(at)
                at += 8 + _U64(view, at)[0]
        except (struct.error, OverflowError):
            at = self.size + 1
        if at > self.size:
            index = min(len(starts), count) - 1
            index -= starts[index] > self.size - 8
            raise self._fail(f"string {index} of {what} reaches past the end of the file: damaged or cut off")
        append(at)
        return starts

    def _alignment(self) -> int:
        value = self.part.values.get("general.alignment")
        if value is None:
            return layout.DEFAULT_ALIGNMENT
        if value.type is not ValueType.UINT32:
            raise self._fail(f"key 'general.alignment' has the type {value.type.name.lower()}, it must be uint32")
        alignment: int = _U32(self.view, value.start)[0]
        if alignment & (alignment - 1) or not layout.MIN_ALIGNMENT <= alignment <= layout.MAX_ALIGNMENT:
            raise self._fail(
                f"key 'general.alignment' is {alignment}; it must be a power of two from {layout.MIN_ALIGNMENT} to "
                f"{layout.MAX_ALIGNMENT}"
            )
        return alignment

    def _read_tensor_info(self, index: int, alignment: int) -> TensorInfo:
        """The info as stored: its offset still counts from the start of the tensors' bytes."""
        name = self._name(f"the name of tensor {index}")
        what = f"tensor {shown(name)}"
        n_dims = self._u32(f"the number of dimensions of {what}")
        if n_dims > layout.MAX_DIMENSIONS:
            raise self._fail(f"{what} has {n_dims} dimensions; at most {layout.MAX_DIMENSIONS} are possible")
        shape = tuple(self._u64(f"a dimension of {what}") for _ in range(n_dims))[::-1]
        if 0 in shape:
            raise self._fail(f"{what} has a dimension of 0: shape {list(shape)}")
        kind_id = self._u32(f"the kind of {what}")
        kind = KINDS_BY_ID.get(kind_id)
        if kind is None:
            removed = layout.REMOVED_KINDS.get(kind_id)
            known = f"{removed}, a kind removed from GGUF" if removed else "which is unknown here"
            raise self._fail(f"{what} has tensor kind {kind_id}, {known}; convert or quantize the model anew")
        offset = self._u64(f"the offset of {what}")
        if offset % alignment:
            raise self._fail(f"{what} starts at byte {offset} of the data, which is not a multiple of {alignment}")
        # Python's integers do not overflow: dimensions whose product would wrap around in 64 bits are just too large.
        *outer, cols = shape or (1,)
        try:
            nbytes = kind.row_bytes(cols)
        except ShapeError as error:
            raise self._fail(f"{what}: {error}") from None
        for dim in outer:
            nbytes *= dim
        if nbytes > self.size:
            raise self._fail(
                f"{what} of kind {kind} and shape {list(shape)} takes {nbytes} bytes, the whole file has {self.size}"
            )
        return TensorInfo(name, kind, shape, nbytes, offset, self.number)

    def _place_tensors(self, infos: list[TensorInfo], data_start: int) -> None:
        end = 0
        before = ""
        for info in sorted(infos, key=lambda info: info.offset):
            what = f"tensor {shown(info.name)}"
            if info.offset < end:
                raise self._fail(f"{what} overlaps {before}: it starts at byte {info.offset} of the data, before {end}")
            end = info.offset + info.nbytes
            before = what
            if data_start + end > self.size:
                raise self._fail(
                    f"{what} ends at byte {data_start + end}, but the file has {self.size} bytes: damaged or cut off"
                )
        for info in infos:
            if info.name in self.part.tensors:
                raise self._fail(f"tensor {shown(info.name)} occurs twice")
            self.part.tensors[info.name] = TensorInfo(
                info.name, info.kind, info.shape, info.nbytes, data_start + info.offset, info.part
            )
