"""A projection of columns: y = scale * (W x) + bias, the matrices of a fused set stacked."""

from __future__ import annotations

import numpy as np

from frink_numba.host.weights import Matrices, WeightStore


def linear(
    store: WeightStore,
    x: np.ndarray,
    matrices: Matrices,
    out: np.ndarray,
    *,
    scale: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """`x` float32 [cols, n] to `out` float32 [rows, n]; `scale` and `bias` are columns [rows, 1] or [1, 1].

    The scale belongs to the matrix, so it comes before the bias.
    """
    store.product(x, *matrices, out=out)
    if scale is not None:
        np.multiply(out, scale, out=out)
    if bias is not None:
        np.add(out, bias, out=out)
    return out
