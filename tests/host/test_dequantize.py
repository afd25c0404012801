"""Dequantization against the `gguf` package: zero tolerance, whole arrays, random non-zero blocks (fault 21)."""

from __future__ import annotations

import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGMLQuantizationType

from frink_numba.errors import ShapeError, UnsupportedModelError
from frink_numba.host.dequantize import dequantize, dequantize_rows
from frink_numba.host.dequantize_blocks import BLOCK_FUNCTIONS
from frink_numba.host.gguf import GgufFile
from frink_numba.quant import KINDS, QuantKind, QuantMatrix
from tests.random_blocks import RANDOM_KINDS, random_matrix


def _gguf_package_reads(kind: QuantKind) -> bool:
    try:
        quants.dequantize(np.zeros((1, kind.block_bytes), np.uint8), GGMLQuantizationType(kind.ggml_id))
    except (ValueError, NotImplementedError):
        return False
    return True


_READABLE = sorted(kind.name for kind in KINDS.values() if _gguf_package_reads(kind))
# An older gguf package may lack a kind that we expand ourselves.
_UNREADABLE = sorted(KINDS.keys() - set(_READABLE) - set(BLOCK_FUNCTIONS))


def _oracle(matrix: QuantMatrix) -> np.ndarray:
    with np.errstate(all="ignore"):
        return quants.dequantize(matrix.data, GGMLQuantizationType(matrix.kind.ggml_id))


def _bits(values: np.ndarray) -> np.ndarray:
    assert values.dtype == np.float32
    return values.view(np.uint32)


@pytest.mark.parametrize("extreme", [False, True], ids=["weights", "extreme"])
@pytest.mark.parametrize("kind", _READABLE)
def test_equals_the_gguf_package_bit_for_bit(kind: str, extreme: bool) -> None:
    """Over 200,000 elements, more than are expanded at a time; `extreme` has subnormal and enormous scales."""
    matrix = random_matrix(kind, 67, 3072, np.random.default_rng(21), extreme=extreme)
    expected = _oracle(matrix)
    got = dequantize(matrix)
    assert np.count_nonzero(expected) > expected.size // 8
    assert not np.isnan(expected).any()
    np.testing.assert_array_equal(_bits(got), _bits(expected))


def test_random_blocks_cover_every_readable_kind() -> None:
    assert set(RANDOM_KINDS) >= set(_READABLE)


@pytest.mark.parametrize("kind", _READABLE)
def test_every_byte_value_of_a_scale_free_block(kind: str) -> None:
    """Blocks of one repeated byte, all 256 of them: each nibble and each bit pattern, in every field at once."""
    quant_kind = KINDS[kind]
    data = np.repeat(np.arange(256, dtype=np.uint8), quant_kind.block_bytes).reshape(256, -1)
    matrix = QuantMatrix(quant_kind, data, 256, quant_kind.block)
    expected = _oracle(matrix)
    got = dequantize(matrix)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), ~number)
    np.testing.assert_array_equal(_bits(got)[number], _bits(expected)[number])


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "IQ3_S", "F16"])
def test_row_ranges_and_out(kind: str) -> None:
    matrix = random_matrix(kind, 9, 512, np.random.default_rng(3))
    whole = dequantize(matrix)
    for start, stop in [(0, 9), (2, 5), (8, 9), (4, 4), (3, None)]:
        np.testing.assert_array_equal(_bits(dequantize(matrix, start, stop)), _bits(whole[start:stop]))
    buffer = np.full((20, 512), np.nan, np.float32)
    out = buffer[5:8]
    assert dequantize(matrix, 2, 5, out) is out
    np.testing.assert_array_equal(_bits(buffer[5:8]), _bits(whole[2:5]))
    assert np.isnan(buffer[:5]).all()
    assert np.isnan(buffer[8:]).all()


@pytest.mark.parametrize("rows", [1, 4095, 4096, 4097, 8192, 8193])
def test_whole_steps_and_one_block_more(rows: int) -> None:
    """131,072 elements are expanded at a time, 4,096 blocks here: none is left out at either side of a step's end."""
    matrix = random_matrix("Q8_0", rows, 32, np.random.default_rng(9))
    out = np.full((rows, 32), np.nan, np.float32)
    np.testing.assert_array_equal(_bits(dequantize(matrix, out=out)), _bits(_oracle(matrix)))


@pytest.mark.parametrize("ids", [[0, 4, 4, 8, 1], np.array([7], np.uint16), [], np.arange(9)[::-1]])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "IQ3_S", "F32"])
def test_gathered_rows(kind: str, ids: object) -> None:
    """Fault 22: a quantized embedding is expanded, never read as floats."""
    matrix = random_matrix(kind, 9, 512, np.random.default_rng(4))
    got = dequantize_rows(matrix, ids)
    np.testing.assert_array_equal(_bits(got), _bits(dequantize(matrix)[np.asarray(ids, np.intp)]))
    assert got.shape == (len(ids), 512)


@pytest.mark.parametrize("ids", [[9], [-1], [0, 1 << 40], [0.0], [[1]], [True]])
def test_rows_outside_the_matrix_are_refused(ids: list[object]) -> None:
    """R20: a named error, never an out-of-range read."""
    with pytest.raises(ShapeError, match="row"):
        dequantize_rows(random_matrix("Q8_0", 9, 32, np.random.default_rng(5)), ids)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 10), (5, 4), (10, 10)])
def test_row_range_outside_the_matrix_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ShapeError, match=f"rows {start} to {stop} of a matrix of 9 rows"):
        dequantize(random_matrix("Q8_0", 9, 32, np.random.default_rng(5)), start, stop)


def test_unfit_out_is_refused() -> None:
    matrix = random_matrix("Q8_0", 9, 32, np.random.default_rng(5))
    read_only = np.empty((9, 32), np.float32)
    read_only.flags.writeable = False
    for out, word in [
        (np.empty((9, 64), np.float32)[:, ::2], "not contiguous"),
        (np.empty((9, 33), np.float32), r"\[9, 33\]"),
        (np.empty((9, 32), np.float64), "float64"),
        (read_only, "read-only"),
    ]:
        with pytest.raises(ShapeError, match=word):
            dequantize(matrix, out=out)


@pytest.mark.parametrize("kind", _UNREADABLE)
def test_kinds_without_weights_are_refused_by_name(kind: str) -> None:
    quant_kind = KINDS[kind]
    matrix = QuantMatrix(quant_kind, np.zeros((1, quant_kind.block_bytes), np.uint8), 1, quant_kind.block)
    with pytest.raises(UnsupportedModelError, match=f"kind {kind} "):
        dequantize(matrix)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q8_0", "F16", "IQ4_XS"])
def test_non_finite_scales_stay_what_they_are(kind: str) -> None:
    """Infinite and NaN scales warn of nothing, and reach the same elements as in the gguf package."""
    matrix = random_matrix(kind, 4, 512, np.random.default_rng(6))
    data = matrix.data.copy()
    data[1, :2] = (0x00, 0x7C)
    data[2, :2] = (0x01, 0x7E)
    matrix = QuantMatrix(matrix.kind, data, 4, 512)
    np.testing.assert_array_equal(dequantize(matrix), _oracle(matrix))


@pytest.mark.parametrize("kind", _READABLE)
def test_temporary_memory_is_bounded(kind: str) -> None:
    """Four million elements into a given array: the temporaries stay far below the 16 MiB of the result."""
    matrix = random_matrix(kind, 64, 65536, np.random.default_rng(7))
    out = np.empty((64, 65536), np.float32)
    dequantize(matrix, 0, 1, out[:1])  # the grids of some kinds are made once, the gguf package is imported
    tracemalloc.start()
    try:
        dequantize(matrix, out=out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20


def test_common_kinds_do_not_import_the_gguf_package() -> None:
    """Importing it takes longer than opening a model."""
    code = (
        "import sys, numpy as np\n"
        "from frink_numba.host.dequantize import dequantize\n"
        "from frink_numba.host.gguf import GgufFile\n"
        "from frink_numba.quant import KINDS, QuantKind, QuantMatrix\n"
        "for name in 'F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4'.split():\n"
        "    kind = KINDS[name]\n"
        "    dequantize(QuantMatrix(kind, np.ones((1, kind.block_bytes), np.uint8), 1, kind.block))\n"
        "assert 'gguf' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_smollm2_equals_the_gguf_package(smollm2_path: Path) -> None:
    """Every matrix of a real file: Q4_1 and Q8_0, 135 million elements."""
    with GgufFile.open(smollm2_path) as model:
        matrices = [model.matrix(name) for name, info in model.tensors.items() if len(info.shape) == 2]
    assert {matrix.kind.name for matrix in matrices} == {"Q4_1", "Q8_0"}
    for matrix in matrices:
        for start in range(0, matrix.rows, 4096):
            stop = min(start + 4096, matrix.rows)
            part = QuantMatrix(matrix.kind, matrix.data[start:stop], stop - start, matrix.cols)
            np.testing.assert_array_equal(_bits(dequantize(matrix, start, stop)), _bits(_oracle(part)))


def test_smollm2_expands_quickly(smollm2_path: Path) -> None:
    """The host's load time: some 0.2 s of this thread's own work, a second must do."""
    with GgufFile.open(smollm2_path) as model:
        matrices = [model.matrix(name) for name, info in model.tensors.items() if len(info.shape) == 2]
    seconds = []
    for _ in range(3):
        start = time.thread_time()
        for matrix in matrices:
            dequantize(matrix)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 1.0
