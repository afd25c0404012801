"""The tensor-core body: f16 operands, float32 sums and hidden stream, K/V mirrored on the device.

One stream computes, another takes finished K/V rows down while the next layers run; events order the two, and the
calling thread waits once, at the end (R8). Rows go straight into the host's cache where its memory is page-locked.
"""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from frink_numba.backend import Edges
from frink_numba.cuda.arena import Carver, float_bytes
from frink_numba.cuda.body import WHOLE, Answer, Ends, KvSource
from frink_numba.cuda.ranges import Ranges, open_ranges
from frink_numba.cuda.runtime import Runtime
from frink_numba.cuda.shapes import LayerShape
from frink_numba.cuda.tensor.edges import TensorEdges, decline_edges, edges_bytes, upload_edges
from frink_numba.cuda.tensor.lifts import lifted
from frink_numba.cuda.tensor.mirror import Mirror, Mirrors
from frink_numba.cuda.tensor.pack_ahead import PackAhead
from frink_numba.cuda.tensor.program import Head, Program, Segment
from frink_numba.cuda.tensor.scratch import ATTENTION_WORKSPACE, COUNTERS, STAGED_ROWS, TensorScratch, workspace_bytes
from frink_numba.cuda.tensor.weights import TensorLayer, decline, layer_bytes, upload_layer
from frink_numba.cuda.traffic import Traffic
from frink_numba.errors import DeviceError
from frink_numba.kernels.fused_attention import head_pitch
from frink_numba.layer import Layer

if TYPE_CHECKING:
    from frink_numba.cuda.device import Workspace

_PROGRAMS = 8  # kept
_MOST_PITCH = 1 << 31  # bytes from row to row of a copy, that the driver takes


class TensorBody:
    """See `frink_numba.cuda.body.Body`. `kernels`: a TensorKernels."""

    def __init__(self, runtime: Runtime, kernels: Any, multiprocessors: int) -> None:
        self.runtime = runtime
        self.kernels = kernels
        self._workspace_bytes = workspace_bytes(multiprocessors)
        self._mirrors = Mirrors(runtime)
        self._ranges = open_ranges()
        self._ahead: PackAhead | None = None  # while layers go up
        self._programs: OrderedDict[Any, Program] = OrderedDict()
        self._zeroed: weakref.ref[Any] | None = None  # the scratch block whose counters are known to be zero

    least_batch = 1
    chunk_size = 2048
    mirrors_rows = True

    @property
    def tier(self) -> str:
        tier: str = self.kernels.tier
        return tier

    @property
    def invariant(self) -> bool:
        return bool(self.kernels.invariant)

    def judged(self, layer: Layer) -> Layer:
        return lifted(layer)

    def why_not(self, layer: Layer) -> str | None:
        return decline(layer)

    def layer_bytes(self, layer: Layer) -> int:
        return layer_bytes(layer)

    def scratch(self, layers: Sequence[Layer]) -> TensorScratch:
        return TensorScratch.of(layers, self._workspace_bytes)

    def mirror_bytes(self, layer: Layer, cache: Any, positions: int) -> int:
        return self._mirrors.needed(LayerShape.of(layer), cache, positions)

    def room(self, cache: Any) -> int:
        return self._mirrors.room(cache)

    def mirror_held(self, cache: Any) -> int:
        return self._mirrors.held(cache)

    @property
    def mirrored_bytes(self) -> int:
        return self._mirrors.nbytes

    @property
    def changes(self) -> int:
        return self._mirrors.changes

    def forget(self, nbytes: int, keep: Sequence[Any] = ()) -> None:
        self._mirrors.forget(nbytes, keep)

    def forget_unused(self) -> None:
        self._mirrors.forget_unused()

    def why_not_edges(self, edges: Edges) -> str | None:
        return decline_edges(edges)

    def edges_bytes(self, edges: Edges) -> int:
        return edges_bytes(edges)

    def upload_edges(self, edges: Edges, stream: Any, traffic: Traffic) -> TensorEdges:
        return upload_edges(self.runtime, edges, stream, traffic)

    def dropped(self) -> None:
        self._programs.clear()
        self._zeroed = None

    @contextmanager
    def preparing(self, layers: Sequence[Layer]) -> Iterator[None]:
        if len(layers) < 2:
            yield
            return
        self._ahead = ahead = PackAhead(layers)
        try:
            yield
        finally:
            self._ahead = None
            ahead.close()

    def upload(self, layer: Layer, stream: Any, traffic: Traffic) -> TensorLayer:
        packed = None if self._ahead is None else self._ahead.take(layer)
        return upload_layer(self.runtime, layer, stream, traffic, packed)

    def run(
        self,
        work: Workspace,
        layers: Sequence[TensorLayer],
        hidden: np.ndarray | None,
        sources: Sequence[KvSource],
        start_pos: int,
        block: Any,
        traffic: Traffic,
        ends: Ends = WHOLE,
    ) -> Answer:
        batch = len(ends.tokens) if hidden is None and ends.tokens is not None else len(_there(hidden))
        run, mirrors = _Run(self.runtime, work, traffic, self._ranges), list[Mirror]()
        try:
            zeroed, self._zeroed = self._zeroed, None
            total = start_pos + batch
            shapes, caches = [layer.shape for layer in layers], [source.cache for source in sources]
            mirrors = self._mirrors.take(shapes, caches, total, work.compute)
            program = self._program(layers, mirrors, batch, self.runtime.address(block), ends)
            if zeroed is None or zeroed() is not block:
                self.runtime.zero(program.counters, ATTENTION_WORKSPACE + COUNTERS, work.compute)
            for layer, mirror, source in zip(layers, mirrors, sources, strict=True):
                self._complete(layer, mirror, source, start_pos, program.staging, work, traffic)
            answer = run.go(program, layers, mirrors, hidden, sources, start_pos, ends)
            self._zeroed = weakref.ref(block)
            return answer
        except BaseException:  # a keyboard interrupt too: memory that the device still writes to must not be reused
            for mirror in mirrors:
                mirror.rows, mirror.lease = 0, None
            self.runtime.drain()
            raise

    def _program(
        self, layers: Sequence[TensorLayer], mirrors: Sequence[Mirror], m: int, base: int, ends: Ends
    ) -> Program:
        what = (m, base, None if ends.edges is None else ends.edges.serial, ends.tokens is None, ends.logits)
        key = (what, *[x.serial for x in layers], *[x.k for x in mirrors], *[x.capacity for x in mirrors])
        program = self._programs.get(key)
        if program is None:
            scratch = self.scratch([layer.layer for layer in layers])
            program = Program(
                self.kernels, scratch, layers, mirrors, m, base, ends.edges, ends.tokens is not None, ends.logits
            )
            self._programs[key] = program
            if len(self._programs) > _PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return program

    def _complete(
        self,
        layer: TensorLayer,
        mirror: Mirror,
        source: KvSource,
        start_pos: int,
        staging: int,
        work: Workspace,
        traffic: Traffic,
    ) -> None:
        """Bring up the rows before the batch that the mirror does not hold (R11)."""
        if self.invariant and max(layer.scales[1:]) > 1 and source.prefix[0].dtype != np.float32:
            # Within a step they are f16 after the division, behind it f16 before: two roundings, not one.
            raise DeviceError("FRINK_INVARIANT=1 needs a cache of float32: this layer's K/V rows are scaled for f16")
        known = min(start_pos, mirror.known_rows(source.cache))
        mirror.rows = start_pos
        if known == start_pos:
            return
        shape = layer.shape
        width, pitch = shape.kv_width, head_pitch(shape.head_dim)
        stream, handle = work.compute, self.runtime.handle(work.compute)
        for first in range(known, start_pos, STAGED_ROWS):
            last = min(start_pos, first + STAGED_ROWS)
            n = last - first
            addresses = (staging, staging + 4 * n * width)
            for address, rows in zip(addresses, source.prefix, strict=True):
                part = np.ascontiguousarray(rows[first:last], np.float32)
                self.runtime.send(address, part, stream)
                traffic.prefix_up += part.nbytes
            offset = 2 * first * shape.n_kv_heads * pitch
            targets = (mirror.k + offset, mirror.v + offset)
            scales = layer.scales[1:]
            launch = self.kernels.mirror_rows(n, shape.n_kv_heads, shape.head_dim, pitch, addresses, targets, scales)
            launch(handle)


def _there(array: np.ndarray | None) -> np.ndarray:
    assert array is not None  # asked for only where it was made
    return array


class _Target(NamedTuple):
    """Where a layer's new rows go, and the addresses of that memory."""

    k: np.ndarray
    v: np.ndarray
    k_address: int
    v_address: int


class _Run:
    """One run: the hidden batch up, the launches, K/V rows and the hidden batch down."""

    def __init__(self, runtime: Runtime, work: Workspace, traffic: Traffic, ranges: Ranges | None) -> None:
        self._runtime, self._work, self._traffic, self._ranges = runtime, work, traffic, ranges

    def go(
        self,
        program: Program,
        layers: Sequence[TensorLayer],
        mirrors: Sequence[Mirror],
        hidden: np.ndarray | None,
        sources: Sequence[KvSource],
        start_pos: int,
        ends: Ends,
    ) -> Answer:
        runtime, work, traffic = self._runtime, self._work, self._traffic
        stream, lend = work.compute, work.pinned.lend
        shape = (program.rows, layers[0].shape.hidden)
        image = lend(program.image.nbytes)
        np.copyto(image, program.step(start_pos, ends.tokens))
        answer = logits = None
        if ends.hidden or hidden is not None:
            answer = Carver(lend(float_bytes(shape[0] * shape[1]))).array(shape)

        runtime.send(program.step_address, image, stream)
        if hidden is not None:
            if not work.pinned.owns(hidden):
                np.copyto(_there(answer), hidden)
                hidden = answer
            runtime.send(program.hidden, _there(hidden), stream)
            traffic.hidden_up += _there(hidden).nbytes
        targets: list[_Target] = []
        for number, segment in enumerate(program.segments):
            slot = number % 2
            if number >= 2:  # the rows of the segment that was here before must be down
                runtime.wait(work.rows_down[slot], stream)
            self._launch(segment, ends.first)
            if not number:  # while the device is at work
                targets = self._targets(layers, mirrors, sources, program.rows)
                if ends.logits:
                    vocabulary = ends.edges.output.rows
                    logits = Carver(lend(float_bytes(ends.logits * vocabulary))).array((ends.logits, vocabulary))
            runtime.record(work.rows_ready[slot], stream)
            runtime.wait(work.rows_ready[slot], work.downloads)
            self._fetch(targets[segment.first : segment.last], segment.rows)
            runtime.record(work.rows_down[slot], work.downloads)
        for slot in range(min(2, len(program.segments))):
            runtime.wait(work.rows_down[slot], stream)
        for head in program.heads:
            self._launch(head, ends.first)
            part = _there(logits)[head.first : head.last]
            runtime.fetch(part, ends.edges.logits, stream)
            traffic.logits_down += part.nbytes
        if ends.hidden:
            runtime.fetch(_there(answer), program.hidden, stream)
            traffic.hidden_down += _there(answer).nbytes
        runtime.synchronize(stream)
        traffic.synchronizations += 1
        traffic.runs += 1
        rows = [(target.k, target.v) for target in targets]
        return Answer(answer if ends.hidden else None, rows, logits)

    def _launch(self, part: Segment | Head, first: int) -> None:
        """All launches of a part as one, or one by one where somebody watches."""
        stream = self._work.compute
        if self._ranges is not None:
            self._ranges.launch(part.launches, self._runtime.handle(stream), first)
            return
        if part.replay is None:
            part.replay = self._runtime.graph(stream, part.launches)
        part.replay()

    def _fetch(self, targets: Sequence[_Target], address: int) -> None:
        """The rows of a segment come down: in one copy where the targets lie at equal distances in one block."""
        nbytes, block = targets[0].k.nbytes, targets[0].k.base
        places = [place for target in targets for place in (target.k_address, target.v_address)]
        alike = all(
            target.k.nbytes == nbytes == target.v.nbytes and target.k.base is block and target.v.base is block
            for target in targets
        )
        pitch = places[1] - places[0]
        even = nbytes <= pitch < _MOST_PITCH
        if alike and even and places == list(range(places[0], places[0] + pitch * len(places), pitch)):
            self._traffic.kv_down += nbytes * len(places)
            self._runtime.fetch_strided(targets[0].k, pitch, len(places), address, self._work.downloads)
            return
        for target in targets:
            for rows in (target.k, target.v):
                self._traffic.kv_down += rows.nbytes
                self._runtime.fetch(rows, address, self._work.downloads)
                address += rows.nbytes

    def _targets(
        self, layers: Sequence[TensorLayer], mirrors: Sequence[Mirror], sources: Sequence[KvSource], batch: int
    ) -> list[_Target]:
        """Where each layer's new rows go: the cache's tail if the device can write there, else memory of the run."""
        targets: list[_Target | None] = []
        for mirror, source in zip(mirrors, sources, strict=True):
            lend = getattr(source.cache, "lend", None)
            lease = lend(batch) if lend is not None else None
            if lease is not None and not self._writable(mirror, lease):
                lease = None
            mirror.lease = lease
            targets.append(None if lease is None else _Target(lease.k, lease.v, lease.k_address, lease.v_address))
        missing = [layer.shape for layer, target in zip(layers, targets, strict=True) if target is None]
        if not missing:
            return [target for target in targets if target is not None]
        lent = self._work.pinned.lend(float_bytes(*(batch * shape.kv_width for shape in missing for _ in "kv")))
        carver, out = Carver(lent), []
        for layer, target in zip(layers, targets, strict=True):
            if target is None:
                shape = (batch, layer.shape.n_kv_heads, layer.shape.head_dim)
                k, v = carver.array(shape), carver.array(shape)
                target = _Target(k, v, k.ctypes.data, v.ctypes.data)
            out.append(target)
        return out

    def _writable(self, mirror: Mirror, lease: Any) -> bool:
        """Whether the device can copy rows straight into a lease: float32 in page-locked memory."""
        owners = (lease.k.base, lease.v.base)
        if mirror.owners is not None and all(map(operator.is_, mirror.owners, owners)):
            return True
        pinned = self._work.pinned
        fits = lease.k.dtype == np.float32 and pinned.owns(lease.k) and pinned.owns(lease.v)
        mirror.owners = owners if fits and all(owner is not None for owner in owners) else None
        return fits
