"""One function a SIMT kernel: random inputs, outputs poisoned, two runs on a GPU, held against float64 NumPy.

The simulator's tests call them with small shapes, the GPU's with large ones. Every output lies inside a larger array of
NaN, so that a store outside of it is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
from numba import cuda
from numba.cuda import config

from frink_numba.kernels.attention import causal_attention
from frink_numba.kernels.bias import add_bias
from frink_numba.kernels.dequantize import dequantizer
from frink_numba.kernels.device_matrix import DeviceMatrix, pack
from frink_numba.kernels.kinds import OCTET, padded_cols
from frink_numba.kernels.quantized_matmul import Tile, quantized_matmul
from frink_numba.kernels.residual import residual_add
from frink_numba.kernels.rms_norm import rms_norm
from frink_numba.kernels.rope import rope, rope_table
from frink_numba.kernels.swiglu import swiglu
from frink_numba.layer import RopeLayout
from frink_numba.quant import QuantMatrix
from tests import reference
from tests.random_blocks import random_matrix

LIMIT = 1e-5  # design section 5, SIMT kernels
_GUARD = 512  # floats on either side of an output: 16-byte alignment is kept


class Framed:
    """A device array float32 [shape] inside a larger one of NaN."""

    def __init__(self, shape: tuple[int, ...], content: np.ndarray | None = None) -> None:
        size = int(np.prod(shape))
        whole = np.full(size + 2 * _GUARD, np.nan, np.float32)
        if content is not None:
            whole[_GUARD : _GUARD + size] = content.reshape(-1)
        self._size = size
        self._whole = cuda.to_device(whole)
        self.array = self._whole[_GUARD : _GUARD + size].reshape(shape)

    def read(self) -> np.ndarray:
        """The content; AssertionError when anything around it was written."""
        whole = self._whole.copy_to_host()
        assert np.isnan(whole[:_GUARD]).all(), "a store before the output"
        assert np.isnan(whole[_GUARD + self._size :]).all(), "a store after the output"
        return whole[_GUARD : _GUARD + self._size].reshape(self.array.shape)


def _check(run: Callable[[], np.ndarray], want: np.ndarray) -> None:
    got = run()
    error = reference.relative_error(got, want)
    assert error < LIMIT, f"relative error {error:.2e}"
    if not config.ENABLE_CUDASIM:  # there, a second run takes as long again and proves nothing
        assert np.array_equal(run(), got), "two runs differ"


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def check_rms_norm(rows: int, n: int, *, in_place: bool = False, eps: float = 1e-5) -> None:
    rng = np.random.default_rng((rows, n))
    x, weight = _normal(rng, rows, n) * 0.01, _normal(rng, n)  # so small that epsilon matters

    def run() -> np.ndarray:
        source = Framed((rows, n), x)
        out = source if in_place else Framed((rows, n))
        rms_norm(source.array, cuda.to_device(weight), eps, out.array)
        return out.read()

    _check(run, reference.rms_norm(x.astype(np.float64), weight.astype(np.float64), eps))


def check_add_bias(rows: int, n: int) -> None:
    rng = np.random.default_rng((rows, n))
    x, bias = _normal(rng, rows, n), _normal(rng, n)

    def run() -> np.ndarray:
        target = Framed((rows, n), x)
        add_bias(target.array, cuda.to_device(bias))
        return target.read()

    _check(run, x.astype(np.float64) + bias)


def check_residual_add(rows: int, n: int) -> None:
    rng = np.random.default_rng((rows, n))
    x, y = _normal(rng, rows, n), _normal(rng, rows, n)

    def run() -> np.ndarray:
        target = Framed((rows, n), x)
        residual_add(target.array, cuda.to_device(y))
        return target.read()

    _check(run, x.astype(np.float64) + y)


def check_swiglu(rows: int, n: int, *, in_place: bool = False) -> None:
    rng = np.random.default_rng((rows, n))
    gate, up = _normal(rng, rows, n) * 20, _normal(rng, rows, n)
    gate.flat[0], gate.flat[-1] = -200, 200  # exp overflows on one side, vanishes on the other

    def run() -> np.ndarray:
        source = Framed((rows, n), gate)
        out = source if in_place else Framed((rows, n))
        swiglu(source.array, cuda.to_device(up), out.array)
        return out.read()

    g = gate.astype(np.float64)
    _check(run, g / (1 + np.exp(-g)) * up)


def _angles(pairs: int, rows: int, start_pos: int) -> tuple[np.ndarray, np.ndarray]:
    inv_freq = 10000.0 ** (-np.arange(pairs) / pairs)
    return inv_freq, (start_pos + np.arange(rows))[:, None] * inv_freq


def check_rope_table(rows: int, pairs: int, start_pos: int, magnitude: float) -> None:
    inv_freq, angles = _angles(pairs, rows, start_pos)

    def run() -> np.ndarray:
        cos, sin = Framed((rows, pairs)), Framed((rows, pairs))
        rope_table(cuda.to_device(inv_freq), magnitude, start_pos, cos.array, sin.array)
        return np.stack([cos.read(), sin.read()])

    _check(run, np.stack([np.cos(angles), np.sin(angles)]) * magnitude)


def check_rope(rows: int, heads: int, head_dim: int, pairs: int, layout: RopeLayout, start_pos: int = 3000) -> None:
    rng = np.random.default_rng((rows, heads, head_dim, pairs))
    x = _normal(rng, rows, heads, head_dim)
    inv_freq, angles = _angles(pairs, rows, start_pos)

    def run() -> np.ndarray:
        target = Framed((rows, heads, head_dim), x)
        cos, sin = Framed((rows, pairs)), Framed((rows, pairs))
        rope_table(cuda.to_device(inv_freq), 1.25, start_pos, cos.array, sin.array)
        rope(target.array, cos.array, sin.array, layout)
        got = target.read()
        assert np.array_equal(got[:, :, 2 * pairs :], x[:, :, 2 * pairs :]), "channels beyond the rotary width changed"
        return got

    want, i = x.astype(np.float64), np.arange(pairs)
    first, second = (2 * i, 2 * i + 1) if layout is RopeLayout.NORM else (i, i + pairs)
    cos, sin = np.cos(angles)[:, None] * 1.25, np.sin(angles)[:, None] * 1.25
    a, b = want[:, :, first], want[:, :, second]
    want[:, :, first], want[:, :, second] = a * cos - b * sin, a * sin + b * cos
    _check(run, want)


def check_attention(
    n: int, heads: int, kv_heads: int, d: int, start_pos: int, *, window: int = 0, softcap: float = 0.0
) -> None:
    rng = np.random.default_rng((n, heads, kv_heads, d, start_pos, window))
    q = _normal(rng, n, heads, d) * 3
    k, v = _normal(rng, start_pos + n, kv_heads, d), _normal(rng, start_pos + n, kv_heads, d)
    scale = d**-0.5

    def run() -> np.ndarray:
        out = Framed((n, heads, d))
        keys, values = cuda.to_device(k), cuda.to_device(v)
        causal_attention(cuda.to_device(q), keys, values, out.array, start_pos, scale, window, softcap)
        return out.read()

    exact = [a.astype(np.float64) for a in (q, k, v)]
    _check(run, reference.attention(*exact, start_pos, scale=scale, window=window, softcap=softcap))


def upload(matrix: QuantMatrix) -> DeviceMatrix:
    return DeviceMatrix(matrix.kind, cuda.to_device(pack(matrix)), matrix.rows, matrix.cols)


def check_matmul(kind: str, m: int, n: int, k: int, tile: Tile | None = None) -> None:
    rng = np.random.default_rng((m, n, k))
    matrix, x = random_matrix(kind, n, k, rng), _normal(rng, m, k)

    def run() -> np.ndarray:
        out = Framed((m, n))
        quantized_matmul(cuda.to_device(x), upload(matrix), out.array, tile=tile)
        return out.read()

    _check(run, x.astype(np.float64) @ reference.weights(matrix).T)


def dequantize_on_device(matrix: QuantMatrix) -> np.ndarray:
    """float32 [rows, cols]: every octet through the functions that the matrix product dequantizes with."""
    fetch, decode = dequantizer(matrix.kind.name)
    stored = padded_cols(matrix.kind, matrix.cols)

    @cuda.jit
    def expand(data: Any, rows: int, stored_cols: int, out: Any) -> None:
        at = cuda.grid(1)
        if at < rows * (stored_cols // OCTET):
            row, octet = at % rows, at // rows
            values = decode(fetch(data, rows, stored_cols, row, octet), octet)
            out[row, octet * OCTET] = values[0]
            out[row, octet * OCTET + 1] = values[1]
            out[row, octet * OCTET + 2] = values[2]
            out[row, octet * OCTET + 3] = values[3]
            out[row, octet * OCTET + 4] = values[4]
            out[row, octet * OCTET + 5] = values[5]
            out[row, octet * OCTET + 6] = values[6]
            out[row, octet * OCTET + 7] = values[7]

    out = Framed((matrix.rows, stored))
    threads = matrix.rows * stored // OCTET
    blocks = -(-threads // 128)
    expand[blocks, min(threads, 128)](cuda.to_device(pack(matrix)), np.int32(matrix.rows), np.int32(stored), out.array)
    return out.read()


def check_dequantization(kind: str, rows: int, cols: int, *, extreme: bool = False) -> None:
    """Bit for bit what the gguf package gives (faults 10 and 21), zeros in the padding."""
    rng = np.random.default_rng((rows, cols, extreme))
    matrix = random_matrix(kind, rows, cols, rng, extreme=extreme)
    got = dequantize_on_device(matrix)
    want = gguf.quants.dequantize(matrix.data, gguf.GGMLQuantizationType[kind]).reshape(rows, cols)
    assert np.array_equal(got[:, :cols].view(np.uint32), want.astype(np.float32).view(np.uint32))
    assert not got[:, cols:].any(), "padding is not zero"
