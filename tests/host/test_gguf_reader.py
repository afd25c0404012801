"""Damaged, hostile and foreign files: each is refused by a GgufError that names the file, the key or tensor, and why.

None of these files is over a few hundred bytes; none may cost memory or time beyond its size (faults 33 to 35).
"""

from __future__ import annotations

import io
import os
import re
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from frink_numba.errors import GgufError
from frink_numba.host import gguf_format
from frink_numba.host.gguf import GgufFile
from tests.gguf_bytes import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    Q4_0,
    STRING,
    UINT8,
    UINT32,
    array,
    gguf,
    key,
    string,
    tensor,
    u32,
    u64,
)
from tests.gguf_writer import quantize, write_gguf

GIB = 1 << 30
HUGE = (1 << 64) - 1


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("data.pkl", b"x")
    return buffer.getvalue()


def _one_key(value_type: int, value: bytes, name: str = "k") -> bytes:
    return gguf([key(name, value_type, value)])


def _one_tensor(dims: list[int], kind: int = 0, offset: int = 0, data: int = 256) -> bytes:
    return gguf([], [tensor("t", dims, kind, offset)], bytes(data))


_SAFETENSORS_HEADER = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'

REFUSED: dict[str, tuple[bytes, str]] = {
    # what is not GGUF at all
    "empty file": (b"", "the file is empty"),
    "one byte": (b"G", "not a GGUF file"),
    "magic alone": (b"GGUF", "the version takes 4 bytes"),
    "web page": (b"\n<!DOCTYPE html><html><body>404</body></html>", "a web page, not a model"),
    "json": (b'{"error": "not found"}', "JSON text"),
    "safetensors": (u64(len(_SAFETENSORS_HEADER)) + _SAFETENSORS_HEADER + bytes(4), "a safetensors file"),
    "zip": (_zip(), "a zip archive"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "a Git LFS pointer"),
    "old ggml": (b"tjgg" + u32(3) + bytes(64), "a GGML file from before GGUF"),
    "noise": (bytes(range(200, 240)), r"starts with b'\\xc8\\xc9\\xca\\xcb' instead of b'GGUF'"),
    # header
    "version 1": (b"GGUF" + u32(1) + u32(0) + u32(0), "has GGUF version 1; versions 2 and 3 are read"),
    "version 4": (gguf(version=4), "has GGUF version 4"),
    "version 0": (gguf(version=0), "has GGUF version 0"),
    "big-endian": (
        b"GGUF" + (3).to_bytes(4, "big") + (1).to_bytes(8, "big") * 2,
        r"big-endian GGUF file \(version 3\)",
    ),
    "no counts": (b"GGUF" + u32(3) + u64(1), "the number of keys takes 8 bytes"),
    "too many keys": (gguf(n_keys=HUGE), f"announces {HUGE} keys"),
    "more keys than bytes": (gguf(n_keys=60), "60 keys, which take 840 bytes from byte 24, but only 8 are left"),
    "too many tensors": (gguf(n_tensors=1 << 40), f"announces {1 << 40} tensors"),
    "more tensors than bytes": (gguf(n_tensors=9), "9 tensors, which take 225 bytes"),
    "one key short": (gguf([key("k", UINT32, u32(7))], n_keys=2), "name of key 1 has a length of 0"),
    # keys and values
    "key of a GiB": (gguf([u64(GIB) + bytes(120)]), f"name of key 0 has a length of {GIB} bytes"),
    "key without a name": (gguf([key("", UINT32, u32(1))]), "name of key 0 has a length of 0 bytes"),
    "key past the end": (gguf([u64(4000) + bytes(40)]), "name of key 0 takes 4000 bytes"),
    "key not utf-8": (gguf([key(b"k\xff", UINT32, u32(1))]), "name of key 0 is not valid UTF-8: 'k\ufffd'"),
    "key twice": (gguf([key("k", UINT32, u32(1)), key("k", INT32, u32(1))]), "key 'k' occurs twice"),
    "unknown type": (_one_key(13, u64(0)), "key 'k' has the unknown value type 13"),
    "unknown item type": (_one_key(ARRAY, array(77, 1, u64(0))), "items of key 'k' has the unknown value type 77"),
    "nested array": (_one_key(ARRAY, array(ARRAY, 1, array(UINT8, 1, b"x"))), "key 'k' is an array of arrays"),
    "string of a GiB": (_one_key(STRING, u64(GIB) + bytes(100)), f"key 'k' is a string of {GIB} bytes"),
    "string past the end": (_one_key(STRING, u64(1000) + bytes(100)), "string of key 'k' takes 1000 bytes"),
    "string of 2^64-1": (_one_key(STRING, u64(HUGE)), f"key 'k' is a string of {HUGE} bytes"),
    "numbers past the end": (
        _one_key(ARRAY, array(FLOAT32, GIB, bytes(64))),
        f"value of key 'k' takes {4 * GIB} bytes",
    ),
    "2^64-1 numbers": (_one_key(ARRAY, array(UINT8, HUGE, bytes(64))), f"value of key 'k' takes {HUGE} bytes"),
    "2^61 strings": (_one_key(ARRAY, array(STRING, 1 << 61, bytes(64))), f"key 'k' has {1 << 61} strings"),
    "strings past the end": (_one_key(ARRAY, array(STRING, 900, bytes(64))), "900 strings, which take 7200 bytes"),
    "item past the end": (
        _one_key(ARRAY, array(STRING, 3, string("a") + u64(500) + bytes(64))),
        "string 1 of key 'k' reaches past the end",
    ),
    "last item past the end": (
        _one_key(ARRAY, array(STRING, 2, string("a") + u64(500) + bytes(64))),
        "string 1 of key 'k' reaches past the end",
    ),
    "item of 2^63": (
        _one_key(ARRAY, array(STRING, 3, string("a") + u64(1 << 63) + bytes(64))),
        "string 1 of key 'k' reaches past the end",
    ),
    "item of 2^64-1": (
        _one_key(ARRAY, array(STRING, 2, u64(HUGE) + bytes(64))),
        "string 0 of key 'k' reaches past the end",
    ),
    "boolean 2": (_one_key(BOOL, b"\x02"), "key 'k' holds a boolean that is neither 0 nor 1"),
    "boolean 255 of many": (_one_key(ARRAY, array(BOOL, 3, b"\x00\xff\x01")), "key 'k' holds a boolean"),
    # alignment
    **{
        f"alignment {n}": (
            _one_key(UINT32, u32(n), "general.alignment"),
            f"'general.alignment' is {n}; it must be a power",
        )
        for n in (0, 1, 4, 12, 33, GIB, 1 << 31, (1 << 32) - 1)
    },
    "alignment of another type": (
        _one_key(INT32, u32(32), "general.alignment"),
        "'general.alignment' has the type int32, it must be uint32",
    ),
    "alignment array": (
        _one_key(ARRAY, array(UINT32, 1, u32(32)), "general.alignment"),
        "'general.alignment' has the type array",
    ),
    # tensor infos
    "tensor without a name": (gguf([], [tensor("", [4])], bytes(64)), "name of tensor 0 has a length of 0"),
    "tensor name not utf-8": (gguf([], [tensor(b"\x80", [4])], bytes(64)), "name of tensor 0 is not valid UTF-8"),
    "tensor twice": (
        gguf([], [tensor("t", [4]), tensor("t", [4], offset=32)], bytes(64)),
        "tensor 't' occurs twice",
    ),
    "5 dimensions": (_one_tensor([1] * 5), "tensor 't' has 5 dimensions"),
    "2^32-1 dimensions": (
        gguf([], [string("t") + u32(0xFFFFFFFF) + bytes(40)]),
        f"tensor 't' has {0xFFFFFFFF} dimensions",
    ),
    "dimension 0": (_one_tensor([4, 0]), r"tensor 't' has a dimension of 0: shape \[0, 4\]"),
    "dimensions that wrap to 0": (_one_tensor([1 << 32, 1 << 32]), f"tensor 't' .* takes {1 << 66} bytes"),
    "dimensions that wrap to 32": (_one_tensor([1 << 63, 2, 2, 16]), f"tensor 't' .* takes {1 << 71} bytes"),
    "largest dimensions": (_one_tensor([HUGE] * 4), "tensor 't' .* the whole file has"),
    "unknown kind": (_one_tensor([4], kind=42), "tensor 't' has tensor kind 42, which is unknown"),
    "kind 2^32-1": (_one_tensor([4], kind=0xFFFFFFFF), f"tensor 't' has tensor kind {0xFFFFFFFF}"),
    "removed kind": (_one_tensor([32], kind=31), "tensor kind 31, Q4_0_4_4, a kind removed from GGUF"),
    "partial block": (_one_tensor([33], kind=Q4_0), "tensor 't': Q4_0: a row of 33 elements is not a multiple"),
    "offset off the grid": (_one_tensor([4], offset=16), "tensor 't' starts at byte 16 .* not a multiple of 32"),
    "offset past the end": (_one_tensor([4], offset=4096), r"tensor 't' ends at byte \d+, but the file has \d+ bytes"),
    "offset 2^64-32": (_one_tensor([4], offset=HUGE - 31), r"tensor 't' ends at byte \d+, but the file has"),
    "data cut off": (_one_tensor([64], data=255), r"tensor 't' ends at byte \d+, but the file has \d+ bytes"),
    "no data": (_one_tensor([1], data=0), r"tensor 't' ends at byte \d+, but the file has \d+ bytes"),
    "overlap": (
        gguf([], [tensor("a", [16]), tensor("b", [4], offset=32)], bytes(256)),
        "tensor 'b' overlaps tensor 'a': it starts at byte 32 of the data, before 64",
    ),
    "overlap out of order": (
        gguf([], [tensor("a", [4], offset=32), tensor("b", [16])], bytes(256)),
        "tensor 'a' overlaps tensor 'b'",
    ),
    "same place": (gguf([], [tensor("a", [4]), tensor("b", [4])], bytes(256)), "tensor 'b' overlaps tensor 'a'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(tmp_path: Path, case: str) -> None:
    content, message = REFUSED[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises(GgufError, match=message) as caught:
            GgufFile.open(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(f"{path}: ")
    assert peak < 1 << 20
    assert time.perf_counter() - start < 1


def test_the_cases_spoil_a_file_that_loads(tmp_path: Path) -> None:
    """Each building block of the cases above is accepted when nothing is wrong with it."""
    keys = [
        key("k", UINT32, u32(7)),
        key("a", ARRAY, array(STRING, 2, string("x") + string("yz"))),
        key("b", ARRAY, array(BOOL, 2, b"\x00\x01")),
        key("general.alignment", UINT32, u32(64)),
    ]
    path = tmp_path / "sound.gguf"
    path.write_bytes(gguf(keys, [tensor("t", [32, 2], Q4_0), tensor("u", [1], offset=64)], bytes(68), alignment=64))
    with GgufFile.open(path) as model:
        assert model.metadata["a"] == ["x", "yz"]
        assert model.tensors["t"].shape == (2, 32)
        assert model.tensors["u"].offset % 64 == 0
        assert model.vector("u")[0] == 0


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    """A model cut off at any byte before the end of its last tensor."""
    path = tmp_path / "model.gguf"
    metadata = {"general.architecture": "llama", "tokens": ["a", "bc", "def"], "scores": np.ones(3, np.float32), "n": 5}
    weights = np.random.default_rng(1).standard_normal((2, 32)).astype(np.float32)
    write_gguf(path, metadata, {"a": quantize(weights, "Q8_0"), "b": np.ones(3, np.float32)})
    with GgufFile.open(path) as model:
        end = max(info.offset + info.nbytes for info in model.tensors.values())
    content = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(end):
        cut.write_bytes(content[:length])
        with pytest.raises(GgufError, match=re.escape(str(cut))):
            GgufFile.open(cut)
    cut.write_bytes(content[:end])
    GgufFile.open(cut).close()


def test_long_and_odd_names_are_shown_short_and_escaped(tmp_path: Path) -> None:
    path = tmp_path / "names.gguf"
    path.write_bytes(gguf([key("\x1b[31m" + "k" * 5000, 99, b"")]))
    with pytest.raises(GgufError) as caught:
        GgufFile.open(path)
    assert "\x1b" not in str(caught.value)
    assert r"'\x1b[31mkkk" in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(path))


def test_limits_hold_where_the_file_would_be_long_enough(tmp_path: Path) -> None:
    """Sparse files, whose counts fit inside them: without limits they would take minutes and gigabytes."""
    path = tmp_path / "sparse.gguf"
    for content, size, message in [
        (gguf(n_keys=gguf_format.MAX_KEYS + 1), 1 << 22, "more than the 65536 that are read"),
        (gguf(n_tensors=gguf_format.MAX_TENSORS + 1), 1 << 22, "more than the 65536 that are read"),
        (_one_key(ARRAY, array(STRING, 1 << 30, b"")), 1 << 34, "all arrays together may have 8388608"),
        (_one_key(STRING, u64(1 << 33)), 1 << 34, "more than the 67108864 that are read"),
    ]:
        path.write_bytes(content)
        os.truncate(path, size)
        start = time.perf_counter()
        with pytest.raises(GgufError, match=message):
            GgufFile.open(path)
        assert time.perf_counter() - start < 1


def test_strings_of_any_length_follow_each_other(tmp_path: Path) -> None:
    """A length of 256 bytes or more lies in more than one byte of its word, wherever it stands among short ones."""
    path = tmp_path / "lengths.gguf"
    for lengths in ([0], [0, 0, 0], [255, 1], [256, 1], [1, 256], [3, 70_000, 0, 255, 2], [1, 257, 65_536]):
        texts = [chr(97 + number) * length for number, length in enumerate(lengths)]
        path.write_bytes(gguf([key("k", ARRAY, array(STRING, len(texts), b"".join(map(string, texts))))]))
        with GgufFile.open(path) as file:
            assert file.metadata["k"] == texts


def test_string_arrays_share_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_format, "MAX_ARRAY_STRINGS", 3)
    two = array(STRING, 2, string("a") + string("b"))
    path = tmp_path / "strings.gguf"
    path.write_bytes(gguf([key("k", ARRAY, two)]))
    GgufFile.open(path).close()
    path.write_bytes(gguf([key("k", ARRAY, two), key("l", ARRAY, two)]))
    with pytest.raises(GgufError, match="key 'l' has 2 strings; all arrays together may have 3"):
        GgufFile.open(path)


def test_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="is a folder"):
        GgufFile.open(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_pipe_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    with pytest.raises(GgufError, match="is not a regular file"):
        GgufFile.open(path)


def test_name_that_no_file_can_have() -> None:
    for name in ("a\0b", "x" * 5000):
        with pytest.raises(GgufError, match="cannot be opened"):
            GgufFile.open(name)


@pytest.mark.skipif(sys.platform == "win32" or not hasattr(os, "geteuid") or os.geteuid() == 0, reason="needs no root")
def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "locked.gguf"
    path.write_bytes(gguf())
    path.chmod(0)
    with pytest.raises(GgufError, match="Permission denied"):
        GgufFile.open(path)
