"""A decode attention on the GPU, or on what stands in for one, and its float64 twin, from one description."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from frink_numba.kernels.decode_attention import DecodeAttentions, DecodeShape
from frink_numba.kernels.fused_attention import sequence_table
from frink_numba.layer import RopeLayout
from tests.kernels.attention_device import Device, Gpu


@dataclass
class Case:
    """`sequences`: (rows, start_pos) of each. Scales are those of the mirrors."""

    shape: DecodeShape
    sequences: list[tuple[int, int]]
    k_scale: float = 1.0
    v_scale: float = 1.0
    sinks: bool = False
    eps: float = 1e-5

    def __post_init__(self) -> None:
        rng = np.random.default_rng(sum(r * 31 + p for r, p in self.sequences) + self.shape.head_dim)
        shape, self.m = self.shape, sum(rows for rows, _ in self.sequences)
        heads = shape.n_heads + 2 * shape.n_kv_heads
        self.qkv = rng.standard_normal((self.m, heads, shape.head_dim)).astype(np.float32)
        half = shape.rot_dim // 2
        angles = rng.uniform(0, 6, (self.m, half))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.weights = [(1 + 0.3 * rng.standard_normal(shape.head_dim)).astype(np.float32) for _ in range(2)]
        self.sink = rng.standard_normal(shape.n_heads).astype(np.float32) * 2
        self.mirrors = []
        for rows, start in self.sequences:
            size = (start + rows + 3, shape.n_kv_heads, shape.head_dim)
            pair = [rng.standard_normal(size).astype(np.float16) for _ in range(2)]
            for mirror in pair:
                mirror[start:] = 777  # stale: finite, and wrong
            self.mirrors.append(pair)

    # ---- the twin ----------------------------------------------------------------------------------------------------

    def _turned(self, x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
        """[m, heads, head_dim] normalized and rotated, or rotated and normalized, float64."""
        x = x.astype(np.float64)
        if weight is not None and not self.shape.norm_last:
            x = self._normed(x, weight)
        half = self.shape.rot_dim // 2
        first = np.arange(half) * (2 if self.shape.layout is RopeLayout.NORM else 1)
        second = first + (1 if self.shape.layout is RopeLayout.NORM else half)
        cos, sin = self.cos.astype(np.float64)[:, None], self.sin.astype(np.float64)[:, None]
        out = x.copy()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., first] * sin + x[..., second] * cos
        return self._normed(out, weight) if weight is not None and self.shape.norm_last else out

    def _normed(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.eps) * weight

    def expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(out [m, n_heads, head_dim], new K rows, new V rows), float64."""
        shape = self.shape
        h, kv = shape.n_heads, shape.n_kv_heads
        q = self._turned(self.qkv[:, :h], self.weights[0] if shape.q_norm else None)
        k = self._turned(self.qkv[:, h : h + kv], self.weights[1] if shape.k_norm else None)
        v = self.qkv[:, h + kv :].astype(np.float64)
        out = np.empty((self.m, h, shape.head_dim))
        scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
        row = 0
        for (rows, start), (k_old, v_old) in zip(self.sequences, self.mirrors, strict=True):
            keys = np.concatenate([k_old[:start].astype(np.float64) * self.k_scale, k[row : row + rows]])
            values = np.concatenate([v_old[:start].astype(np.float64) * self.v_scale, v[row : row + rows]])
            for r in range(rows):
                last = start + r
                first = max(0, last - shape.window + 1) if shape.window else 0
                for head in range(h):
                    s = keys[first : last + 1, head // shape.group] @ q[row + r, head] * scale
                    if shape.softcap:
                        s = shape.softcap * np.tanh(s / shape.softcap)
                    top = max(s.max(), self.sink[head]) if self.sinks else s.max()
                    p = np.exp(s - top)
                    total = p.sum() + (np.exp(self.sink[head] - top) if self.sinks else 0)
                    out[row + r, head] = p @ values[first : last + 1, head // shape.group] / total
            row += rows
        return out, k, v

    # ---- the kernel --------------------------------------------------------------------------------------------------

    def run(
        self,
        attentions: DecodeAttentions,
        *,
        parts: int | None = None,
        runs: int = 2,
        device: Device | None = None,
    ) -> dict[str, np.ndarray]:
        """Launch `runs` times. out float32 [runs, m, n_heads, head_dim], k_rows, v_rows, and the mirrors' new rows."""
        device = device or Gpu()
        shape, most = self.shape, max(rows for rows, _ in self.sequences)
        attention = attentions.attention(shape, sequences=len(self.sequences), most_rows=most, parts=parts)
        mirrors = [[device.place(a) for a in pair] for pair in self.mirrors]
        records, row = [], 0
        for (rows, start), (k, v) in zip(self.sequences, mirrors, strict=True):
            records.append((row, rows, start, k, v))
            row += rows
        table = device.place(np.frombuffer(sequence_table(records), np.uint8))
        qkv, q_norm, k_norm, sinks = (device.place(a) for a in (self.qkv, *self.weights, self.sink))
        cos, sin = (device.place(a) if a.size else 0 for a in (self.cos, self.sin))
        start_workspace = np.full(max(1024, attention.workspace), 0xFF, np.uint8)  # not-a-numbers
        start_workspace[: attention.counters] = 0
        workspace = device.place(start_workspace)
        size = (self.m, shape.n_kv_heads, shape.head_dim)
        outs = []
        for _ in range(runs):
            k_rows, v_rows = (device.place(np.full(size, np.nan, np.float32)) for _ in range(2))
            out = device.place(np.full((self.m + 1, shape.n_heads, shape.head_dim), np.nan, np.float16))
            launch = attention.bind(
                qkv,
                out,
                table,
                workspace=workspace,
                cos=cos,
                sin=sin,
                q_norm=q_norm,
                k_norm=k_norm,
                eps=self.eps,
                sinks=sinks if self.sinks else 0,
                k_rows=k_rows,
                v_rows=v_rows,
                k_scale=self.k_scale,
                v_scale=self.v_scale,
            )
            device.launch(launch)
            back = device.read(out)
            assert np.isnan(back[self.m :]).all(), "rows beyond the result were written"
            outs.append(back[: self.m].astype(np.float32) * self.v_scale)
        assert not device.read(workspace)[: attention.counters].any(), "counters are left"
        new: list[list[np.ndarray]] = [[], []]
        for (rows, start), pair, before in zip(self.sequences, mirrors, self.mirrors, strict=True):
            for side in range(2):
                mirror = device.read(pair[side])
                assert np.array_equal(mirror[:start], before[side][:start]), "old rows of a mirror changed"
                assert np.array_equal(mirror[start + rows :], before[side][start + rows :]), "later rows changed"
                new[side].append(mirror[start : start + rows])
        return {
            "out": np.stack(outs),
            "k_rows": device.read(k_rows),
            "v_rows": device.read(v_rows),
            "k_mirror": np.concatenate(new[0]).astype(np.float32) * self.k_scale,
            "v_mirror": np.concatenate(new[1]).astype(np.float32) * self.v_scale,
        }
