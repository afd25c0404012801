"""The table of tensor kinds, and QuantMatrix."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from frink_numba.errors import ShapeError
from frink_numba.quant import KINDS, KINDS_BY_ID, QuantMatrix

_TABLE_OF = (0, 19)  # the gguf release that the table was last held against


def test_kinds_equal_the_gguf_packages_table() -> None:
    """Fault 21: name, id, block and bytes of every kind, compared exactly."""
    ours = {kind.name: (kind.ggml_id, (kind.block, kind.block_bytes)) for kind in KINDS.values()}
    theirs = {t.name: (int(t), GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType}
    assert {name: row for name, row in ours.items() if name in theirs} == {
        name: row for name, row in theirs.items() if name in ours
    }
    installed = tuple(map(int, version("gguf").split(".")[:2]))
    if installed <= _TABLE_OF:
        assert theirs.keys() <= ours.keys()
    if installed >= _TABLE_OF:
        assert ours.keys() <= theirs.keys()


def test_ids_are_unique() -> None:
    assert len(KINDS_BY_ID) == len(KINDS)


def test_row_bytes_counts_whole_blocks() -> None:
    assert KINDS["Q4_K"].row_bytes(768) == 3 * 144
    with pytest.raises(ShapeError, match="Q4_K: a row of 300 elements"):
        KINDS["Q4_K"].row_bytes(300)


@pytest.mark.parametrize(
    "data",
    [
        np.zeros((4, 17), np.uint8),
        np.zeros((3, 18), np.uint8),
        np.zeros((4, 18), np.int8),
        np.zeros((4, 36), np.uint8)[:, ::2],
        np.zeros(72, np.uint8),
    ],
    ids=["width", "rows", "dtype", "strides", "dimensions"],
)
def test_matrix_refuses_bytes_that_do_not_fit(data: np.ndarray) -> None:
    """R20: shapes are checked against each other."""
    with pytest.raises(ShapeError, match="Q4_0 matrix of 4 x 32"):
        QuantMatrix(KINDS["Q4_0"], data, 4, 32)


def test_from_float32_is_a_view() -> None:
    weights = np.arange(12, dtype=np.float32).reshape(3, 4)
    matrix = QuantMatrix.from_float32(weights)
    assert (matrix.kind.name, matrix.rows, matrix.cols, matrix.nbytes) == ("F32", 3, 4, 48)
    assert np.shares_memory(matrix.data, weights)
    with pytest.raises(ShapeError, match="two dimensions"):
        QuantMatrix.from_float32(weights[0])


def test_a_part_of_a_matrix_is_a_view_of_its_rows() -> None:
    whole = QuantMatrix(KINDS["Q8_0"], np.arange(5 * 34, dtype=np.uint8).reshape(5, 34), 5, 32)
    part = whole.part(1, 4)
    assert (part.kind, part.rows, part.cols) == (whole.kind, 3, 32)
    assert part.data.base is not None
    np.testing.assert_array_equal(part.data, whole.data[1:4])
    assert np.shares_memory(part.data, whole.data)
    assert whole.part(5, 5).rows == 0
    for first, last in ((-1, 2), (3, 2), (0, 6)):
        with pytest.raises(ShapeError, match=f"rows {first} to {last} of a matrix of 5 rows"):
            whole.part(first, last)
