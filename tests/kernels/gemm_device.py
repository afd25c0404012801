"""A tensor-core product run on the GPU from host arrays, with poisoned outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from frink_numba.kernels.few_gemm_plan import FewPlan
from frink_numba.kernels.gemm import Gemms, HalfRows
from frink_numba.kernels.gemm_pack import PackedMatrix
from tests.kernels.packed_weights import place_weights


def filled(m: int) -> int:
    return -(-m // 256) * 256


def address(array: Any) -> int:
    return int(array.__cuda_array_interface__["data"][0])


@dataclass
class Ran:
    """out float32 [runs, m, outputs] (an f16 result times its scales); scale: the f16 result's powers of two."""

    out: np.ndarray
    scale: np.ndarray | None


def run_product(
    gemms: Gemms,
    packed: PackedMatrix | tuple[PackedMatrix, PackedMatrix],
    x: np.ndarray,
    *,
    gate: str = "",
    half: bool = False,
    bias: np.ndarray | None = None,
    add_to: np.ndarray | None = None,
    tokens: int | None = None,
    cluster: int | None = None,
    groups: int | None = None,
    plan: FewPlan | None = None,
    runs: int = 1,
    spare_columns: int = 0,
) -> Ran:
    """Launch `runs` times, each into a fresh output of not-a-numbers (or of `add_to`).

    packed: of one kind, or two of two kinds.
    """
    from numba import cuda

    m, k = x.shape
    if gemms.tier == "mma":  # its nearest tile
        tokens = min((16, 64, 128), key=lambda tile: abs(tile - tokens)) if tokens else None
        cluster = groups = None
    kept = []

    def place(array: np.ndarray) -> int:
        kept.append(cuda.to_device(array))
        return address(kept[-1])

    weights = place_weights(packed if isinstance(packed, tuple) else (packed,), place, bias)
    product = gemms.product(weights, m, gate=gate, half=half, tokens=tokens, cluster=cluster, groups=groups, plan=plan)
    source = cuda.to_device(np.ascontiguousarray(x))
    nan16 = np.full((m, k), np.nan, np.float16)
    operand, scale, norm = cuda.to_device(nan16), _nans(filled(m)), _nans(filled(m))
    rows = HalfRows(address(operand), address(scale), address(norm))
    workspace = cuda.to_device(np.zeros(max(8192, product.workspace), np.uint8))
    stream = cuda.default_stream()
    gemms.half_rows(address(source), m, k, rows)(0)
    item = np.float16 if half else np.float32
    # A pitch that tensor maps can take, and untouched columns beyond the result.
    width = -(-(weights.outputs + spare_columns) // 8) * 8 + 8
    results, out_scale = [], None
    for _ in range(runs):
        start = np.full((m + 1, width), np.nan, item)
        if add_to is not None:
            start[:m, : weights.outputs] = add_to
        out, out_scale = cuda.to_device(start), _nans(filled(m))
        pitch = width * out.dtype.itemsize
        maps = cuda.to_device(np.frombuffer(product.maps(rows, address(out), pitch) or bytes(256), np.uint8))
        launch = product.bind(
            weights,
            rows,
            address(out),
            pitch,
            maps=address(maps),
            workspace=address(workspace),
            add=add_to is not None,
            out_scale=address(out_scale) if half else 0,
        )
        launch(0)
        stream.synchronize()
        back = out.copy_to_host()
        assert np.isnan(back[m:]).all(), "rows beyond the result were written"
        # The copy engine writes whole 16-byte pieces.
        written = -(-weights.outputs * item().itemsize // 16) * 16 // item().itemsize
        assert np.isnan(back[:, written:]).all(), "columns beyond the result were written"
        results.append(back[:m, : weights.outputs].astype(np.float32))
    assert not workspace.copy_to_host()[:8192].any(), "the workspace's flags are not back at zero"
    host_scale = out_scale.copy_to_host()[:m] if half and out_scale is not None else None
    stacked = np.stack(results)
    return Ran(stacked * host_scale[:, None] if host_scale is not None else stacked, host_scale)


def _nans(count: int) -> Any:
    from numba import cuda

    return cuda.to_device(np.full(count, np.nan, np.float32))


def relative_error(out: np.ndarray, reference: np.ndarray) -> float:
    """The 2-norm of the error over that of the reference; infinite when anything is not a number."""
    if not np.isfinite(out).all():
        return float("inf")
    return float(np.linalg.norm(out.astype(np.float64) - reference) / np.linalg.norm(reference))


def worst_row_error(out: np.ndarray, reference: np.ndarray) -> float:
    """The largest relative error of a row."""
    return max(relative_error(a, b) for a, b in zip(out, reference, strict=True))


def dequantized(matrices: Sequence[Any]) -> np.ndarray:
    """float64 rows of matrices one after another, by the gguf package."""
    import gguf

    parts = [gguf.quants.dequantize(m.data, gguf.GGMLQuantizationType(m.kind.ggml_id)) for m in matrices]
    return np.concatenate([p.reshape(m.rows, m.cols) for p, m in zip(parts, matrices, strict=True)]).astype(np.float64)
