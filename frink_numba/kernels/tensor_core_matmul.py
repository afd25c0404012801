"""The tensor-core products behind the launcher that the SIMT tier has: y = x W^T with arrays, nothing fused.

    matmul = TensorCoreMatmul(gemms, allocate)
    data = matmul.pack(matrix)                                  # host bytes, to be uploaded
    weight = matmul.matrix(kind, device_data, rows, cols)
    matmul(x, weight, out, stream)                              # x float32 [M, K], out float32 [M, N]

so that a caller swaps tiers without a change. Operands, maps and workspace are this object's own: it serves one stream
at a time. Launches are made once for each (weight, x, out, M) and kept, so that a repeated step costs two prebuilt
launches. An array of `allocate` that is let go of must stay until no kernel uses it, as cuMemFree sees to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from frink_numba.errors import ShapeError
from frink_numba.kernels.gemm import DeviceWeights, Gemms, HalfRows, why_not
from frink_numba.kernels.gemm_kinds import SLAB, fragment_kind
from frink_numba.kernels.gemm_pack import pack
from frink_numba.kernels.launch import Launch
from frink_numba.quant import QuantKind, QuantMatrix

_KEPT = 4096  # launches


def packed_bytes(kind: QuantKind, rows: int, cols: int) -> int:
    """Bytes of `TensorCoreMatmul.pack`'s array."""
    row = fragment_kind(kind.name)
    if row is None:
        raise ShapeError(f"the tensor-core kernels do not know the kind {kind}")
    slabs = -(-rows // SLAB)
    return slabs * (row.slab_bytes(cols) + 4 * SLAB)


@dataclass(frozen=True, slots=True, eq=False)
class TensorCoreMatrix:
    """W [rows, cols] on the device. `data`: the uint8 array that `pack` made, at a multiple of 16."""

    kind: QuantKind
    data: Any
    rows: int
    cols: int
    weights: DeviceWeights


class TensorCoreMatmul:
    """Called as `quantized_matmul` is. `allocate(bytes)` gives a zeroed uint8 device array that numba can copy to."""

    def __init__(self, gemms: Gemms, allocate: Callable[[int], Any]) -> None:
        self._gemms, self._allocate = gemms, allocate
        self._operands: dict[str, Any] = {}
        self._launches: OrderedDict[tuple[int, ...], tuple[Launch, Launch, Any]] = OrderedDict()

    @staticmethod
    def pack(matrix: QuantMatrix) -> np.ndarray:
        """The matrix in fragment order, then its rows' powers of two: uint8 [packed_bytes]."""
        packed = pack([matrix])
        return np.concatenate([packed.data, packed.row_scale.view(np.uint8)])

    @staticmethod
    def matrix(kind: QuantKind, data: Any, rows: int, cols: int) -> TensorCoreMatrix:
        """A device matrix over uploaded bytes."""
        reason = why_not(kind, cols)
        if reason is not None:
            raise ShapeError(f"device matrix of {rows} x {cols}: {reason}")
        want = (packed_bytes(kind, rows, cols),)
        if tuple(data.shape) != want or data.dtype != np.uint8:
            raise ShapeError(f"a packed {kind} matrix of {rows} x {cols} is uint8 {list(want)}, got {list(data.shape)}")
        row = fragment_kind(kind.name)
        assert row is not None
        start = _address(data)
        row_scale = start + -(-rows // SLAB) * row.slab_bytes(cols)
        # The bounds serve f16 results only, which this launcher does not give.
        weights = DeviceWeights(row.name, rows, cols, False, (0.0,), start, row_scale)
        return TensorCoreMatrix(kind, data, rows, cols, weights)

    def __call__(self, x: Any, weight: TensorCoreMatrix, out: Any, stream: Any) -> None:
        """out = x W^T; x float32 [M, cols], out float32 [M, rows], both C-contiguous device arrays."""
        m = int(x.shape[0])
        for name, array, want in (("x", x, (m, weight.cols)), ("out", out, (m, weight.rows))):
            if tuple(array.shape) != want or array.dtype != np.float32 or not array.is_c_contiguous():
                raise ShapeError(
                    f"{name} must be contiguous float32 {list(want)}, got {array.dtype} {list(array.shape)}"
                )
        key = (weight.weights.data, _address(x), _address(out), m)
        made = self._launches.get(key)
        if made is None:
            made = self._launches[key] = self._make(x, weight, out, m, stream)
            if len(self._launches) > _KEPT:
                self._launches.popitem(last=False)
        else:
            self._launches.move_to_end(key)
        handle = int(getattr(stream, "handle", stream))
        made[0](handle)
        made[1](handle)

    def _make(self, x: Any, weight: TensorCoreMatrix, out: Any, m: int, stream: Any) -> tuple[Launch, Launch, Any]:
        """(conversion of x, product, tensor maps) of one step."""
        product = self._gemms.product(weight.weights, m)
        filled = -(-m // 256) * 256
        half, scale, norm = (
            self._room(name, size)
            for name, size in (("half", 2 * m * weight.cols), ("scale", 4 * filled), ("norm", 4 * filled))
        )
        rows = HalfRows(half, scale, norm)
        workspace = self._room("workspace", max(product.workspace, 1 << 14))
        source = np.frombuffer(product.maps(rows, _address(out)), np.uint8)
        maps = self._allocate(source.size or 16)
        if source.size:
            maps.copy_to_device(source, stream=stream)
        launch = product.bind(weight.weights, rows, _address(out), maps=_address(maps), workspace=workspace)
        # The source stays as long as its copy may be under way.
        return self._gemms.half_rows(_address(x), m, weight.cols, rows), launch, (maps, source)

    def _room(self, name: str, size: int) -> int:
        """The address of a buffer of at least `size` bytes; a larger one than before makes older launches void."""
        held = self._operands.get(name)
        if held is None or held.size < size:
            self._operands[name] = held = self._allocate(size)
            self._launches.clear()
        return _address(held)


def _address(array: Any) -> int:
    return int(array.__cuda_array_interface__["data"][0])
