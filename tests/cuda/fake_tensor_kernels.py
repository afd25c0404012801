"""What the tensor-core kernels compute, on memory by address: float64 inside, rounded where the kernels round.

`memory(address, shape, dtype)` is device memory. Each function gets the variant that would be compiled, the grid, and
the launch's arguments by name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from frink_numba.kernels.fused_attention import SEQUENCE
from frink_numba.kernels.fused_attention_plan import LOG2E, MmaLayout
from frink_numba.kernels.fused_attention_wgmma import WORKSPACE_BYTES
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS, SLAB, STEP
from frink_numba.kernels.gemm_pack import PackedMatrix
from frink_numba.kernels.gemm_variant import FLAG_BYTES
from frink_numba.kernels.sample_kernels import ARGMAX_BLOCKS
from frink_numba.layer import RopeLayout
from tests.kernels.packed_weights import unpack

F32, F16 = np.float32, np.float16
Memory = Callable[..., np.ndarray]


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


# --- weights and operands ---


@functools.lru_cache(maxsize=1024)
def _unpacked(kind: str, cols: int, data: bytes, scales: bytes) -> np.ndarray:
    row_scale = np.frombuffer(scales, F32)
    packed = PackedMatrix(
        FRAGMENT_KINDS[kind], row_scale.size, cols, False, np.frombuffer(data, np.uint8), row_scale, ()
    )
    return unpack(packed)


def _weights(memory: Memory, kind: str, rows: int, cols: int, data: int, row_scale: int) -> np.ndarray:
    """float64 [rows filled up to slabs, cols] of a pack."""
    slabs = -(-rows // SLAB)
    packed = memory(data, (slabs * FRAGMENT_KINDS[kind].slab_bytes(cols),)).tobytes()
    return _unpacked(kind, cols, packed, memory(row_scale, (slabs * SLAB,), F32).tobytes())


def _power(bound: np.ndarray) -> np.ndarray:
    """The power of two that brings `bound` under 2**15, within what float32 has as a normal number."""
    _, exponent = np.frexp(np.asarray(bound, F32))
    return np.where(bound == 0, 1.0, np.exp2(np.clip(exponent, -110, 123) - 15.0))


def _as_half(values: np.ndarray) -> np.ndarray:
    """f16, beyond which nothing lies."""
    finite = values[np.isfinite(values)]
    assert np.abs(finite).max(initial=0.0) <= 65504, "an f16 operand overflows"
    return values.astype(F16)


def _operands(memory: Memory, values: np.ndarray, half: int, scale: int, norm: int) -> None:
    """Store rows as half_rows.py, norm_half.py and gated_half.py do."""
    m, cols = values.shape
    power = _power(np.abs(values).max(axis=1))
    memory(half, (m, cols), F16)[...] = _as_half(values / power[:, None])
    memory(scale, (m,), F32)[...] = power
    memory(norm, (m,), F32)[...] = 1.002 * np.sqrt((values**2).sum(axis=1))


def _normed(memory: Memory, x: int, weight: int, m: int, cols: int, eps: float) -> np.ndarray:
    wide = memory(x, (m, cols), F32).astype(np.float64)
    return wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + eps) * memory(weight, (cols,), F32)


def _activated(name: str, gate: np.ndarray) -> np.ndarray:
    if name == "geglu_erf":
        return gate * 0.5 * _erfc(-gate / np.sqrt(2))
    z = {"swiglu": gate, "geglu": 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)}[name]
    return gate / (1 + np.exp(-np.clip(z, -700, None)))


def _rows(memory: Memory, out: int, m: int, cols: int, pitch: int, dtype: Any) -> np.ndarray:
    item = np.dtype(dtype).itemsize
    span = memory(out, ((m - 1) * pitch // item + cols,), dtype)
    return np.lib.stride_tricks.as_strided(span, (m, cols), (pitch, item))


# --- kernels over rows ---


def norm_half(memory: Memory, variant: Any, blocks: int, a: SimpleNamespace) -> None:
    _operands(memory, _normed(memory, a.x, a.weight, blocks, a.cols, a.eps), a.half, a.scale, a.norm)


def half_rows(memory: Memory, variant: Any, blocks: int, a: SimpleNamespace) -> None:
    x = memory(a.x, (blocks, a.cols), F32).astype(np.float64)
    _operands(memory, x, a.half, a.scale, a.norm)


def norm_add(memory: Memory, variant: Any, blocks: int, a: SimpleNamespace) -> None:
    memory(a.hidden, (blocks, a.cols), F32)[...] += _normed(memory, a.y, a.weight, blocks, a.cols, a.eps)


def gated_half(memory: Memory, variant: Any, blocks: int, a: SimpleNamespace) -> None:
    gate, up = (memory(address, (blocks, a.cols), F32).astype(np.float64) for address in (a.gate, a.up))
    _operands(memory, _activated(variant[0], gate) * up, a.half, a.scale, a.norm)


def rope_rows(memory: Memory, variant: Any, blocks: int, a: SimpleNamespace) -> None:
    angles = memory(a.positions, (blocks, 1), np.int32) * memory(a.frequencies, (a.pairs,), np.float64)
    memory(a.cos, angles.shape, F32)[...] = np.cos(angles) * a.scale
    memory(a.sin, angles.shape, F32)[...] = np.sin(angles) * a.scale


def mirror_rows(memory: Memory, variant: Any, blocks: int, a: SimpleNamespace) -> None:
    heads = a.width // a.head_dim
    k, v = (memory(address, (blocks, heads, a.head_dim), F32).astype(np.float64) for address in (a.k, a.v))
    mirrors = [memory(address, (blocks, heads, a.pitch), F16) for address in (a.k_mirror, a.v_mirror)]
    _store_kv(k * a.k_factor, v * a.v_factor, *(mirror[..., : a.head_dim] for mirror in mirrors))


def _store_kv(k: np.ndarray, v: np.ndarray, k_mirror: np.ndarray, v_mirror: np.ndarray) -> None:
    """f16 rows of float32; one that f16 cannot hold spoils those who see it and nobody else."""
    k, v = k.astype(F32), v.astype(F32)
    held = (np.abs(k).max(axis=-1) < 65520) & (np.abs(v).max(axis=-1) < 65520)
    with np.errstate(over="ignore"):
        k_mirror[...] = np.where(held[..., None], k, np.nan)
        v_mirror[...] = np.where(held[..., None], v, 0.0)


def embed(memory: Memory, weights: Any, ids: int, m: int, hidden: int, scale: float) -> None:
    table = _weights(memory, weights.kind, weights.rows, weights.cols, weights.data, weights.row_scale)
    chosen = memory(ids, (m,), np.int32)
    assert ((chosen >= 0) & (chosen < weights.rows)).all()
    memory(hidden, (m, weights.cols), F32)[...] = table[chosen] * scale


def gather_rows(memory: Memory, variant: Any, blocks: int, a: SimpleNamespace) -> None:
    for at, row in enumerate(memory(a.rows, (blocks,), np.int32)):
        memory(a.out + 4 * a.cols * at, (a.cols,), F32)[...] = memory(a.x + 4 * a.cols * int(row), (a.cols,), F32)


def log_likelihood(memory: Memory, variant: Any, blocks: int, a: SimpleNamespace) -> None:
    logits = memory(a.logits, (blocks, a.count), F32).astype(np.float64)
    chosen = logits[np.arange(blocks), memory(a.tokens, (blocks,), np.int32)]
    top = logits.max(axis=1)
    memory(a.out, (blocks,), F32)[...] = chosen - top - np.log(np.exp(logits - top[:, None]).sum(axis=1))


def argmax(memory: Memory, variant: Any, blocks: int, a: SimpleNamespace) -> None:
    m, rest = divmod(blocks, ARGMAX_BLOCKS)
    assert not rest
    assert not memory(a.workspace, (16 * m,)).any(), "the workspace of a choice is not 0"
    logits = memory(a.logits, (m, a.pitch), F32)[:, : a.count]
    chosen = logits.argmax(axis=1)
    memory(a.ids, (m,), np.int32)[...] = chosen
    if not a.answers:
        return
    done, answers = memory(a.done, (m,), np.int32), memory(a.answers, (m, a.most), np.int32)
    answers[np.arange(m), done] = np.where(np.isnan(logits).any(axis=1), -1, chosen)
    done += 1
    memory(a.positions, (m,), np.int32)[...] += 1
    records = memory(a.records, (a.layers, m), SEQUENCE)
    records["start_pos"] += 1
    records["kv_row"] += 1


# --- products ---


def _product(
    memory: Memory,
    variant: Any,
    a: SimpleNamespace,
    x: np.ndarray,
    norm: np.ndarray | None,
    out: tuple[int, int, int],  # address, columns, pitch
    cols: int,
) -> None:
    """`x`: true values of the operands, float64 [m, cols]; `norm`: float32 [m] where the result is f16."""
    address, outputs, pitch = out
    epilogue, m = variant.epilogue, len(x)
    rows = 2 * outputs if epilogue.gate else outputs
    if getattr(variant, "second", ""):
        first, border = SLAB * a.border, 4 * SLAB * a.border
        w = np.concatenate(
            [
                _weights(memory, variant.kind, first, cols, a.weights, a.row_scale),
                _weights(memory, variant.second, rows - first, cols, a.behind, a.row_scale + border),
            ]
        )
    else:
        w = _weights(memory, variant.kind, rows, cols, a.weights, a.row_scale)
    y = x @ w.T
    if epilogue.gate:
        pairs = y[:, :rows].reshape(m, -1, 2, 8)
        y = (_activated(epilogue.gate, pairs[:, :, 0]) * pairs[:, :, 1]).reshape(m, outputs)
    elif a.bias:
        y = y + memory(a.bias, (y.shape[1],), F32)
    y = y[:, :outputs]
    if epilogue.half:
        assert norm is not None
        bound = (norm.astype(np.float64) * a.c2 + a.c1) * norm + a.c0
        assert not (np.abs(y) > 1.001 * bound[:, None]).any(), "the bound of an f16 result does not hold"
        power = _power(bound)
        memory(a.out_scale, (m,), F32)[...] = power
        y = _as_half(y / power[:, None])
    target = _rows(memory, address, m, outputs, pitch, F16 if epilogue.half else F32)
    if a.add:
        target += y.astype(F32)
    else:
        target[...] = y


def _half_operand(memory: Memory, x: int, scale: int, m: int, cols: int) -> np.ndarray:
    return memory(x, (m, cols), F16).astype(np.float64) * memory(scale, (m, 1), F32)


def gemm_wgmma(memory: Memory, variant: Any, blocks: int, a: SimpleNamespace) -> None:
    assert a.x_map % 64 == a.out_map % 64 == 0
    x, m, cols, x_pitch = (int(v) for v in memory(a.x_map, (4,), np.uint64))
    out, out_m, outputs, pitch = (int(v) for v in memory(a.out_map, (4,), np.uint64))
    assert (m, x_pitch) == (out_m, 2 * cols)
    assert m == a.m <= a.token_tiles * variant.tokens
    assert (a.steps, a.slabs) == (-(-cols // STEP), -(-outputs * (2 if variant.epilogue.gate else 1) // SLAB))
    if variant.norm:
        assert (a.half, a.cols) == (x, cols)
        assert cols <= variant.norm
        _operands(memory, _normed(memory, a.hidden, a.norm_weight, m, cols, a.eps), a.half, a.token_scale, a.token_norm)
    norm = memory(a.token_norm, (m,), F32) if variant.epilogue.half else None
    _product(memory, variant, a, _half_operand(memory, x, a.token_scale, m, cols), norm, (out, outputs, pitch), cols)
    if a.split_tiles:
        assert not memory(a.workspace, (FLAG_BYTES,)).any(), "flags of a split product are not zero"
        memory(a.workspace + FLAG_BYTES, (variant.workspace(a.workers) - FLAG_BYTES,))[...] = 0xFF


def few_gemm(memory: Memory, variant: Any, blocks: int, a: SimpleNamespace) -> None:
    assert a.x_map % 64 == a.out_map % 64 == 0
    x, m, cols, x_pitch = (int(v) for v in memory(a.x_map, (4,), np.uint64))
    out, out_m, outputs, pitch = (int(v) for v in memory(a.out_map, (4,), np.uint64))
    assert (m, x_pitch) == (out_m, 2 * cols)
    assert m == a.m <= variant.tokens
    assert (256 * a.records, a.slabs) == (cols, -(-outputs * (2 if variant.epilogue.gate else 1) // SLAB))
    norm = memory(a.token_norm, (m,), F32) if variant.epilogue.half else None
    _product(memory, variant, a, _half_operand(memory, x, a.token_scale, m, cols), norm, (out, outputs, pitch), cols)
    assert variant.split == (a.parts > 1)
    if variant.split:
        assert blocks == a.sets * a.parts, "parts that wait for each other are not on the device at once"
        assert not memory(a.workspace, (FLAG_BYTES,)).any(), "counts of a product in parts are not zero"
        memory(a.workspace + FLAG_BYTES, (blocks * variant.groups * variant.partial,))[...] = 0xFF


def gemm_mma(memory: Memory, variant: Any, blocks: int, a: SimpleNamespace) -> None:
    norm = memory(a.token_norm, (a.m,), F32) if variant.epilogue.half else None
    x = _half_operand(memory, a.x, a.token_scale, a.m, a.cols)
    _product(memory, variant, a, x, norm, (a.out, a.outputs, a.pitch), a.cols)


def thin_gemm(memory: Memory, variant: Any, blocks: int, a: SimpleNamespace) -> None:
    if variant.norm:
        x = _normed(memory, a.x, a.x_scale, a.m, a.cols, a.eps)
        power = _power(np.abs(x).max(axis=1))[:, None]
        norm = (1.002 * np.sqrt((x * x).sum(axis=1))).astype(F32)
        x = _as_half(x / power).astype(np.float64) * power
    else:
        x = _half_operand(memory, a.x, a.x_scale, a.m, a.cols)
        norm = memory(a.x_norm, (a.m,), F32)
    _product(memory, variant, a, x, norm, (a.out, a.outputs, a.pitch), a.cols)
    if variant.other:
        assert 0 < a.bound < blocks
        names = {"weights": a.second_weights, "row_scale": a.second_scale, "bias": a.second_bias, "add": 0}
        second = SimpleNamespace(kind=variant.other, epilogue=variant.epilogue)
        _product(memory, second, SimpleNamespace(**names), x, norm, (a.second_out, a.second_outputs, a.pitch), a.cols)


# --- attention ---


def _turned(
    x: np.ndarray, weight: Any, whole: bool, norm_last: bool, eps: float, layout: Any, cos: Any, sin: Any
) -> np.ndarray:
    """QK norm and rotation of float64 [m, heads, head_dim], in either order; cos and sin [m, 1, pairs]."""
    if norm_last:
        turned = _turned(x, None, whole, False, eps, layout, cos, sin)
        return _turned(turned, weight, whole, False, eps, None, None, None)
    if weight is not None:
        axes = (1, 2) if whole else (2,)
        weight = weight.reshape(x.shape[1:]) if whole else weight
        x = x / np.sqrt((x * x).mean(axis=axes, keepdims=True) + eps) * weight
    if cos is None:
        return x
    pairs, out = cos.shape[-1], x.copy()
    first, second = np.s_[..., 0 : 2 * pairs : 2], np.s_[..., 1 : 2 * pairs : 2]
    if layout is RopeLayout.NEOX:
        first, second = np.s_[..., :pairs], np.s_[..., pairs : 2 * pairs]
    out[first], out[second] = x[first] * cos - x[second] * sin, x[first] * sin + x[second] * cos
    return out


def _angles(memory: Memory, a: SimpleNamespace, m: int, rot_dim: int) -> tuple[Any, Any]:
    if not rot_dim:
        return None, None
    return tuple(memory(address, (m, 1, rot_dim // 2), F32).astype(np.float64) for address in (a.cos, a.sin))


def _records(memory: Memory, table: int, count: int) -> list[tuple[slice, int, dict[str, int]]]:
    """(rows of the batch, position of the first, mirrors) of every sequence that has rows."""
    found, taken = [], set()
    for record in memory(table, (count,), SEQUENCE):
        first, rows, start = (int(record[name]) for name in ("first_row", "rows", "start_pos"))
        if rows:
            assert taken.isdisjoint(range(first, first + rows)), "two sequences have a row in common"
            taken |= set(range(first, first + rows))
            bases = {name: int(record[name]) for name in ("k_base", "v_base")}
            found.append((slice(first, first + rows), start, bases))
    assert found
    return found


def _row_of_rows(memory: Memory, table: int, count: int, first: int) -> int:
    """Where the float32 rows of the sequence whose first row is `first` are put."""
    records = memory(table, (count,), SEQUENCE)
    (record,) = records[(records["first_row"] == first) & (records["rows"] > 0)]
    return first + int(record["kv_row"])


def prepare(memory: Memory, variant: Any, blocks: int, a: SimpleNamespace) -> None:
    m, d = blocks // a.blocks_per_row, variant.head_dim
    records, pitch = _records(memory, a.table, a.sequences), a.source_pitch // 4
    heads, kv = a.n_heads, a.n_kv_heads
    assert all(rows.stop <= m for rows, _, _ in records)
    whole = memory(a.q_source, (m, pitch), F32).astype(np.float64)
    assert (a.k_source, a.v_source) == (a.q_source + 4 * heads * d, a.q_source + 4 * (heads + kv) * d)
    q, k, v = (part.reshape(m, -1, d) for part in np.split(whole, [heads * d, (heads + kv) * d], axis=1))
    norms = [None, None]
    if variant.norm:
        sizes = (heads * d, kv * d) if variant.norm == "whole" else (d, d)
        norms = [memory(at, (n,), F32) for at, n in zip((a.q_norm, a.k_norm), sizes, strict=True)]
    cos, sin = _angles(memory, a, m, variant.rot_dim if variant.layout is not None else 0)
    rest = (variant.norm == "whole", variant.norm_last, a.eps, variant.layout, cos, sin)
    q, k = _turned(q, norms[0], *rest), _turned(k, norms[1], *rest)
    memory(a.q, (m, heads, variant.pitch), F16)[..., :d] = _as_half(q * a.q_inverse)
    for rows, _, _ in records if a.k_rows else ():
        place = 4 * _row_of_rows(memory, a.table, a.sequences, rows.start) * kv * d
        memory(a.k_rows + place, k[rows].shape, F32)[...] = k[rows]
        memory(a.v_rows + place, v[rows].shape, F32)[...] = v[rows]
    for rows, start, bases in records:
        at, shape = 2 * kv * variant.pitch * start, (rows.stop - rows.start, kv, variant.pitch)
        mirrors = [memory(base + at, shape, F16)[..., :d] for base in bases.values()]
        _store_kv(k[rows] * a.k_inverse, v[rows] * a.v_inverse, *mirrors)


def _attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    start: int,
    window: int,
    score: Callable[[np.ndarray], np.ndarray],
    sinks: np.ndarray | None,
) -> np.ndarray:
    """Weights are powers of two of `score(q . k)`; a sink is a logit of each head that has no value."""
    m, heads, _ = q.shape
    i, j = start + np.arange(m)[:, None], np.arange(len(k))
    visible = (j <= i) & ((i - j < window) | (window == 0))
    out = np.empty((m, heads, v.shape[2]))
    for head in range(heads):
        shared = head // (heads // k.shape[1])
        scores = np.where(visible, score(q[:, head] @ k[:, shared].T), -np.inf)
        if sinks is not None:
            scores = np.concatenate([scores, np.full((m, 1), sinks[head] * LOG2E)], axis=1)
        likely = np.exp2(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = (likely / likely.sum(axis=1, keepdims=True))[:, : len(k)] @ v[:, shared]
    return out


def attention(memory: Memory, variant: Any, blocks: int, a: SimpleNamespace) -> None:
    d, heads, kv = variant.head_dim, a.n_heads, a.n_kv_heads
    pitch = -(-d // 8) * 8
    assert a.group == heads // kv
    records, mapped = _records(memory, a.table, a.sequences), not isinstance(variant, MmaLayout)
    if mapped:
        assert not memory(a.workspace, (WORKSPACE_BYTES,)).any(), "the attention's counters are not zero"
        assert a.maps % 64 == 0
        maps = memory(a.maps, (a.sequences, 2, 16), np.uint64)
        used = [number for number, record in enumerate(memory(a.table, (a.sequences,), SEQUENCE)) if record["rows"]]

    def score(product: np.ndarray) -> np.ndarray:
        return a.factor * (np.tanh(product * a.inner / (2 * LOG2E)) if variant.capped else product)

    sinks = memory(a.sinks, (heads,), F32) if a.sinks else None
    for number, (rows, start, bases) in enumerate(records):
        m = rows.stop - rows.start
        if mapped:
            pair = maps[used[number]]
            assert pair[:, 0].tolist() == list(bases.values()), "the maps are those of other mirrors"
            assert (pair[:, 1] >= start + m).all(), "the mirror is too short"
            reach = min(int(pair[0, 1]), -(-(start + m) // variant.keys) * variant.keys)
            box = memory(bases["v_base"], (reach, kv, pitch), F16)
            assert np.isfinite(box).all(), "a box of V holds what is no number: times zero it spoils a sum"
        k, v = (memory(base, (start + m, kv, pitch), F16)[..., :d].astype(np.float64) for base in bases.values())
        q = memory(a.q + 2 * rows.start * heads * pitch, (m, heads, pitch), F16)[..., :d].astype(np.float64)
        values = _attend(q, k, v, start, a.window if variant.windowed else 0, score, sinks)
        memory(a.out + 2 * rows.start * heads * d, values.shape, F16)[...] = _as_half(values)


def decode_attention(memory: Memory, variant: Any, blocks: int, a: SimpleNamespace) -> None:
    tasks = a.tasks
    sequences = tasks // (a.tiles * a.n_kv_heads)
    records = _records(memory, a.table, sequences)
    for rows, start, bases in records:
        assert (rows.stop - rows.start) * a.n_heads // a.n_kv_heads <= a.tiles * variant.queries, "rows without a tile"
        _decode_sequence(memory, variant, a, sequences, rows, start, list(bases.values()))
    counters = memory(a.workspace, (a.sums_at,))
    assert not counters.any(), "the counters of a decode attention are not zero"
    memory(a.workspace + a.sums_at, (a.states_at + tasks * a.parts * variant.queries * 8 - a.sums_at,))[...] = 0xFF


def _decode_sequence(
    memory: Memory, variant: Any, a: SimpleNamespace, sequences: int, rows: slice, start: int, bases: list[int]
) -> None:
    d, m, heads, kv = variant.head_dim, rows.stop - rows.start, a.n_heads, a.n_kv_heads
    pairs = variant.rot_dim // 2
    whole = memory(a.qkv + 4 * rows.start * (heads + 2 * kv) * d, (m, heads + 2 * kv, d), F32).astype(np.float64)
    own = SimpleNamespace(cos=a.cos + 4 * rows.start * pairs, sin=a.sin + 4 * rows.start * pairs)
    cos, sin = _angles(memory, own, m, variant.rot_dim)
    rest = (False, variant.norm_last, a.eps, variant.layout, cos, sin)
    q = _turned(whole[:, :heads], memory(a.q_norm, (d,), F32) if variant.q_norm else None, *rest)
    q = _as_half(q).astype(np.float64)
    k = _turned(whole[:, heads : heads + kv], memory(a.k_norm, (d,), F32) if variant.k_norm else None, *rest)
    v = whole[:, heads + kv :]
    if a.k_rows:
        place = 4 * _row_of_rows(memory, a.table, sequences, rows.start) * kv * d
        memory(a.k_rows + place, (m, kv, d), F32)[...] = k
        memory(a.v_rows + place, (m, kv, d), F32)[...] = v
    mirrors = [memory(base, (start + m, kv, d), F16) for base in bases]
    _store_kv(k * a.k_factor, v * a.v_factor, *(mirror[start:] for mirror in mirrors))

    def score(product: np.ndarray) -> np.ndarray:
        return a.cap * np.tanh(product * a.scale) if variant.capped else product * a.scale

    sinks = memory(a.sinks, (heads,), F32) if a.sinks else None
    keys, held = (mirror.astype(np.float64) for mirror in mirrors)
    values = _attend(q, keys, held, start, a.window, score, sinks)
    memory(a.out + 2 * rows.start * heads * d, values.shape, F16)[...] = _as_half(values)
