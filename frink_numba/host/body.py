"""One transformer layer over a block of tokens, in NumPy float32: its attention, then its feed-forward part.

Activations are columns: [channels, n], one token a column, C-contiguous. A projection is then `np.dot(W, x)` for any
number of tokens (a matrix-vector product for one), the parts of a fused projection are contiguous row ranges of its
result, and heads, halves and pairs of channels are plain views with the tokens innermost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from frink_numba.host.activation import activate, sigmoid
from frink_numba.host.aligned_attention import attend_aligned
from frink_numba.host.attention import attend
from frink_numba.host.experts import mixture
from frink_numba.host.layer_kv import store_rows
from frink_numba.host.linear import linear
from frink_numba.host.lora import add_loras
from frink_numba.host.prepare import PreparedLayer
from frink_numba.host.rms_norm import rms_norm
from frink_numba.host.rope import RopeTable
from frink_numba.host.scratch import Scratch
from frink_numba.host.weights import WeightStore
from frink_numba.host.workspace import Workspace

_ONLY = (0,)  # the expert of a dense layer (R22)


def attention(
    layer: PreparedLayer,
    x: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    first: int,
    start: int,
    table: RopeTable | None,
    work: Workspace,
    store: WeightStore,
    scratch: Scratch,
    columns: slice | None = None,
) -> None:
    """x += residual_scale * attention(norm(x)) for the columns `x` float32 [hidden, n] at positions start .. start+n-1.

    `keys` and `values` [rows, n_kv_heads, head_dim] hold the positions first .. start+n-1, float32 or float16; the last
    n rows are written here, the others read. `table` is None for a layer that is not rotated. CacheError when float16
    rows cannot hold a value.

    `columns`: those that are tokens, the others being padding (`aligned.py`): `start` is still the position of the
    first column, and `keys` and `values` end with the last token. None: all are.
    """
    own = slice(0, x.shape[1]) if columns is None else columns
    n = own.stop - own.start
    normed = _project(layer, x, table, work, store, scratch)
    store_rows(work.k_rows[own], keys[-n:], layer.number)
    store_rows(work.v_rows[own], values[-n:], layer.number)
    attend_to = attend if columns is None else attend_aligned
    attend_to(work.q, keys, values, first, start, layer.visibility, work.sums_by_head, scratch)
    _gather(layer, x, normed, work, store, scratch)


class Span(NamedTuple):
    """One sequence of a group: its `columns`, and `keys`, `values`, `first` and `start` as in `attention`."""

    columns: slice
    keys: np.ndarray
    values: np.ndarray
    first: int
    start: int


def group_attention(
    layer: PreparedLayer,
    x: np.ndarray,
    spans: Sequence[Span],
    table: RopeTable | None,
    work: Workspace,
    store: WeightStore,
    scratch: Scratch,
) -> None:
    """`attention` for the columns of several sequences at once: each sees its own rows alone, products take all."""
    normed = _project(layer, x, table, work, store, scratch)
    for span in spans:
        own = span.columns
        n = own.stop - own.start
        store_rows(work.k_rows[own], span.keys[-n:], layer.number)
        store_rows(work.v_rows[own], span.values[-n:], layer.number)
        q = np.ascontiguousarray(work.q[:, :, own])
        out = np.empty_like(q)
        attend(q, span.keys, span.values, span.first, span.start, layer.visibility, out, scratch)
        work.sums_by_head[:, :, own] = out
    _gather(layer, x, normed, work, store, scratch)


def _project(
    layer: PreparedLayer,
    x: np.ndarray,
    table: RopeTable | None,
    work: Workspace,
    store: WeightStore,
    scratch: Scratch,
) -> np.ndarray:
    """q, k and v of `x`, normed and rotated, in the workspace; what they were projected from."""
    normed = x if layer.attn_norm is None else rms_norm(x, layer.attn_norm, layer.eps, work.normed, scratch)
    linear(store, normed, layer.qkv, work.qkv, bias=layer.qkv_bias)
    if layer.qkv_loras:
        add_loras(normed, layer.qkv_loras, work.qkv)
    if layer.norms_before_rope:
        _head_norms(layer, work, scratch)
    if work.rotation is not None and table is not None:
        work.rotation.turn(table)
    if layer.norms_after_rope:
        _head_norms(layer, work, scratch)
    return normed


def _gather(
    layer: PreparedLayer, x: np.ndarray, normed: np.ndarray, work: Workspace, store: WeightStore, scratch: Scratch
) -> None:
    """x += residual_scale * what the layer makes of the value sums in the workspace."""
    sums = work.sums
    if layer.output_gate:
        gate = linear(store, normed, layer.output_gate, scratch.array("output gate", *sums.shape))
        sigmoid(gate)
        np.multiply(sums, gate, out=sums)
    if layer.value_norm is not None:
        rms_norm(sums, layer.value_norm, layer.eps, sums, scratch)
    y = linear(store, sums, layer.o, work.output, scale=layer.o_scale, bias=layer.o_bias)
    if layer.o_loras:
        add_loras(sums, layer.o_loras, y)
    _add(layer, layer.post_attn_norm, x, y, scratch)


def feed_forward(
    layer: PreparedLayer,
    x: np.ndarray,
    work: Workspace,
    store: WeightStore,
    scratch: Scratch,
    columns: slice | None = None,
) -> tuple[int, ...]:
    """x += residual_scale * ffn(norm(x)) for the columns `x` float32 [hidden, n]; the experts that were used.

    `columns` as in `attention`.
    """
    normed = x if layer.ffn_norm is None else rms_norm(x, layer.ffn_norm, layer.eps, work.normed, scratch)
    if layer.mixture is not None:
        used = mixture(layer.mixture, normed, work.output, store, scratch, columns)
        _add(layer, layer.post_ffn_norm, x, work.output, scratch)
        return used
    expert = layer.dense
    linear(store, normed, expert.gate_up, work.gate_up, bias=expert.gate_up_bias)
    if expert.gate_up_loras:
        add_loras(normed, expert.gate_up_loras, work.gate_up)
    activate(expert.activation, work.gate, work.up, scratch)
    y = linear(store, work.gate, expert.down, work.output, scale=expert.down_scale, bias=expert.down_bias)
    if expert.down_loras:
        add_loras(work.gate, expert.down_loras, y)
    _add(layer, layer.post_ffn_norm, x, y, scratch)
    return _ONLY


def _add(layer: PreparedLayer, norm: np.ndarray | None, x: np.ndarray, y: np.ndarray, scratch: Scratch) -> None:
    """x += residual_scale * norm(y); `y` is spoiled."""
    if norm is not None:
        rms_norm(y, norm, layer.post_eps, y, scratch)
    if layer.residual_scale != 1:
        np.multiply(y, layer.residual_scale, out=y)
    np.add(x, y, out=x)


def _head_norms(layer: PreparedLayer, work: Workspace, scratch: Scratch) -> None:
    for weight, part in ((layer.q_norm, work.q), (layer.k_norm, work.k)):
        if weight is not None:
            # A weight with a head axis norms each head by itself; one without, the whole vector.
            shaped = part if weight.ndim == 3 else part.reshape(-1, part.shape[2])
            rms_norm(shaped, weight, layer.eps, shaped, scratch)
