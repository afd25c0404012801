"""Several sequences through the host's layers at once: one product for all their columns, attention for each alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from frink_numba.backend import LayerCache, Run, Step
from frink_numba.host.body import Span, feed_forward, group_attention
from frink_numba.host.layer_kv import LayerKV
from frink_numba.host.prepare import PreparedLayer
from frink_numba.host.rms_norm import rms_norm
from frink_numba.host.rope import RopeTable, rope_table_of
from frink_numba.host.scratch import Scratch
from frink_numba.host.thin_products import FEW, available
from frink_numba.host.weights import WeightStore
from frink_numba.host.workspace import workspace

MOST_LOGITS = 64  # rows
_FEW_TIMES = 3
MOST_ROWS = 512
"""Of a group: more rows gain nothing from each other."""


def pieces(steps: Sequence[Step]) -> list[Sequence[Step]]:
    """The steps in groups that suit the products: those of a few rows read the quantized bytes, a few at a time.

    That takes fewer bytes from memory than one product of float32 copies, as long as it is not many times.
    """
    rows = sum(step.batch for step in steps)
    if rows > _FEW_TIMES * FEW or max(step.batch for step in steps) > 1 or not available():
        return [steps]
    return [steps[first : first + FEW] for first in range(0, len(steps), FEW)]


def run_group(
    layers: Sequence[PreparedLayer], steps: Sequence[Step], store: WeightStore, scratch: Scratch
) -> list[Run]:
    """Every step's run over all `layers`, which are dense. Rows of caches lie behind their last one, as in `run`."""
    ends = np.cumsum([step.batch for step in steps])
    columns = [slice(int(end) - step.batch, int(end)) for end, step in zip(ends, steps, strict=True)]
    x = np.concatenate([step.hidden for step in steps if step.hidden is not None]).T.copy(order="C")
    positions = np.concatenate([np.arange(step.start_pos, step.start_pos + step.batch) for step in steps])
    tables: dict[int, RopeTable] = {}
    kv_rows: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in steps]
    for number, layer in enumerate(layers):
        work = workspace(layer.shape, layer.shape_id, x.shape[1], scratch)
        table = None
        if layer.rope is not None:
            table = tables.get(layer.rope_id)
            if table is None:
                table = tables[layer.rope_id] = rope_table_of(layer.rope, positions)
        spans = []
        for step, own, rows in zip(steps, columns, kv_rows, strict=True):
            keys, values, *tails = _room(step.caches[number], step, layer)
            spans.append(Span(own, keys, values, step.start_pos + step.batch - len(keys), step.start_pos))
            if step.keep:
                rows.append((tails[0], tails[1]))
        group_attention(layer, x, spans, table, work, store, scratch)
        feed_forward(layer, x, work, store, scratch)
    logits = _logits(x, steps, columns, store, scratch)
    return [
        Run(np.ascontiguousarray(x[:, own].T), [(_float32(k), _float32(v)) for k, v in rows], logits=last)
        for own, rows, last in zip(columns, kv_rows, logits, strict=True)
    ]


def _logits(
    x: np.ndarray, steps: Sequence[Step], columns: Sequence[slice], store: WeightStore, scratch: Scratch
) -> list[np.ndarray | None]:
    """The logits that each step wants, where they are few: the output matrix is as large as many layers."""
    counts = [step.logits for step in steps]
    edges = steps[0].edges
    if edges is None or not 0 < sum(counts) <= MOST_LOGITS or any(step.edges is not edges for step in steps):
        return [None] * len(steps)
    hidden = np.concatenate(
        [x[:, own.stop - count : own.stop] for own, count in zip(columns, counts, strict=True)], axis=1
    )
    rms_norm(hidden, edges.output_norm[:, None], edges.norm_eps, hidden, scratch)
    made = np.empty((hidden.shape[1], edges.output.rows), np.float32)
    store.matmul(np.ascontiguousarray(hidden.T), edges.output, out=made)
    ends = np.cumsum(counts)
    return [made[end - count : end] if count else None for end, count in zip(ends, counts, strict=True)]


def _room(cache: LayerCache, step: Step, layer: PreparedLayer) -> tuple[np.ndarray, ...]:
    """K and V with room for the step's rows at their end, and that room in the cache; nobody else has the arrays."""
    if not step.keep:
        shape = (step.batch, layer.shape.n_kv_heads, layer.shape.head_dim)
        return np.empty(shape, np.float32), np.empty(shape, np.float32)
    assert isinstance(cache, LayerKV)  # others are declined
    return cache.with_tail(step.batch)


def _float32(rows: np.ndarray) -> np.ndarray:
    return rows if rows.dtype == np.float32 else rows.astype(np.float32)
