"""One transformer layer over a block of tokens, in NumPy float32.

Activations are columns: [channels, n], one token a column, C-contiguous. A projection is then `np.dot(W, x)` for any
number of tokens (a matrix-vector product for one), the parts of a fused projection are contiguous row ranges of its
result, and heads, halves and pairs of channels are plain views with the tokens innermost.
"""

from __future__ import annotations

import numpy as np

from frink_numba.host.activation import activate, sigmoid
from frink_numba.host.attention import attend
from frink_numba.host.kv_cache import store_rows
from frink_numba.host.linear import linear
from frink_numba.host.prepare import PreparedLayer
from frink_numba.host.rms_norm import rms_norm
from frink_numba.host.rope import RopeTable, rotate
from frink_numba.host.scratch import Scratch
from frink_numba.host.weights import WeightStore


def run_block(
    layer: PreparedLayer,
    x: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    first: int,
    start: int,
    table: RopeTable | None,
    store: WeightStore,
    scratch: Scratch,
) -> None:
    """Take the columns `x` float32 [hidden, n] at positions start .. start+n-1 through `layer`, in place.

    `keys` and `values` [rows, n_kv_heads, head_dim] hold the positions first .. start+n-1, float32 or float16; the last
    n rows are written here, the others read. CacheError when float16 rows cannot hold a value.
    """
    _attention(layer, x, keys, values, first, start, table, store, scratch)
    _feed_forward(layer, x, store, scratch)


def _attention(
    layer: PreparedLayer,
    x: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    first: int,
    start: int,
    table: RopeTable | None,
    store: WeightStore,
    scratch: Scratch,
) -> None:
    n = x.shape[1]
    heads, kv_heads, head_dim = layer.n_heads, layer.n_kv_heads, layer.head_dim
    normed = rms_norm(x, layer.attn_norm, layer.eps, scratch.array("normed", layer.hidden, n), scratch)
    qkv = scratch.array("qkv", (heads + 2 * kv_heads) * head_dim, n)
    linear(store, normed, layer.qkv, qkv, bias=layer.qkv_bias)
    by_head = qkv.reshape(-1, head_dim, n)
    q, k, v = by_head[:heads], by_head[heads : heads + kv_heads], by_head[heads + kv_heads :]

    if not layer.norm_after_rope:
        _head_norms(layer, q, k, scratch)
    if table is not None:
        rotate(by_head[: heads + kv_heads], table, scratch)
    if layer.norm_after_rope:
        _head_norms(layer, q, k, scratch)

    store_rows(k.transpose(2, 0, 1), keys[-n:], layer.number)
    store_rows(v.transpose(2, 0, 1), values[-n:], layer.number)
    sums = scratch.array("attended", heads * head_dim, n)
    attend(q, keys, values, first, start, layer.visibility, sums.reshape(heads, head_dim, n), scratch)
    if layer.output_gate is not None:
        gate = linear(store, normed, (layer.output_gate,), scratch.array("output gate", heads * head_dim, n))
        sigmoid(gate)
        np.multiply(sums, gate, out=sums)
    if layer.value_norm is not None:
        rms_norm(sums, layer.value_norm, layer.eps, sums, scratch)
    y = scratch.array("block output", layer.hidden, n)
    linear(store, sums, (layer.o,), y, scale=layer.o_scale, bias=layer.o_bias)
    if layer.post_attn_norm is not None:
        rms_norm(y, layer.post_attn_norm, layer.post_eps, y, scratch)
    np.add(x, y, out=x)


def _head_norms(layer: PreparedLayer, q: np.ndarray, k: np.ndarray, scratch: Scratch) -> None:
    for weight, part in ((layer.q_norm, q), (layer.k_norm, k)):
        if weight is not None:
            # A weight with a head axis norms each head by itself; one without, the whole vector.
            shaped = part if weight.ndim == 3 else part.reshape(-1, part.shape[2])
            rms_norm(shaped, weight, layer.eps, shaped, scratch)


def _feed_forward(layer: PreparedLayer, x: np.ndarray, store: WeightStore, scratch: Scratch) -> None:
    n = x.shape[1]
    normed = rms_norm(x, layer.ffn_norm, layer.eps, scratch.array("normed", layer.hidden, n), scratch)
    gate_up = scratch.array("gate up", 2 * layer.ffn, n)
    linear(store, normed, layer.gate_up, gate_up, bias=layer.gate_up_bias)
    gate = gate_up[: layer.ffn]
    activate(layer.activation, gate, gate_up[layer.ffn :], scratch)
    y = scratch.array("block output", layer.hidden, n)
    linear(store, gate, (layer.down,), y, scale=layer.down_scale, bias=layer.down_bias)
    if layer.post_ffn_norm is not None:
        rms_norm(y, layer.post_ffn_norm, layer.post_eps, y, scratch)
    np.add(x, y, out=x)
