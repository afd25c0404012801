"""A thin product run from host arrays, with poisoned outputs, on the GPU or on what stands in for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from frink_numba.kernels.gemm import DeviceWeights, HalfRows
from frink_numba.kernels.gemm_pack import PackedMatrix
from frink_numba.kernels.thin_gemm import NormRows, ThinGemms
from tests.kernels.attention_device import Device, Gpu


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
    device: Device | None = None,
) -> Ran:
    """Launch `runs` times, each into a fresh output of not-a-numbers (or of `add_to`)."""
    device = device or Gpu()
    m, _ = x.shape
    padded = np.zeros(packed.slabs * 64, np.float32)
    if bias is not None:
        padded[: bias.size] = bias
    weights = DeviceWeights.of(
        packed,
        device.place(packed.data),
        device.place(packed.row_scale),
        device.place(padded) if bias is not None else 0,
        float(np.abs(bias).max()) if bias is not None else 0.0,
    )
    product = thins.product(weights, m, gate=gate, half=half, norm=norm is not None, row_groups=row_groups)
    arrays: list[Any] = [np.ascontiguousarray(x), norm] if norm is not None else list(half_operand(x))
    kept = [device.place(a) for a in arrays]
    rows = NormRows(kept[0], kept[1], eps) if norm is not None else HalfRows(*kept)
    item = np.float16 if half else np.float32
    width = packed.outputs + 3
    results, host_scale = [], None
    for _ in range(runs):
        start = np.full((m + 1, width), np.nan, item)
        if add_to is not None:
            start[:m, : packed.outputs] = add_to
        out, out_scale = device.place(start), device.place(np.full(m, np.nan, np.float32))
        device.launch(
            product.bind(
                weights,
                rows,
                out,
                width * start.itemsize,
                add=add_to is not None,
                out_scale=out_scale if half else 0,
            )
        )
        back = device.read(out)
        assert np.isnan(back[m:]).all(), "rows beyond the result were written"
        assert np.isnan(back[:, packed.outputs :]).all(), "columns beyond the result were written"
        results.append(back[:m, : packed.outputs].astype(np.float32))
        host_scale = device.read(out_scale) if half else None
    stacked = np.stack(results)
    return Ran(stacked * host_scale[:, None] if host_scale is not None else stacked, host_scale)
