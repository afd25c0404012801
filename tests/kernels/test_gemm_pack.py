"""Packing for the tensor-core products: the kernels' own fragment code, run with NumPy, against the gguf package."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.errors import ShapeError
from frink_numba.kernels.gemm_codes import CODES
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS, SLAB, FragmentKind
from frink_numba.kernels.gemm_pack import PackedMatrix, pack
from frink_numba.quant import KINDS, QuantMatrix
from tests.kernels.array_machine import Address, CountingMachine, Word
from tests.kernels.gemm_device import dequantized, relative_error
from tests.kernels.packed_weights import random_matrix, unpack

ULP = 2.0**-11  # half the distance of neighbouring f16 numbers, relative

# One rounding: (q - offset) * d is exact before it. Two or three: the product of d and an integer scale, and that of
# dmin and an integer minimum, are f16 numbers themselves.
ONE_ROUNDING = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "F32")
EXACT = ("F16", "BF16")
ROUNDED_SCALES = {"Q2_K": 2, "Q3_K": 2, "Q4_K": 2, "Q5_K": 2, "Q6_K": 2, "IQ4_XS": 2}


def _matrix(name: str, rows: int = 130, seed: int = 0, scale: float = 0.01) -> QuantMatrix:
    cols = 512 if KINDS[name].block == 256 else 352  # 352: the last step is half empty
    return random_matrix(name, rows, cols, np.random.default_rng(seed), scale)


@pytest.mark.parametrize("name", ONE_ROUNDING)
@pytest.mark.parametrize("scale", [0.01, 1e-5, 100.0])
def test_one_rounding_to_half(name: str, scale: float) -> None:
    """Each weight is gguf's value times the row's power of two, rounded once to f16 (field report 21: no tolerance)."""
    matrix = _matrix(name, scale=scale)
    packed = pack([matrix])
    exact = dequantized([matrix]) / packed.row_scale[: matrix.rows, None]
    if name not in ("Q4_1", "Q5_1", "F32"):  # gguf's own float32 product q * d is exact there
        assert np.array_equal(unpack(packed) / packed.row_scale[: matrix.rows, None], exact.astype(np.float16))
    error = np.abs(unpack(packed) / packed.row_scale[: matrix.rows, None] - exact)
    # Half a unit in the last place of the result; below 2**-14 the unit stays 2**-24. m of Q4_1 is subnormal at worst.
    assert (error <= np.maximum(np.abs(exact) * ULP, 2.0**-25) * 1.0001 + 2.0**-25).all()


@pytest.mark.parametrize("name", EXACT)
def test_half_weights_are_exact(name: str) -> None:
    matrix = _matrix(name)
    assert np.array_equal(unpack(pack([matrix])), dequantized([matrix]))


@pytest.mark.parametrize(("name", "units"), ROUNDED_SCALES.items())
@pytest.mark.parametrize("scale", [0.01, 1e-5, 100.0])
def test_rounded_scales(name: str, units: int, scale: float) -> None:
    """Kinds with super-blocks: every weight within two half units of its row's largest, 3.3e-4 over the matrix."""
    matrix = _matrix(name, scale=scale)
    reference = dequantized([matrix])
    got = unpack(pack([matrix]))
    assert (np.abs(got - reference) <= units * ULP * np.abs(reference).max(axis=1, keepdims=True)).all()
    assert relative_error(got, reference) < 3.3e-4


@pytest.mark.parametrize("name", [*CODES, "F16", "BF16"])
def test_bytes_of_the_file(name: str) -> None:
    """Issue 4: the file's bytes plus at most 2 %, for rows and columns of real models."""
    cols = 2048 if name not in ("F16",) else 1024
    matrix = random_matrix(name, 192, cols, np.random.default_rng(1))
    packed = pack([matrix])
    assert matrix.nbytes <= packed.nbytes <= 1.02 * matrix.nbytes


@pytest.mark.parametrize("kind", FRAGMENT_KINDS.values(), ids=lambda kind: kind.name)
def test_vectors_are_aligned(kind: object) -> None:
    """Bulk copies move multiples of 16 bytes from and to multiples of 16; so do vector loads."""
    assert isinstance(kind, FragmentKind)
    assert kind.header_size % 16 == kind.step_size % 16 == kind.record_size % 16 == 0
    assert all(kind.plane_offset(i) % width == 0 for i, width in enumerate(kind.planes))


@pytest.mark.parametrize("kind", FRAGMENT_KINDS.values(), ids=lambda kind: kind.name)
def test_operations_are_counted(kind: FragmentKind) -> None:
    """The number by which the plan estimates a kind's conversion is that of its code, on average over a record."""
    machine = CountingMachine()
    place, header = Address(machine), [Word(machine)] * 8
    for step in range(4):
        kind.fragments(machine, place, place, place, step, header)
    assert machine.operations / 4 == kind.operations


def test_several_matrices_follow_each_other() -> None:
    """Q, K and V in one pack: their rows in order, also across slabs."""
    matrices = [_matrix("Q4_K", rows, seed) for seed, rows in enumerate((70, 30, 41))]
    packed = pack(matrices)
    assert packed.rows == packed.outputs == 141
    assert relative_error(unpack(packed), dequantized(matrices)) < 3.3e-4


def test_gate_and_up_alternate_in_eights() -> None:
    """Row 16i + j is gate row 8i + j for j < 8, up row 8i + j - 8 else: one thread holds both."""
    gate, up = _matrix("Q4_0", 72, 1), _matrix("Q4_0", 72, 2)
    packed = pack([gate, up], gated=True)
    assert (packed.rows, packed.outputs) == (144, 72)
    rows = unpack(packed).reshape(9, 2, 8, -1)
    assert relative_error(rows[:, 0].reshape(72, -1), dequantized([gate])) < 3e-4
    assert relative_error(rows[:, 1].reshape(72, -1), dequantized([up])) < 3e-4


@pytest.mark.parametrize("name", [*CODES, "F16", "F32"])
def test_norm_bounds_hold(name: str) -> None:
    """No row of a matrix is longer than its bound, which is loose by less than a factor of 4."""
    matrices = [_matrix(name, 48, seed) for seed in range(2)]
    for packed in (pack(matrices), pack(matrices, gated=True)):
        for matrix, bound in zip(matrices, packed.norm_bounds, strict=True):
            longest = np.linalg.norm(dequantized([matrix]), axis=1).max()
            assert longest * 0.9999 <= bound <= 4 * longest


def test_chunks_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing in chunks of slabs changes nothing."""
    matrices = [_matrix("Q5_K", rows, seed) for seed, rows in enumerate((130, 190))]

    def bytes_of(packed: PackedMatrix) -> tuple[bytes, bytes]:
        return packed.data.tobytes(), packed.row_scale.tobytes()

    whole = bytes_of(pack(matrices))
    monkeypatch.setattr("frink_numba.kernels.gemm_pack._CHUNK_ELEMENTS", SLAB * 512)
    assert bytes_of(pack(matrices)) == whole


def test_rows_of_zeros_and_wild_scales() -> None:
    """A row of zeros stays zero; a block with a huge d and integer scales of 0 does not become not-a-number."""
    matrix = _matrix("Q4_K", 64)
    raw = matrix.data.reshape(64, 2, 144).copy()
    raw[3] = 0
    raw[5, 0, 0:2] = np.frombuffer(np.float16(60000).tobytes(), np.uint8)
    raw[5, 0, 4:16] = 0
    raw[5, 0, 2:4] = 0
    wild = QuantMatrix(matrix.kind, raw.reshape(64, -1), 64, 512)
    got = unpack(pack([wild]))
    assert not got[3].any()
    assert not got[5, :256].any()


@pytest.mark.parametrize(
    ("matrices", "gated", "message"),
    [
        ([], False, "at least one"),
        ([_matrix("Q4_0"), _matrix("Q4_1")], False, "one kind and width"),
        ([random_matrix("Q8_0", 8, 64, np.random.default_rng(0)), _matrix("Q8_0")], False, "one kind and width"),
        ([_matrix("Q4_0", 8)], True, "gate and up"),
        ([_matrix("Q4_0", 8), _matrix("Q4_0", 16)], True, "gate and up"),
        ([_matrix("Q4_0", 12), _matrix("Q4_0", 12)], True, "multiple of 8"),
        ([QuantMatrix(KINDS["IQ2_XS"], np.zeros((2, 74), np.uint8), 2, 256)], False, "IQ2_XS"),
        ([QuantMatrix.from_float32(np.zeros((2, 40), np.float32))], False, "multiple of 32"),
    ],
)
def test_what_does_not_fit_is_named(matrices: list[QuantMatrix], gated: bool, message: str) -> None:
    """R20: shapes that contradict each other are named errors."""
    with pytest.raises(ShapeError, match=message):
        pack(matrices, gated=gated)
