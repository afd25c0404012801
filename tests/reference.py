"""The truth: one transformer layer in float64 NumPy, head by head and from the formulas, for tests of every backend.

It shares no code with the package: weights are dequantized by the `gguf` package, and nothing is fused, blocked or
cached. Rows are tokens.
"""

from __future__ import annotations

import math

import gguf
import numpy as np

from frink_numba.layer import Activation, AttentionSpec, Expert, FeedForward, Layer, Lora, Rope, RopeLayout
from frink_numba.quant import QuantMatrix


def weights(matrix: QuantMatrix) -> np.ndarray:
    """float64 [rows, cols]."""
    kind = gguf.GGMLQuantizationType[matrix.kind.name]
    return gguf.quants.dequantize(matrix.data, kind).reshape(matrix.rows, matrix.cols).astype(np.float64)


def project(
    x: np.ndarray, matrix: QuantMatrix, bias: np.ndarray | None = None, loras: tuple[Lora, ...] = (), name: str = ""
) -> np.ndarray:
    """x W^T + bias, with the low-rank updates of the projection `name` merged into W."""
    merged = weights(matrix)
    for lora in loras:
        if lora.target == name:
            merged = merged + lora.scale * lora.up.astype(np.float64) @ lora.down.astype(np.float64)
    y = x @ merged.T
    return y if bias is None else y + bias


def rms_norm(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; x itself when there is no weight."""
    if weight is None:
        return x
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def head_norm(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    """The norm of Q or K [n, heads, head_dim]: of each head, or of all when the weight is as long as all of them."""
    if weight is None:
        return x
    n, heads, head_dim = x.shape
    if weight.shape == (heads * head_dim,) and heads > 1:
        return rms_norm(x.reshape(n, heads * head_dim), weight, eps).reshape(x.shape)
    return rms_norm(x, weight, eps)  # [head_dim], or [heads, head_dim]: a row for each head


def rotate(x: np.ndarray, rope: Rope, start: int) -> np.ndarray:
    """RoPE of [n, heads, head_dim] at positions start, start + 1, ..."""
    out = x.astype(np.float64)
    half = rope.rot_dim // 2
    for token in range(x.shape[0]):
        for pair in range(half):
            angle = (start + token) * rope.theta ** (-2 * pair / rope.rot_dim)
            if rope.freq_factors is not None:
                angle /= float(rope.freq_factors[pair])
            i, j = (2 * pair, 2 * pair + 1) if rope.layout is RopeLayout.NORM else (pair, pair + half)
            a, b = x[token, :, i], x[token, :, j]
            out[token, :, i] = (a * math.cos(angle) - b * math.sin(angle)) * rope.magnitude_scale
            out[token, :, j] = (a * math.sin(angle) + b * math.cos(angle)) * rope.magnitude_scale
    return out


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    start: int,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Value sums [n, heads, head_dim] of queries at start, start + 1, ... over rows at positions 0 .. start + n - 1."""
    n, heads, head_dim = q.shape
    group = heads // k.shape[1]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    i = start + np.arange(n)[:, None]
    j = np.arange(k.shape[0])[None, :]
    visible = (j <= i) & ((i - j < window) if window else True)
    out = np.empty((n, heads, v.shape[2]))
    for head in range(heads):
        scores = scale * (q[:, head] @ k[:, head // group].T)
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        scores = np.where(visible, scores, -np.inf)
        if sinks is not None:
            scores = np.concatenate([scores, np.full((n, 1), float(sinks[head]))], axis=1)
        likely = np.exp(scores - scores.max(axis=1, keepdims=True))
        likely /= likely.sum(axis=1, keepdims=True)
        out[:, head] = likely[:, : k.shape[0]] @ v[:, head // group]
    return out


def activate(activation: Activation, x: np.ndarray) -> np.ndarray:
    """The gate's activation."""
    if activation is Activation.SWIGLU:
        return np.array([v / (1 + math.exp(-v)) if v > -700 else 0.0 for v in x.flat]).reshape(x.shape)
    if activation is Activation.GEGLU:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if activation is Activation.GEGLU_ERF:
        return np.array([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x.flat]).reshape(x.shape)
    if activation is Activation.REGLU_SQUARED:
        return np.where(x > 0, x, 0) ** 2
    raise NotImplementedError(activation)


def attention_block(
    spec: AttentionSpec,
    x: np.ndarray,
    eps: float,
    k_prefix: np.ndarray,
    v_prefix: np.ndarray,
    loras: tuple[Lora, ...] = (),
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of normed rows `x`: the block's output before any post-norm, and the K and V rows of these tokens."""
    n, start = x.shape[0], k_prefix.shape[0]
    if spec.interleaved_q_gate:
        raise NotImplementedError("interleaved q gate")
    q = project(x, spec.q, spec.q_bias, loras, "q").reshape(n, spec.n_heads, spec.head_dim)
    k = project(x, spec.k, spec.k_bias, loras, "k").reshape(n, spec.n_kv_heads, spec.head_dim)
    v = project(x, spec.v, spec.v_bias, loras, "v").reshape(n, spec.n_kv_heads, spec.head_dim)
    if not spec.qk_norm_after_rope:
        q, k = head_norm(q, spec.q_norm, eps), head_norm(k, spec.k_norm, eps)
    if spec.rope is not None:
        q, k = rotate(q, spec.rope, start), rotate(k, spec.rope, start)
    if spec.qk_norm_after_rope:
        q, k = head_norm(q, spec.q_norm, eps), head_norm(k, spec.k_norm, eps)
    all_k, all_v = np.concatenate([k_prefix, k]), np.concatenate([v_prefix, v])
    sums = attention(
        q, all_k, all_v, start, scale=spec.scale, window=spec.window, softcap=spec.softcap, sinks=spec.sinks
    ).reshape(n, -1)
    if spec.output_gate is not None:
        sums = sums / (1 + np.exp(-project(x, spec.output_gate)))
    if spec.value_norm is not None:
        sums = rms_norm(sums, spec.value_norm, eps)
    y = project(sums, spec.o, None, loras, "o")
    if spec.o_scale is not None:
        y = y * spec.o_scale
    if spec.o_bias is not None:
        y = y + spec.o_bias
    return y, k, v


def feed_forward(ffn: FeedForward, x: np.ndarray, loras: tuple[Lora, ...] = ()) -> np.ndarray:
    """Of normed rows `x`: the FFN's output before any post-norm; token by token where a router chooses."""
    if ffn.router is None:
        return _body(ffn.experts[0], ffn.activation, x, loras)
    out = np.zeros((x.shape[0], ffn.experts[0].down.rows))
    for token in range(x.shape[0]):
        row = x[token : token + 1]
        odds = np.exp(project(row, ffn.router)[0])
        odds /= odds.sum()
        chosen = np.argsort(odds)[::-1][: ffn.n_experts_used]
        weight = odds[chosen] / (odds[chosen].sum() if ffn.normalized_weights else 1)
        for number, share in zip(chosen, weight, strict=True):
            out[token] += share * _body(ffn.experts[number], ffn.activation, row)[0]
        if ffn.shared is not None:
            gate = 1.0 if ffn.shared_gate is None else 1 / (1 + math.exp(-float(row[0] @ ffn.shared_gate)))
            out[token] += gate * _body(ffn.shared, ffn.activation, row)[0]
    return out


def _body(expert: Expert, activation: Activation, x: np.ndarray, loras: tuple[Lora, ...] = ()) -> np.ndarray:
    gate = project(x, expert.gate, expert.gate_bias, loras, "gate")
    up = project(x, expert.up, expert.up_bias, loras, "up")
    y = project(activate(activation, gate) * up, expert.down, None, loras, "down")
    if expert.down_scale is not None:
        y = y * expert.down_scale
    if expert.down_bias is not None:
        y = y + expert.down_bias
    return y


def layer(
    description: Layer, hidden: np.ndarray, k_prefix: np.ndarray | None = None, v_prefix: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A whole layer over `hidden` [n, hidden]: (hidden, K rows, V rows), all float64.

    The prefix [start, n_kv_heads, head_dim] holds all positions before these tokens; None: there are none.
    """
    x, k, v = attention_only(description, hidden, k_prefix, v_prefix)
    y = feed_forward(description.ffn, rms_norm(x, description.ffn_norm, description.norm_eps), description.lora)
    y = rms_norm(y, description.post_ffn_norm, _post_eps(description))
    return x + description.residual_scale * y, k, v


def attention_only(
    description: Layer, hidden: np.ndarray, k_prefix: np.ndarray | None = None, v_prefix: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first half of `layer`: the hidden batch that its FFN reads, and the K and V rows."""
    spec, eps = description.attention, description.norm_eps
    none = np.empty((0, spec.n_kv_heads, spec.head_dim))
    k_prefix = none if k_prefix is None else k_prefix.astype(np.float64)
    v_prefix = none if v_prefix is None else v_prefix.astype(np.float64)
    x = hidden.astype(np.float64)
    normed = rms_norm(x, description.attn_norm, eps)
    y, k, v = attention_block(spec, normed, eps, k_prefix, v_prefix, description.lora)
    y = rms_norm(y, description.post_attn_norm, _post_eps(description))
    return x + description.residual_scale * y, k, v


def _post_eps(description: Layer) -> float:
    return description.norm_eps if description.post_norm_eps is None else description.post_norm_eps


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """norm(got - want) / norm(want); infinite when anything is NaN or the shapes differ, so that no bound holds."""
    if got.shape != want.shape or np.isnan(got).any() or np.isnan(want).any():
        return math.inf
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))
