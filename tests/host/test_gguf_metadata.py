"""Metadata values of every type, bytes that are not UTF-8, decoding on first access."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from frink_numba.errors import GgufError
from frink_numba.host.gguf import GgufFile
from frink_numba.host.gguf_format import ValueType
from frink_numba.host.gguf_metadata import StoredValue, _decoded_strings
from tests import gguf_bytes as raw
from tests.gguf_writer import write_gguf

_SCALARS = {
    "u8": np.uint8(250),
    "i8": np.int8(-5),
    "u16": np.uint16(65000),
    "i16": np.int16(-32000),
    "u32": np.uint32(4_000_000_000),
    "i32": np.int32(-2_000_000_000),
    "u64": np.uint64(2**64 - 1),
    "i64": np.int64(-(2**63)),
    "f32": np.float32(0.1),
    "f64": np.float64(0.1),
    "yes": True,
    "no": False,
    "text": "naïve 🦙\n",
    "empty": "",
}


def test_every_value_type(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    arrays = {
        f"array.{dtype}": rng.integers(0, 100, 9).astype(dtype)
        for dtype in ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64"]
    }
    arrays["array.bool"] = np.array([True, False, True])
    strings = ["", "a", "é", "🦙" * 40, "x" * 70000]
    metadata = {"general.architecture": "test", **_SCALARS, **arrays, "array.string": strings}
    path = tmp_path / "values.gguf"
    write_gguf(path, metadata, {"t": np.ones(1, np.float32)})
    with GgufFile.open(path) as model:
        got = model.metadata
        assert set(got) == set(metadata)
        assert len(got) == len(metadata)
        for key, value in _SCALARS.items():
            expected = value.item() if isinstance(value, np.generic) else value
            assert got[key] == expected
            assert type(got[key]) is type(expected)
        for key, value in arrays.items():
            assert got[key].dtype == value.dtype
            np.testing.assert_array_equal(got[key], value)
            assert got.count(key) == len(value)
            assert got.type_name(key) == f"array of {value.dtype.name}"
        assert got["array.string"] == strings
        assert got.count("array.string") == 5
        assert got.type_name("text") == "string"
        assert got.count("text") == 1
    # What was decoded stays readable, and belongs to no mapping.
    assert got["array.string"] == strings
    np.testing.assert_array_equal(got["array.int64"], arrays["array.int64"])


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    """A token may be any bytes: `raw` keeps them, the text shows U+FFFD and can always be encoded."""
    tokens = [b"ok", b"\xff\xfe", b"\xe2\x82", "é".encode(), b""]
    items = b"".join(map(raw.string, tokens))
    path = tmp_path / "tokens.gguf"
    path.write_bytes(
        raw.gguf(
            [
                raw.key("tokens", raw.ARRAY, raw.array(raw.STRING, 5, items)),
                raw.key("text", raw.STRING, raw.string(b"a\xc3")),
                raw.key("number", raw.UINT32, raw.u32(7)),
            ]
        )
    )
    with GgufFile.open(path) as model:
        assert model.metadata["tokens"] == ["ok", "\ufffd\ufffd", "\ufffd", "é", ""]
        assert model.metadata.raw("tokens") == tokens
        assert model.metadata["text"] == "a\ufffd"
        assert model.metadata.raw("text") == b"a\xc3"
        with pytest.raises(GgufError, match="'number' holds no strings but uint32"):
            model.metadata.raw("number")
        for missing in (lambda: model.metadata["none"], lambda: model.metadata.raw("none")):
            with pytest.raises(KeyError, match="none"):
                missing()
        assert "none" not in model.metadata
        assert model.metadata.get("none", 3) == 3


def test_empty_arrays(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.write_bytes(
        raw.gguf(
            [
                raw.key("strings", raw.ARRAY, raw.array(raw.STRING, 0, b"")),
                raw.key("numbers", raw.ARRAY, raw.array(raw.FLOAT32, 0, b"")),
            ]
        )
    )
    with GgufFile.open(path) as model:
        assert model.metadata["strings"] == []
        assert model.metadata["numbers"].shape == (0,)


def test_values_are_decoded_once(tmp_path: Path) -> None:
    path = tmp_path / "once.gguf"
    write_gguf(
        path, {"general.architecture": "test", "tokens": ["a", "b"], "left": ["c"]}, {"t": np.ones(1, np.float32)}
    )
    model = GgufFile.open(path)
    assert model.metadata["tokens"] is model.metadata["tokens"]
    model.close()
    assert model.metadata["tokens"] == ["a", "b"]
    with pytest.raises(GgufError, match=r"once\.gguf: the file was closed"):
        model.metadata["left"]


def _decoded(texts: list[bytes]) -> list[str]:
    """What becomes of an array of strings that begins at byte 5 of its file."""
    words = [raw.string(text) for text in texts]
    file = np.frombuffer(b"\xff" * 5 + b"".join(words), np.uint8)
    starts = 5 + np.cumsum([0, *map(len, words)])
    value = StoredValue(
        lambda start, stop: file[start:stop], ValueType.ARRAY, 5, file.size, ValueType.STRING, len(texts), starts
    )
    return _decoded_strings(value, starts)


def test_strings_decoded_together_are_those_decoded_alone() -> None:
    """Broken UTF-8 at the end of a string takes nothing from the next, and a string may hold a NUL."""
    rng = np.random.default_rng(0)
    pieces = [
        b"a",
        b"\xc3\xa9",
        b"\xe2\x82\xac",
        b"\xf0\x9f\xa6\x99",
        b"\xc3",
        b"\xe2\x82",
        b"\xf0\x9f",
        b"\xff",
        b"\x80",
    ]
    for nul in (False, True):
        for _ in range(300):
            texts = [b"".join(pieces[i] for i in rng.integers(0, len(pieces), rng.integers(0, 4))) for _ in range(5)]
            if nul:
                texts[2] += b"\0" + texts[1]
            assert _decoded(texts) == [text.decode("utf-8", "replace") for text in texts]
    assert _decoded([]) == []
    assert _decoded([b""]) == [""]
    assert _decoded([b"a" * 300, b"b"]) == ["a" * 300, "b"]
