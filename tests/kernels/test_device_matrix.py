"""Packing a matrix for the device: sizes, chunks, refusals. The dequantization tests hold its bits exactly."""

from __future__ import annotations

import re

import numpy as np
import pytest

from frink_numba.errors import ShapeError
from frink_numba.kernels import device_matrix
from frink_numba.kernels.device_matrix import DeviceMatrix, pack
from frink_numba.kernels.kinds import PLANES, packed_bytes
from frink_numba.quant import KINDS
from tests.random_blocks import random_matrix


@pytest.mark.parametrize("name", sorted(PLANES))
def test_chunks_of_rows_do_not_change_the_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = random_matrix(name, 11, max(2 * KINDS[name].block, 40), np.random.default_rng(1))
    whole = pack(matrix)
    monkeypatch.setattr(device_matrix, "_CHUNK_BYTES", 3 * matrix.kind.row_bytes(matrix.cols))
    assert np.array_equal(pack(matrix), whole)
    assert whole.shape == (packed_bytes(matrix.kind, matrix.rows, matrix.cols),)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_bytes_are_only_moved(name: str) -> None:
    """Kinds whose fields need no regrouping by bits keep their scales as they are, entry after entry."""
    matrix = random_matrix(name, 3, 64, np.random.default_rng(2))
    scale_bytes = PLANES[name][1].entry_bytes
    blocks = matrix.data.reshape(3, 2, -1)
    scales = blocks[:, :, :scale_bytes].transpose(1, 0, 2).reshape(-1)
    assert np.array_equal(pack(matrix)[-scales.size :], scales)


def test_what_no_kernel_serves_is_refused() -> None:
    """R19, R20: by name, before any work."""
    matrix = random_matrix("IQ2_XXS", 2, 256, np.random.default_rng(3))
    with pytest.raises(ShapeError, match="no CUDA kernel multiplies IQ2_XXS"):
        pack(matrix)
    data = np.zeros(100, np.uint8)
    with pytest.raises(ShapeError, match=re.escape("a packed Q8_0 matrix of 2 x 64 is uint8 [136], got uint8 [100]")):
        DeviceMatrix(KINDS["Q8_0"], data, 2, 64)
    with pytest.raises(ShapeError, match="not a multiple of the block"):
        DeviceMatrix(KINDS["Q8_0"], data, 2, 60)
