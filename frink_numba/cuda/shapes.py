"""Shapes checked against each other before any device work (R20).

Every function returns None or raises ShapeError with both sides of the contradiction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from frink_numba.errors import ShapeError
from frink_numba.layer import Layer
from frink_numba.quant import QuantMatrix


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes that decide a layer's scratch."""

    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    rope_pairs: int  # 0: not rotated

    @classmethod
    def of(cls, layer: Layer) -> LayerShape:
        attention = layer.attention
        pairs = attention.rope.rot_dim // 2 if attention.rope is not None else 0
        ffn = layer.ffn.experts[0].gate.rows
        return cls(layer.hidden_dim, attention.n_heads, attention.n_kv_heads, attention.head_dim, ffn, pairs)

    @property
    def query_width(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.head_dim


def check_layer(layer: Layer) -> None:
    """The parts of one layer fit together."""
    spec, expert, hidden = layer.attention, layer.ffn.experts[0], layer.hidden_dim
    for name, value in (("n_heads", spec.n_heads), ("n_kv_heads", spec.n_kv_heads), ("head_dim", spec.head_dim)):
        if value < 1:
            raise ShapeError(f"{name} is {value}, it must be at least 1")
    if spec.n_heads % spec.n_kv_heads:
        raise ShapeError(f"{spec.n_heads} query heads cannot share {spec.n_kv_heads} K/V heads evenly")
    if spec.window < 0 or spec.softcap < 0:
        raise ShapeError(f"a window of {spec.window} and a soft cap of {spec.softcap}: neither may be negative")
    queries, keys = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    _check_matrix("q", spec.q, queries, hidden)
    _check_matrix("k", spec.k, keys, hidden)
    _check_matrix("v", spec.v, keys, hidden)
    _check_matrix("o", spec.o, hidden, queries)
    _check_matrix("gate", expert.gate, expert.gate.rows, hidden)
    _check_matrix("up", expert.up, expert.gate.rows, hidden)
    _check_matrix("down", expert.down, hidden, expert.gate.rows)
    _check_vector("attn_norm", layer.attn_norm, hidden)
    _check_vector("ffn_norm", layer.ffn_norm, hidden)
    _check_vector("post_attn_norm", layer.post_attn_norm, hidden)
    _check_vector("post_ffn_norm", layer.post_ffn_norm, hidden)
    _check_vector("q_bias", spec.q_bias, queries)
    _check_vector("k_bias", spec.k_bias, keys)
    _check_vector("v_bias", spec.v_bias, keys)
    _check_vector("o_bias", spec.o_bias, hidden)
    _check_vector("gate_bias", expert.gate_bias, expert.gate.rows)
    _check_vector("up_bias", expert.up_bias, expert.gate.rows)
    _check_vector("down_bias", expert.down_bias, hidden)
    _check_vector("q_norm", spec.q_norm, spec.head_dim, queries)
    _check_vector("k_norm", spec.k_norm, spec.head_dim, keys)
    _check_vector("sinks", spec.sinks, spec.n_heads)
    if spec.rope is not None:
        _check_vector("freq_factors", spec.rope.freq_factors, spec.rope.rot_dim // 2)


def check_hidden(hidden: np.ndarray, batch: int, layers: Sequence[Layer]) -> None:
    """The hidden batch is float32 [batch, hidden_dim], C-contiguous, and every layer is that wide."""
    if hidden.dtype != np.float32 or not hidden.flags.c_contiguous:
        raise ShapeError(f"the hidden batch must be C-contiguous float32, not {hidden.dtype}")
    widths = {layer.hidden_dim for layer in layers}
    if len(widths) != 1:
        raise ShapeError(f"layers of one run have different hidden sizes: {sorted(widths)}")
    want = (batch, widths.pop())
    if hidden.shape != want or batch < 1:
        raise ShapeError(f"the hidden batch has shape {list(hidden.shape)}, not {list(want)}")


def check_prefix(layer: Layer, keys: np.ndarray, values: np.ndarray, start_pos: int) -> None:
    """K and V rows of the positions before the batch: [start_pos, n_kv_heads, head_dim], float32 or float16."""
    want = (start_pos, layer.attention.n_kv_heads, layer.attention.head_dim)
    for name, rows in (("K", keys), ("V", values)):
        if rows.shape != want:
            raise ShapeError(f"prefix {name} rows have shape {list(rows.shape)}, not {list(want)}")
        if rows.dtype not in (np.float32, np.float16):
            raise ShapeError(f"prefix {name} rows are {rows.dtype}, not float32 or float16")


def _check_matrix(name: str, matrix: QuantMatrix, rows: int, cols: int) -> None:
    if (matrix.rows, matrix.cols) != (rows, cols):
        raise ShapeError(f"{name} is {matrix.rows} x {matrix.cols}, not {rows} x {cols}")


def _check_vector(name: str, vector: np.ndarray | None, *lengths: int) -> None:
    if vector is None:
        return
    if vector.dtype != np.float32 or vector.ndim != 1 or vector.shape[0] not in lengths:
        wanted = " or ".join(str(length) for length in lengths)
        raise ShapeError(f"{name} is {vector.dtype} {list(vector.shape)}, not float32 [{wanted}]")
