"""A fused attention run on the GPU from host arrays, with poisoned outputs and stale rows, and its float64 twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from frink_numba.kernels.fused_attention import Attentions, HeadShape, Mirror, sequence_table

STALE = 30.0  # finite values where a mirror was written before, and nobody may look any more


def address(array: Any) -> int:
    return int(array.__cuda_array_interface__["data"][0])


def upload(array: np.ndarray) -> Any:
    from numba import cuda

    return cuda.to_device(np.ascontiguousarray(array))


def reference_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    start: int,
    *,
    window: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """float64 [n, heads, d] of q [n, heads, d] over k, v [start + n, kv_heads, d]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    n, heads, d = q.shape
    group = heads // k.shape[1]
    visible = np.arange(k.shape[0])[None] <= start + np.arange(n)[:, None]
    if window:
        visible &= np.arange(k.shape[0])[None] > start + np.arange(n)[:, None] - window
    out = np.empty((n, heads, d))
    for head in range(heads):
        s = q[:, head] @ k[:, head // group].T * (d**-0.5 if scale is None else scale)
        if softcap:
            s = softcap * np.tanh(s / softcap)
        s = np.where(visible, s, -np.inf)
        top = s.max(axis=1, initial=-np.inf)
        if sinks is not None:
            top = np.maximum(top, sinks[head])
        w = np.exp(s - top[:, None])
        total = w.sum(axis=1)
        if sinks is not None:
            total += np.exp(sinks[head] - top)
        out[:, head] = w @ v[:, head // group] / total[:, None]
    return out


def padded(x: np.ndarray, pitch: int) -> np.ndarray:
    """f16 with the last axis filled with zeros up to the pitch."""
    out = np.zeros((*x.shape[:-1], pitch), np.float16)
    out[..., : x.shape[-1]] = x
    return out


def run_attention(
    attentions: Attentions,
    shape: HeadShape,
    q: np.ndarray,
    sequences: Sequence[tuple[np.ndarray, np.ndarray, int]],
    *,
    runs: int = 2,
    window: int = 0,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
    spare: int = 200,
    **scales: float,
) -> np.ndarray:
    """f16 [runs, M, heads, d]; sequences: (k, v, rows), k and v being [start + rows, kv_heads, d] f16."""
    from numba import cuda

    m = q.shape[0]
    kept, mirrors, records, first = [], [], [], 0
    for k, v, rows in sequences:
        pair = []
        for x in (k, v):
            held = np.full((x.shape[0] + spare, shape.n_kv_heads, shape.pitch), STALE, np.float16)
            held[..., shape.head_dim :] = 0
            held[: x.shape[0]] = padded(x, shape.pitch)
            pair.append(upload(held))
        kept += pair
        mirrors.append(Mirror(address(pair[0]), address(pair[1]), k.shape[0] + spare))
        records.append((first, rows, k.shape[0] - rows, mirrors[-1].k, mirrors[-1].v))
        first += rows
    attention = attentions.attention(shape, m, windowed=window > 0, softcap=softcap > 0)
    table = upload(np.frombuffer(sequence_table(records), np.uint8))
    maps = upload(np.frombuffer(attention.maps(mirrors) or bytes(128), np.uint8))
    workspace = upload(np.zeros(max(128, attention.workspace), np.uint8))
    device_q = upload(padded(q, shape.pitch))
    device_sinks = upload(sinks.astype(np.float32)) if sinks is not None else None
    results = []
    for _ in range(runs):
        out = upload(np.full((m + 1, shape.n_heads, shape.head_dim), np.nan, np.float16))
        launch = attention.bind(
            address(device_q),
            address(out),
            address(table),
            len(records),
            maps=address(maps),
            workspace=address(workspace),
            window=window,
            softcap=softcap,
            sinks=address(device_sinks) if device_sinks is not None else 0,
            **scales,
        )
        launch(0)
        cuda.default_stream().synchronize()
        back = out.copy_to_host()
        assert np.isnan(back[m:]).all(), "rows beyond the result were written"
        results.append(back[:m])
    assert not workspace.copy_to_host().any(), "the workspace is not back at zero"
    return np.stack(results)
