"""RMS norm of columns: y = x / sqrt(mean(x^2) + eps) * weight, over the channels of each token."""

from __future__ import annotations

import math

import numpy as np

from frink_numba.host.scratch import Scratch

_PARTS = 32  # a sum over channels is taken in this many parts: plain float32 sums of thousands lose digits


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray, scratch: Scratch) -> np.ndarray:
    """Normalise `x` float32 [..., channels, n] over its channels into `out`, which may be `x`.

    `weight` float32 broadcasts over [..., channels, 1]. The lone column of a decode step takes a shorter way.
    """
    channels, n = x.shape[-2:]
    if n == 1 and x.ndim == 2:
        total = float(np.vdot(x, x))
        if math.isinf(total):
            total = float(_large_sums(x)[0, 0])
        mean = total / channels + eps
        np.multiply(x, mean**-0.5 if mean else math.inf, out=out)
        np.multiply(out, weight, out=out)
        return out
    squares = scratch.array("norm squares", *x.shape)
    np.multiply(x, x, out=squares)
    if channels % _PARTS == 0:
        squares = np.add.reduce(squares.reshape(*x.shape[:-2], _PARTS, channels // _PARTS, n), axis=-3)
    scale = np.add.reduce(squares, axis=-2, keepdims=True)
    large = np.isinf(scale)
    scale *= 1.0 / channels
    scale += eps
    np.sqrt(scale, out=scale)
    np.divide(1.0, scale, out=scale)
    if large.any():  # in these columns alone: one token's numbers are no matter of the others
        exact = 1 / np.sqrt(_large_sums(x) / channels + eps)
        np.copyto(scale, exact, where=large, casting="same_kind")
    np.multiply(x, scale, out=out)
    np.multiply(out, weight, out=out)
    return out


def _large_sums(x: np.ndarray) -> np.ndarray:
    """Sums of squares [..., 1, n] in float64: beyond 1e19 a number's square is infinite in float32, its norm is not."""
    return np.sum(np.square(x, dtype=np.float64), axis=-2, keepdims=True)
