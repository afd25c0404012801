"""The tensor-core products behind the SIMT launcher's signature."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from frink_numba.errors import ShapeError
from frink_numba.kernels.gemm import Gemms
from frink_numba.kernels.tensor_core_matmul import TensorCoreMatmul, packed_bytes
from frink_numba.quant import KINDS
from tests.kernels.gemm_device import dequantized, relative_error
from tests.kernels.packed_weights import random_matrix


class FakeArray:
    """A device array as far as addresses, shapes and copies go."""

    next_address = 1 << 20

    def __init__(self, shape: tuple[int, ...], dtype: Any = np.float32) -> None:
        self.shape, self.dtype, self.size = shape, np.dtype(dtype), int(np.prod(shape))
        self.__cuda_array_interface__ = {"data": (FakeArray.next_address, False)}
        FakeArray.next_address += -(-self.size * self.dtype.itemsize // 256) * 256
        self.copied: list[bytes] = []

    def is_c_contiguous(self) -> bool:
        return True

    def copy_to_device(self, source: np.ndarray, stream: Any) -> None:
        self.copied.append(source.tobytes())


class FakeGemms:
    """Counts what it is asked for; its launches append to `log`."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.products = 0

    def product(self, weights: Any, m: int) -> Any:
        self.products += 1

        def bind(weights: Any, rows: Any, out: int, *, maps: int, workspace: int) -> Any:
            return lambda stream: self.log.append(("product", weights.data, rows.half, out, maps, workspace, stream))

        return SimpleNamespace(workspace=100_000 * m, maps=lambda rows, out: b"m" * 256, bind=bind)

    def half_rows(self, x: int, m: int, cols: int, rows: Any) -> Any:
        return lambda stream: self.log.append(("rows", x, m, cols, rows.half, stream))


def _setup() -> tuple[FakeGemms, TensorCoreMatmul, Any]:
    gemms = FakeGemms()
    matmul = TensorCoreMatmul(gemms, lambda size: FakeArray((size,), np.uint8))  # type: ignore[arg-type]
    kind = KINDS["Q4_K"]
    weight = matmul.matrix(kind, FakeArray((packed_bytes(kind, 100, 512),), np.uint8), 100, 512)
    return gemms, matmul, weight


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "Q6_K", "F32"])
def test_packed_bytes_are_those_of_pack(name: str) -> None:
    matrix = random_matrix(name, 100, 512, np.random.default_rng(0))
    assert TensorCoreMatmul.pack(matrix).shape == (packed_bytes(matrix.kind, 100, 512),)


def test_launches_are_made_once_and_kept() -> None:
    """The same buffers again: no new plan, no new maps; both launches in order on the caller's stream."""
    gemms, matmul, weight = _setup()
    x, out = FakeArray((7, 512)), FakeArray((7, 100))
    for stream in (11, 12):
        matmul(x, weight, out, stream)
    assert gemms.products == 1
    assert [(entry[0], entry[-1]) for entry in gemms.log] == [
        ("rows", 11), ("product", 11), ("rows", 12), ("product", 12),
    ]  # fmt: skip


def test_growing_buffers_void_older_launches() -> None:
    """A larger M replaces the operands' buffer; a launch made before must not write to the one that is gone."""
    gemms, matmul, weight = _setup()
    small, small_out = FakeArray((7, 512)), FakeArray((7, 100))
    large, large_out = FakeArray((700, 512)), FakeArray((700, 100))
    matmul(small, weight, small_out, 0)
    before = gemms.log[-1][2]
    matmul(large, weight, large_out, 0)
    assert gemms.log[-1][2] != before
    matmul(small, weight, small_out, 0)
    assert gemms.log[-1][2] == gemms.log[-3][2], "the small step uses the new buffer"
    assert gemms.products == 3


def test_shapes_are_checked() -> None:
    """R20: before any device work."""
    gemms, matmul, weight = _setup()
    with pytest.raises(ShapeError, match="x must be"):
        matmul(FakeArray((7, 256)), weight, FakeArray((7, 100)), 0)
    with pytest.raises(ShapeError, match="out must be"):
        matmul(FakeArray((7, 512)), weight, FakeArray((6, 100)), 0)
    with pytest.raises(ShapeError, match="packed"):
        matmul.matrix(KINDS["Q4_K"], FakeArray((3,), np.uint8), 100, 512)
    with pytest.raises(ShapeError, match="IQ2_XS"):
        matmul.matrix(KINDS["IQ2_XS"], FakeArray((3,), np.uint8), 100, 512)
    assert gemms.log == []


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["wgmma", "mma"])
def test_on_the_device(tier: str) -> None:
    """Several shapes in turn, small after large, against float64."""
    from numba import cuda

    device = cuda.get_current_device()
    capability = tuple(device.compute_capability)
    if capability < (8, 0) or (tier == "wgmma" and capability != (9, 0)):
        pytest.skip(f"{tier} does not run on compute capability {capability}")
    gemms = Gemms(tier, capability, device.MULTIPROCESSOR_COUNT)
    stream = cuda.stream()
    matmul = TensorCoreMatmul(gemms, lambda size: cuda.to_device(np.zeros(size, np.uint8)))
    rng = np.random.default_rng(1)
    matrix = random_matrix("Q4_K", 200, 768, rng)
    data = matmul.pack(matrix)
    weight = matmul.matrix(matrix.kind, cuda.to_device(data), 200, 768)
    for m in (5, 300, 5, 64):
        x = rng.standard_normal((m, 768)).astype(np.float32)
        out = cuda.to_device(np.full((m, 200), np.nan, np.float32))
        matmul(cuda.to_device(x), weight, out, stream)
        stream.synchronize()
        assert relative_error(out.copy_to_host(), x.astype(np.float64) @ dequantized([matrix]).T) < 6e-4
    gemms.close()
