"""A thin product run on the GPU from host arrays, with poisoned outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from frink_numba.kernels.gemm import DeviceWeights, HalfRows
from frink_numba.kernels.gemm_pack import PackedMatrix
from frink_numba.kernels.thin_gemm import NormRows, ThinGemms
from tests.kernels.gemm_device import address


@dataclass
class Ran:
    """out float32 [runs, m, outputs] (an f16 result times its scales); scale: the f16 result's powers of two."""

    out: np.ndarray
    scale: np.ndarray | None


def half_operand(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(f16 rows, their powers of two, their norms): what half_rows makes of x."""
    largest = np.abs(x).max(axis=1)
    scale = np.where(largest > 0, np.exp2(np.floor(np.log2(np.maximum(largest, 1e-38))) - 14), 1).astype(np.float32)
    norm = (np.linalg.norm(x.astype(np.float64), axis=1) * 1.002).astype(np.float32)
    return (x / scale[:, None]).astype(np.float16), scale, norm


def run_thin(
    thins: ThinGemms,
    packed: PackedMatrix,
    x: np.ndarray,
    *,
    gate: str = "",
    half: bool = False,
    norm: np.ndarray | None = None,
    eps: float = 1e-5,
    bias: np.ndarray | None = None,
    add_to: np.ndarray | None = None,
    row_groups: int | None = None,
    runs: int = 1,
) -> Ran:
    """Launch `runs` times, each into a fresh output of not-a-numbers (or of `add_to`)."""
    from numba import cuda

    m, _ = x.shape
    data, row_scale = cuda.to_device(packed.data), cuda.to_device(packed.row_scale)
    device_bias = None
    if bias is not None:
        padded = np.zeros(packed.slabs * 64, np.float32)
        padded[: bias.size] = bias
        device_bias = cuda.to_device(padded)
    weights = DeviceWeights.of(
        packed,
        address(data),
        address(row_scale),
        address(device_bias) if device_bias is not None else 0,
        float(np.abs(bias).max()) if bias is not None else 0.0,
    )
    product = thins.product(weights, m, gate=gate, half=half, norm=norm is not None, row_groups=row_groups)
    arrays: list[Any] = [np.ascontiguousarray(x), norm] if norm is not None else list(half_operand(x))
    kept = [cuda.to_device(a) for a in arrays]
    rows = NormRows(address(kept[0]), address(kept[1]), eps) if norm is not None else HalfRows(*map(address, kept))
    workspace = cuda.to_device(np.zeros(max(256, product.workspace), np.uint8))
    item = np.float16 if half else np.float32
    width = packed.outputs + 3
    results, out_scale = [], None
    for _ in range(runs):
        start = np.full((m + 1, width), np.nan, item)
        if add_to is not None:
            start[:m, : packed.outputs] = add_to
        out, out_scale = cuda.to_device(start), cuda.to_device(np.full(m, np.nan, np.float32))
        launch = product.bind(
            weights,
            rows,
            address(out),
            width * start.itemsize,
            workspace=address(workspace),
            add=add_to is not None,
            out_scale=address(out_scale) if half else 0,
        )
        launch(0)
        cuda.synchronize()
        back = out.copy_to_host()
        assert np.isnan(back[m:]).all(), "rows beyond the result were written"
        assert np.isnan(back[:, packed.outputs :]).all(), "columns beyond the result were written"
        results.append(back[:m, : packed.outputs].astype(np.float32))
    assert not workspace.copy_to_host()[: product.plan.counters].any() or not product.workspace, "counters are left"
    host_scale = out_scale.copy_to_host() if half and out_scale is not None else None
    stacked = np.stack(results)
    return Ran(stacked * host_scale[:, None] if host_scale is not None else stacked, host_scale)
