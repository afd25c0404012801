"""Opening models: metadata, matrices, vectors, closing; the `gguf` package's writer and reader are the other side."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from frink_numba.errors import GgufError, ModelNotFoundError
from frink_numba.host.gguf import GgufFile
from tests.gguf_writer import quantize, write_gguf
from tests.random_blocks import random_matrix

_METADATA = {"general.architecture": "llama", "llama.block_count": 2, "general.name": "tiny"}


def _tiny(path: Path) -> Path:
    rng = np.random.default_rng(1)
    tensors = {
        "a.weight": random_matrix("Q4_K", 5, 512, rng),
        "b.weight": quantize(rng.standard_normal((3, 64)).astype(np.float32), "Q4_1"),
        "c.weight": rng.standard_normal(7).astype(np.float32),
        "d.weight": rng.standard_normal((2, 3, 4)).astype(np.float16),
    }
    return write_gguf(path, _METADATA, tensors)[0]


def _is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/maps")


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    path = _tiny(tmp_path / "tiny.gguf")
    content = path.read_bytes()
    with GgufFile.open(str(path)) as model:
        assert model.paths == (path,)
        assert model.version == 3
        assert list(model.tensors) == ["a.weight", "b.weight", "c.weight", "d.weight"]
        info = model.tensors["a.weight"]
        assert (info.kind.name, info.shape, info.nbytes) == ("Q4_K", (5, 512), 5 * 2 * 144)
        matrix = model.matrix("a.weight")
        assert (matrix.kind.name, matrix.rows, matrix.cols) == ("Q4_K", 5, 512)
        assert matrix.data.tobytes() == content[info.offset : info.offset + info.nbytes]
        assert not matrix.data.flags.owndata
        assert not matrix.data.flags.writeable
        assert model.tensors["d.weight"].shape == (2, 3, 4)
        assert "4 tensors" in repr(model)


def test_a_stack_of_matrices_is_views_of_the_file(tmp_path: Path) -> None:
    path = _tiny(tmp_path / "tiny.gguf")
    with GgufFile.open(path) as model:
        info = model.tensors["d.weight"]
        stack = model.matrices("d.weight")
        assert [(matrix.kind.name, matrix.rows, matrix.cols) for matrix in stack] == [("F16", 3, 4)] * 2
        content = path.read_bytes()[info.offset : info.offset + info.nbytes]
        assert b"".join(matrix.data.tobytes() for matrix in stack) == content
        assert not any(matrix.data.flags.owndata or matrix.data.flags.writeable for matrix in stack)


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read_alike(tmp_path: Path, version: int) -> None:
    """Fault 35."""
    path = _tiny(tmp_path / "tiny.gguf")
    content = bytearray(path.read_bytes())
    content[4] = version
    path.write_bytes(content)
    with GgufFile.open(path) as model:
        assert model.version == version
        assert model.metadata["general.name"] == "tiny"
        assert model.matrix("b.weight").rows == 3


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_custom_alignment(tmp_path: Path, alignment: int) -> None:
    vector = np.arange(5, dtype=np.float32)
    path = tmp_path / "aligned.gguf"
    write_gguf(path, _METADATA, {"x": np.ones(3, np.float32), "y": vector}, alignment=alignment)
    with GgufFile.open(path) as model:
        np.testing.assert_array_equal(model.vector("y"), vector)
        assert all(info.offset % alignment == 0 for info in model.tensors.values())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_vectors_become_float32(tmp_path: Path, kind: str) -> None:
    """Fault 22: F16 and BF16 norms and biases are converted, all finite bit patterns of the half kinds included."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    if kind == "BF16":
        stored = bits[(bits & 0x7F80) != 0x7F80]
        expected = (stored.astype(np.uint32) << 16).view(np.float32)
    else:
        stored = bits[(bits & 0x7C00) != 0x7C00]
        expected = stored.view(np.float16).astype(np.float32)
    path = tmp_path / "vector.gguf"
    tensor = expected if kind == "F32" else stored.view(np.float16)
    write_gguf(path, _METADATA, {"norm": tensor})
    if kind == "BF16":  # the package's writer has no one-dimensional BF16: the kind's number is put in its place
        content = bytearray(path.read_bytes())
        at = content.index(b"norm") + 4 + 4 + 8
        assert content[at] == 1
        content[at] = 30
        path.write_bytes(content)
    with GgufFile.open(path) as model:
        assert model.tensors["norm"].kind.name == kind
        vector = model.vector("norm")
    assert vector.dtype == np.float32
    np.testing.assert_array_equal(vector.view(np.uint32), expected.view(np.uint32))
    vector[0] = 1.0  # a copy, not the mapped file


def test_wrong_use_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    rng = np.random.default_rng(2)
    tensors = {"m": random_matrix("Q8_0", 2, 32, rng), "v": np.ones(2, np.int32), "s": np.ones((1, 2, 3), np.float32)}
    write_gguf(path, _METADATA, tensors)
    with GgufFile.open(path) as model:
        for call, message in [
            (lambda: model.matrix("nope"), "has no tensor 'nope'"),
            (lambda: model.matrix("s"), r"'s' has shape \[1, 2, 3\]; a matrix"),
            (lambda: model.matrices("m"), r"'m' has shape \[2, 32\]; a stack of matrices"),
            (lambda: model.matrices("nope"), "has no tensor 'nope'"),
            (lambda: model.vector("m"), r"'m' has shape \[2, 32\]; a vector"),
            (lambda: model.vector("v"), "'v' is of kind I32; a vector is read from F32, F16 or BF16"),
        ]:
            with pytest.raises(GgufError, match=message) as caught:
                call()
            assert str(path) in str(caught.value)


def test_scalar_tensor_has_no_dimensions(tmp_path: Path) -> None:
    path = tmp_path / "scalar.gguf"
    write_gguf(path, _METADATA, {"s": np.full((), 2.5, np.float32)})
    with GgufFile.open(path) as model:
        assert model.tensors["s"].shape == ()
        assert model.tensors["s"].nbytes == 4


@linux_only
def test_close_releases_the_mapping(tmp_path: Path) -> None:
    path = _tiny(tmp_path / "tiny.gguf")
    model = GgufFile.open(path)
    name = model.metadata["general.name"]
    model.vector("c.weight")
    assert _is_mapped(path)
    model.close()
    assert not _is_mapped(path)
    model.close()
    assert (name, model.metadata["general.name"], model.metadata["llama.block_count"]) == ("tiny", "tiny", 2)
    for read in (lambda: model.matrix("a.weight"), lambda: model.vector("c.weight")):
        with pytest.raises(GgufError, match="closed"):
            read()


@linux_only
def test_matrices_outlive_close(tmp_path: Path) -> None:
    """A matrix that is still in use keeps its bytes: no view ever points to memory that was given back."""
    path = _tiny(tmp_path / "tiny.gguf")
    with GgufFile.open(path) as model:
        matrix = model.matrix("a.weight")
        expected = matrix.data.copy()
    assert _is_mapped(path)
    np.testing.assert_array_equal(matrix.data, expected)
    del matrix
    gc.collect()
    assert not _is_mapped(path)


@linux_only
def test_a_refused_file_does_not_stay_mapped(tmp_path: Path) -> None:
    path = _tiny(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(GgufError) as caught:
        GgufFile.open(path)
    assert not _is_mapped(path)
    assert caught.value.__traceback__ is not None


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"absent\.gguf: there is no such file"):
        GgufFile.open(tmp_path / "absent.gguf")


def test_smollm2_agrees_with_the_gguf_package(smollm2_path: Path) -> None:
    """Every key and every tensor of the real file, metadata decoded and tensors' bytes compared."""
    reader = GGUFReader(smollm2_path)
    with GgufFile.open(smollm2_path) as model:
        fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        assert list(model.metadata) == list(fields)
        for name, field in fields.items():
            value = model.metadata[name]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), name
            assert model.metadata.type_name(name).split(" of ")[-1] == field.types[-1].name.lower()
        assert len(model.tensors) == len(reader.tensors) == 272
        for theirs, (name, info) in zip(reader.tensors, model.tensors.items(), strict=True):
            assert (name, info.kind.name, info.nbytes) == (theirs.name, theirs.tensor_type.name, theirs.n_bytes)
            assert info.shape == tuple(theirs.shape.tolist())[::-1]
            assert info.offset == theirs.data_offset
            if len(info.shape) == 2:
                np.testing.assert_array_equal(model.matrix(name).data, theirs.data.view(np.uint8))
            else:
                np.testing.assert_array_equal(model.vector(name), theirs.data)


def test_smollm2_opens_quickly(smollm2_path: Path) -> None:
    """Under 0.3 s is asked; half of it must do for opening and for decoding all metadata, token arrays included.

    Time of this thread's own work: other processes on the machine do not count.
    """
    seconds = []
    for _ in range(5):
        start = time.thread_time()
        with GgufFile.open(smollm2_path) as model:
            assert len(dict(model.metadata)["tokenizer.ggml.tokens"]) == 49152
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.15
