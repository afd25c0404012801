"""R20: launchers compare shapes, dtypes and strides before any device work, and name what disagrees."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from frink_numba.errors import ShapeError
from frink_numba.kernels.attention import causal_attention
from frink_numba.kernels.bias import add_bias
from frink_numba.kernels.device_matrix import DeviceMatrix
from frink_numba.kernels.kinds import packed_bytes
from frink_numba.kernels.quantized_matmul import TILES, choose_tile, quantized_matmul
from frink_numba.kernels.residual import residual_add
from frink_numba.kernels.rms_norm import rms_norm
from frink_numba.kernels.rope import rope, rope_table
from frink_numba.kernels.swiglu import swiglu
from frink_numba.layer import RopeLayout
from frink_numba.quant import KINDS


class Described:
    """What a launcher may ask of a device array; there is no memory behind it, so that no launch could succeed."""

    def __init__(self, *shape: int, dtype: type = np.float32, contiguous: bool = True) -> None:
        self.shape, self.dtype, self._contiguous = shape, np.dtype(dtype), contiguous

    def is_c_contiguous(self) -> bool:
        return self._contiguous


A = Described


def weight(rows: int, cols: int) -> DeviceMatrix:
    kind = KINDS["Q8_0"]
    return DeviceMatrix(kind, A(packed_bytes(kind, rows, cols), dtype=np.uint8), rows, cols)


def attend(q: Any, k: Any, v: Any, out: Any, **more: Any) -> None:
    causal_attention(q, k, v, out, more.pop("start_pos", 2), 0.5, **more)


CASES: list[tuple[str, Callable[[], None], str]] = [
    (
        "norm: the weight's length",
        lambda: rms_norm(A(3, 8), A(7), 1e-5, A(3, 8)),
        "rms_norm: weight must be contiguous float32 [8], got float32 [7]",
    ),
    (
        "norm: dtype",
        lambda: rms_norm(A(3, 8, dtype=np.float64), A(8), 1e-5, A(3, 8)),
        "rms_norm: x must be contiguous float32 [3, 8], got float64 [3, 8]",
    ),
    (
        "norm: strides",
        lambda: rms_norm(A(3, 8), A(8), 1e-5, A(3, 8, contiguous=False)),
        "rms_norm: out must be contiguous float32 [3, 8], got float32 [3, 8] with gaps between its rows",
    ),
    ("norm: rank", lambda: rms_norm(A(24), A(8), 1e-5, A(24)), "rms_norm: x must have 2 dimensions, got [24]"),
    ("bias", lambda: add_bias(A(3, 8), A(9)), "add_bias: bias must be contiguous float32 [8], got float32 [9]"),
    ("residual", lambda: residual_add(A(3, 8), A(4, 8)), "residual_add: y must be contiguous float32 [3, 8]"),
    ("swiglu", lambda: swiglu(A(3, 8), A(3, 8), A(3, 9)), "swiglu: out must be contiguous float32 [3, 8]"),
    (
        "table: float32 frequencies",
        lambda: rope_table(A(4), 1.0, 0, A(3, 4), A(3, 4)),
        "rope_table: inv_freq must be contiguous float64 [4], got float32 [4]",
    ),
    (
        "rope: rows",
        lambda: rope(A(3, 2, 8), A(4, 4), A(4, 4), RopeLayout.NEOX),
        "rope: cos must be contiguous float32 [3, 4], got float32 [4, 4]",
    ),
    (
        "rope: wider than the head",
        lambda: rope(A(3, 2, 8), A(3, 5), A(3, 5), RopeLayout.NORM),
        "rope: a table of 5 pairs turns 10 channels, a head has 8",
    ),
    (
        "attention: rows of the prefix",
        lambda: attend(A(3, 4, 8), A(4, 2, 8), A(4, 2, 8), A(3, 4, 8)),
        "causal_attention: k must be contiguous float32 [5, 2, 8], got float32 [4, 2, 8]",
    ),
    (
        "attention: uneven groups",
        lambda: attend(A(3, 4, 8), A(5, 3, 8), A(5, 3, 8), A(3, 4, 8)),
        "causal_attention: 4 query heads do not share 3 K/V heads evenly",
    ),
    (
        "attention: head_dim",
        lambda: attend(A(3, 4, 257), A(5, 2, 257), A(5, 2, 257), A(3, 4, 257)),
        "causal_attention: heads of 1 to 256 channels are served, got 257",
    ),
    (
        "attention: a negative window",
        lambda: attend(A(3, 4, 8), A(5, 2, 8), A(5, 2, 8), A(3, 4, 8), window=-1),
        "causal_attention: window -1, softcap 0.0 and start_pos 2 must not be negative",
    ),
    (
        "attention: places beyond 32 bits",
        lambda: attend(A(3, 4, 128), A(1 << 22, 4, 128), A(1 << 22, 4, 128), A(3, 4, 128), start_pos=(1 << 22) - 3),
        "causal_attention: 3 rows of 4 heads over 4194304 of 4, with 128 channels, are too large for 32-bit places",
    ),
    (
        "product: K",
        lambda: quantized_matmul(A(3, 32), weight(5, 64), A(3, 5)),
        "quantized_matmul: x must be contiguous float32 [3, 64], got float32 [3, 32]",
    ),
    (
        "product: N",
        lambda: quantized_matmul(A(3, 64), weight(5, 64), A(3, 6)),
        "quantized_matmul: out must be contiguous float32 [3, 5], got float32 [3, 6]",
    ),
    (
        "product: places beyond 32 bits",
        lambda: quantized_matmul(A(1 << 25, 64), weight(5, 64), A(1 << 25, 5)),
        "quantized_matmul: x of 33554432 x 64 is too large; take fewer rows at a time",
    ),
]


@pytest.mark.parametrize(("launch", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_disagreements_are_named(launch: Callable[[], None], message: str) -> None:
    with pytest.raises(ShapeError, match=re.escape(message)):
        launch()


def test_an_empty_batch_launches_nothing() -> None:
    rms_norm(A(0, 8), A(8), 1e-5, A(0, 8))
    add_bias(A(0, 8), A(8))
    residual_add(A(0, 8), A(0, 8))
    swiglu(A(0, 8), A(0, 8), A(0, 8))
    rope(A(0, 2, 8), A(0, 4), A(0, 4), RopeLayout.NORM)
    attend(A(0, 4, 8), A(2, 2, 8), A(2, 2, 8), A(0, 4, 8))
    quantized_matmul(A(0, 64), weight(5, 64), A(0, 5))


def test_small_outputs_get_small_tiles() -> None:
    large, middle, small = TILES
    assert choose_tile(512, 8192, 132) == large
    assert choose_tile(2048, 3072, 132) == large
    assert choose_tile(512, 3072, 132) == middle  # 192 of the large tiles would be two rounds of 132
    assert choose_tile(512, 192, 132) == small
    assert choose_tile(1, 1, 132) == small
