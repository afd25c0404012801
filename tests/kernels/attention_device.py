"""The attention kernels run from host arrays, on a GPU or on `attention_machine`, with poisoned outputs and stale rows.

And their float64 twins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from frink_numba.kernels.fused_attention import Attentions, HeadShape, Mirror, sequence_table

STALE = 30.0  # finite values where a mirror was written before, and nobody may look any more


class Device(Protocol):
    """Where kernels run: arrays go to an address of it, and come back."""

    def place(self, array: np.ndarray) -> int: ...

    def read(self, address: int) -> np.ndarray: ...

    def launch(self, bound: Callable[[int], None]) -> None: ...


class Gpu:
    """The current GPU."""

    def __init__(self) -> None:
        self._arrays: dict[int, Any] = {}

    def place(self, array: np.ndarray) -> int:
        from numba import cuda

        held = cuda.to_device(np.ascontiguousarray(array))
        address = int(held.__cuda_array_interface__["data"][0])
        self._arrays[address] = held
        return address

    def read(self, address: int) -> np.ndarray:
        back: np.ndarray = self._arrays[address].copy_to_host()
        return back

    def launch(self, bound: Callable[[int], None]) -> None:
        from numba import cuda

        bound(0)
        cuda.default_stream().synchronize()


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
    device: Device,
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
    m = q.shape[0]
    mirrors, records, first = [], [], 0
    for k, v, rows in sequences:
        pair = []
        for x in (k, v):
            held = np.full((x.shape[0] + spare, shape.n_kv_heads, shape.pitch), STALE, np.float16)
            held[..., shape.head_dim :] = 0
            held[: x.shape[0]] = padded(x, shape.pitch)
            pair.append(device.place(held))
        mirrors.append(Mirror(pair[0], pair[1], k.shape[0] + spare))
        records.append((first, rows, k.shape[0] - rows, *pair))
        first += rows
    attention = attentions.attention(shape, m, windowed=window > 0, softcap=softcap > 0)
    table = device.place(np.frombuffer(sequence_table(records), np.uint8))
    maps = device.place(np.frombuffer(attention.maps(mirrors) or bytes(128), np.uint8))
    workspace = device.place(np.zeros(max(128, attention.workspace), np.uint8))
    queries = device.place(padded(q, shape.pitch))
    results = []
    for _ in range(runs):
        out = device.place(np.full((m + 1, shape.n_heads, shape.head_dim), np.nan, np.float16))
        launch = attention.bind(
            queries,
            out,
            table,
            len(records),
            maps=maps,
            workspace=workspace,
            window=window,
            softcap=softcap,
            sinks=device.place(sinks.astype(np.float32)) if sinks is not None else 0,
            **scales,
        )
        device.launch(launch)
        back = device.read(out)
        assert np.isnan(back[m:]).all(), "rows beyond the result were written"
        results.append(back[:m])
    assert not device.read(workspace).any(), "the workspace is not back at zero"
    return np.stack(results)


def relative_error(out: np.ndarray, reference: np.ndarray) -> float:
    """The 2-norm of the error over that of the reference; infinite when anything is not a number."""
    if not np.isfinite(out).all():
        return float("inf")
    return float(np.linalg.norm(out.astype(np.float64) - reference) / np.linalg.norm(reference))


def attention_case(
    attentions: Attentions,
    device: Device,
    heads: tuple[int, int, int],
    lengths: list[tuple[int, int]],
    *,
    limit: float,
    size: float = 1.0,
    q_size: float = 1.0,
    **options: Any,
) -> None:
    """Random inputs against float64. heads: (n_heads, n_kv_heads, head_dim); lengths: (start_pos, rows) a sequence."""
    rng = np.random.default_rng(abs(hash((heads, tuple(lengths)))) % (1 << 32))
    shape = HeadShape(*heads)
    m = sum(rows for _, rows in lengths)
    q = (rng.standard_normal((m, shape.n_heads, shape.head_dim)) * q_size).astype(np.float16)
    sequences = []
    for start, rows in lengths:
        k, v = (
            (rng.standard_normal((start + rows, shape.n_kv_heads, shape.head_dim)) * size).astype(np.float16)
            for _ in range(2)
        )
        sequences.append((k, v, rows))
    out = run_attention(attentions, device, shape, q, sequences, **options)
    true = {name: value for name, value in options.items() if name in ("window", "softcap", "scale", "sinks")}
    if "q_scale" in options or "k_scale" in options:
        true["scale"] = shape.head_dim**-0.5 * options.get("q_scale", 1.0) * options.get("k_scale", 1.0)
    parts, first = [], 0
    for (start, rows), (k, v, _) in zip(lengths, sequences, strict=True):
        parts.append(reference_attention(q[first : first + rows], k, v, start, **true))
        first += rows
    reference = np.concatenate(parts).reshape(m * shape.n_heads, shape.head_dim)
    got = out[0].reshape(reference.shape).astype(np.float32)
    bad = np.argwhere(~np.isfinite(got))
    assert not len(bad), f"{len(bad)} results are not finite, at first (position * heads + head, channel) {bad[:3]}"
    off = [i for i in range(len(got)) if relative_error(got[i], reference[i]) > 4e-3]
    error = relative_error(got, reference)
    assert error < limit, f"{error}; rows (position * heads + head) that are off: {off[:20]} of {len(got)}"
    # A row may nearly cancel: against the size of the values, then.
    assert np.abs(got - reference).max() < 0.012 * np.abs(reference).max()
    for other in out[1:]:
        assert np.array_equal(out[0].view(np.uint16), other.view(np.uint16)), "two runs differ"
