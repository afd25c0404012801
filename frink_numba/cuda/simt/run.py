"""The layer loop: a hidden batch goes through a run of resident layers without leaving the device.

Three streams: one computes, one takes finished K/V rows down while the next layer runs, one brings prefix rows up
before their layer needs them. Two slots of K/V memory alternate between layers; events order the streams, and the
calling thread waits once, at the end (R8).

    compute    norm q k v rope | attention o ffn | norm q k v rope | ...
    downloads                    K V rows ------>                    K V rows ---->
    uploads    prefix 0, 1 ->            prefix 2 ->
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from frink_numba.cuda.arena import Carver, float_bytes
from frink_numba.cuda.body import Rows
from frink_numba.cuda.runtime import Runtime
from frink_numba.cuda.simt.launchers import Launchers
from frink_numba.cuda.simt.scratch import ScratchShape, Views
from frink_numba.cuda.simt.weights import SimtLayer
from frink_numba.cuda.traffic import Traffic

if TYPE_CHECKING:
    from frink_numba.cuda.device import Workspace


def run_layers(
    runtime: Runtime,
    launchers: Launchers,
    work: Workspace,
    layers: Sequence[SimtLayer],
    hidden: np.ndarray,
    prefixes: Sequence[Rows],
    start_pos: int,
    block: Any,
    traffic: Traffic,
) -> tuple[np.ndarray, list[Rows]]:
    """Take `hidden` [batch, hidden_dim] through `layers`; shapes are checked already, the device is entered.

    `prefixes`: K and V rows [start_pos, n_kv_heads, head_dim] of each layer, looked at only when start_pos > 0.
    `block`: scratch of at least `ScratchShape.nbytes`. Answers the new hidden batch and each layer's K/V rows, in
    page-locked memory that is theirs. Raises what runtime and launchers raise, once nothing runs on the device any
    more.
    """
    run = _Run(runtime, launchers, work, layers, hidden.shape[0], start_pos, block, traffic)
    try:
        run.start(hidden)
        for index, layer in enumerate(layers):
            if start_pos:
                run.bring_prefix(index, layer, prefixes[index])
            run.attention(index, layer)
            run.feed_forward(layer)
        return run.finish()
    except BaseException:  # a keyboard interrupt too: memory that the device still writes to must not be reused
        runtime.drain()
        raise


class _Run:
    """One run's arrays, and the steps of a layer over them."""

    def __init__(
        self,
        runtime: Runtime,
        launchers: Launchers,
        work: Workspace,
        layers: Sequence[SimtLayer],
        batch: int,
        start_pos: int,
        block: Any,
        traffic: Traffic,
    ) -> None:
        self._runtime = runtime
        self._launch = launchers
        self._work = work
        self._traffic = traffic
        self._start_pos = start_pos
        self._kept: list[Any] = []  # sources of copies that may still be under way

        shapes = [layer.shape for layer in layers]
        keys = _rope_keys(layers)
        scratch = ScratchShape(shapes, len(keys))
        carver = Carver(block)
        parts = {name: carver.array((elements,)) for name, elements in scratch.parts(batch, start_pos).items()}
        self._n_slots = scratch.slots
        self._views = {shape: Views(parts, shape, batch, start_pos, scratch.slots) for shape in dict.fromkeys(shapes)}
        self._hidden = parts["hidden"].reshape(batch, scratch.hidden)
        self._tables = {}
        for table, (key, layer) in enumerate(keys.items()):
            pairs = layer.shape.rope_pairs
            cos, sin = (parts[f"{name}{table}"][: batch * pairs].reshape(batch, pairs) for name in ("cos", "sin"))
            self._tables[key] = (layer, cos, sin)

        # Two loans: who keeps the hidden batch does not keep the rows, which are pushed and dropped.
        lend = self._work.pinned.lend
        self._host_hidden = Carver(lend(float_bytes(batch * scratch.hidden))).array((batch, scratch.hidden))
        rows = Carver(lend(float_bytes(*(batch * s.kv_width for s in shapes for _ in "kv"))))
        self._host_rows = [
            (rows.array((batch, s.n_kv_heads, s.head_dim)), rows.array((batch, s.n_kv_heads, s.head_dim)))
            for s in shapes
        ]

    def start(self, hidden: np.ndarray) -> None:
        """The hidden batch goes up, and the tables of cosines and sines are made."""
        np.copyto(self._host_hidden, hidden)
        stream = self._work.compute
        self._runtime.upload(self._hidden, self._host_hidden, stream)
        self._traffic.hidden_up += self._host_hidden.nbytes
        for layer, cos, sin in self._tables.values():
            frequencies, scale = layer.vectors["inverse_frequencies"], layer.magnitude_scale
            self._launch.rope_table(frequencies, scale, self._start_pos, cos, sin, stream)

    def bring_prefix(self, index: int, layer: SimtLayer, prefix: Rows) -> None:
        """The host cache's rows before the batch go up into the layer's slot (R11)."""
        work, number = self._work, index % self._n_slots
        slot = self._views[layer.shape].slots[number]
        if index >= self._n_slots:
            # The layer that had the slot before reads its prefix until its attention is done; its new rows, which lie
            # elsewhere when its heads are others than this layer's, until they are down.
            self._runtime.wait(work.attended[number], work.uploads)
            self._runtime.wait(work.rows_down[number], work.uploads)
        for target, rows in ((slot.key_prefix, prefix[0]), (slot.value_prefix, prefix[1])):
            source = np.ascontiguousarray(rows, dtype=np.float32)
            self._kept.append(source)
            self._runtime.upload(target, source, work.uploads)
            self._traffic.prefix_up += source.nbytes
        self._runtime.record(work.prefix_up[number], work.uploads)

    def attention(self, index: int, layer: SimtLayer) -> None:
        """hidden += post_attn_norm(attention(attn_norm(hidden))); the layer's K/V rows start their way down."""
        launch, work, stream = self._launch, self._work, self._work.compute
        spec, eps = layer.layer.attention, layer.layer.norm_eps
        views, number = self._views[layer.shape], index % self._n_slots
        slot = views.slots[number]
        weights, vectors = layer.matrices, layer.vectors

        launch.rms_norm(self._hidden, vectors["attn_norm"], eps, views.normed, stream)
        launch.quantized_matmul(views.normed, weights["q"], views.queries, stream)
        if index >= self._n_slots:  # the rows of the layer that had the slot before must be down
            self._runtime.wait(work.rows_down[number], stream)
        launch.quantized_matmul(views.normed, weights["k"], slot.key_rows, stream)
        launch.quantized_matmul(views.normed, weights["v"], slot.value_rows, stream)
        for name, rows in (("q_bias", views.queries), ("k_bias", slot.key_rows), ("v_bias", slot.value_rows)):
            if name in vectors:
                launch.add_bias(rows, vectors[name], stream)
        self._qk_norm(vectors.get("q_norm"), spec.head_dim, views.queries, views.query_head_rows, eps)
        self._qk_norm(vectors.get("k_norm"), spec.head_dim, slot.key_rows, views.new_key_head_rows[number], eps)
        if spec.rope is not None:
            _, cos, sin = self._tables[layer.rope_key]
            launch.rope(views.query_heads, cos, sin, spec.rope.layout, stream)
            launch.rope(slot.new_keys, cos, sin, spec.rope.layout, stream)

        self._runtime.record(work.rows_ready[number], stream)
        self._runtime.wait(work.rows_ready[number], work.downloads)
        for target, source in zip(self._host_rows[index], (slot.new_keys, slot.new_values), strict=True):
            self._runtime.download(target, source, work.downloads)
            self._traffic.kv_down += target.nbytes
        self._runtime.record(work.rows_down[number], work.downloads)

        if self._start_pos:
            self._runtime.wait(work.prefix_up[number], stream)
        launch.causal_attention(
            views.query_heads,
            slot.keys,
            slot.values,
            views.attended_heads,
            self._start_pos,
            1.0 / math.sqrt(spec.head_dim),
            spec.window,
            spec.softcap,
            stream,
        )
        if self._start_pos:
            self._runtime.record(work.attended[number], stream)
        launch.quantized_matmul(views.attended, weights["o"], views.projected, stream)
        self._add(vectors.get("post_attn_norm"), views.projected, eps)

    def feed_forward(self, layer: SimtLayer) -> None:
        """hidden += post_ffn_norm(down(silu(gate x) * (up x))) with x = ffn_norm(hidden)."""
        launch, stream = self._launch, self._work.compute
        views, weights, vectors, eps = self._views[layer.shape], layer.matrices, layer.vectors, layer.layer.norm_eps
        launch.rms_norm(self._hidden, vectors["ffn_norm"], eps, views.normed, stream)
        launch.quantized_matmul(views.normed, weights["gate"], views.gate, stream)
        launch.quantized_matmul(views.normed, weights["up"], views.up, stream)
        launch.swiglu(views.gate, views.up, views.gate, stream)
        launch.quantized_matmul(views.gate, weights["down"], views.projected, stream)
        self._add(vectors.get("post_ffn_norm"), views.projected, eps)

    def finish(self) -> tuple[np.ndarray, list[Rows]]:
        """The hidden batch comes down behind all K/V rows; the only wait of the run."""
        work, stream = self._work, self._work.compute
        for number in range(self._n_slots):
            self._runtime.wait(work.rows_down[number], stream)
        self._runtime.download(self._host_hidden, self._hidden, stream)
        self._traffic.hidden_down += self._host_hidden.nbytes
        self._runtime.synchronize(stream)
        self._traffic.synchronizations += 1
        self._traffic.runs += 1
        return self._host_hidden, self._host_rows

    def _qk_norm(self, weight: Any, head_dim: int, whole: Any, by_head: Any, eps: float) -> None:
        """R14: a weight as long as a head norms every head, a longer one the whole vector."""
        if weight is not None:
            rows = by_head if weight.shape[0] == head_dim else whole
            self._launch.rms_norm(rows, weight, eps, rows, self._work.compute)

    def _add(self, post_norm: Any, projected: Any, eps: float) -> None:
        if post_norm is not None:
            self._launch.rms_norm(projected, post_norm, eps, projected, self._work.compute)
        self._launch.residual_add(self._hidden, projected, self._work.compute)


def _rope_keys(layers: Sequence[SimtLayer]) -> dict[Any, SimtLayer]:
    """The distinct tables of cosines and sines, each with a layer that needs it."""
    return {layer.rope_key: layer for layer in layers if layer.rope_key}
