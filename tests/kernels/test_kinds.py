"""The table of kinds and their planes, without numba and without a device."""

from __future__ import annotations

import subprocess
import sys

import pytest

from frink_numba.kernels.kinds import PLANES, can_multiply, packed_bytes, padded_cols, supported_kinds
from frink_numba.quant import KINDS


def test_the_kinds_of_the_resident_stack_are_served() -> None:
    """R19 and issue 3: these at least."""
    wanted = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS"
    assert supported_kinds >= set(wanted.split())


@pytest.mark.parametrize("name", sorted(PLANES))
def test_planes_hold_the_files_bytes_and_are_aligned(name: str) -> None:
    kind, planes = KINDS[name], PLANES[name]
    assert sum(p.entry_bytes * 256 // p.span for p in planes) == 256 // kind.block * kind.block_bytes
    sizes = [p.entry_bytes for p in planes]
    assert sizes == sorted(sizes, reverse=True), "a narrower plane before a wider one would misalign it"
    assert all(256 % p.span == 0 for p in planes)


@pytest.mark.parametrize("name", sorted(PLANES))
def test_packed_size_is_the_files_size(name: str) -> None:
    kind = KINDS[name]
    cols = max(kind.block, 32)
    assert packed_bytes(kind, 7, cols) == 7 * kind.row_bytes(cols)
    if kind.block == 1:
        assert padded_cols(kind, cols + 1) == cols + 16


def test_answers_name_the_reason() -> None:
    """R19: None is yes."""
    assert can_multiply(KINDS["Q4_K"], 1, 256) is None
    assert can_multiply(KINDS["F16"], 3, 7) is None
    assert can_multiply(KINDS["IQ2_XXS"], 4, 256) == "no CUDA kernel multiplies IQ2_XXS"
    assert can_multiply(KINDS["Q4_K"], 4, 128) == "Q4_K: rows of 128 are not a multiple of the block of 256"
    assert can_multiply(KINDS["Q8_0"], 0, 32) == "an empty Q8_0 matrix"


def test_table_and_packing_need_no_numba() -> None:
    """A backend that asks (B1) imports nothing slow."""
    code = (
        "import sys; sys.modules['numba'] = None; import frink_numba.kernels.kinds, frink_numba.kernels.device_matrix"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
