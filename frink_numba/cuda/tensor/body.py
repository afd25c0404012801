"""The tensor-core body: f16 operands, float32 sums and hidden stream, K/V mirrored on the device.

One stream computes, another takes finished K/V rows down while the next layers run; events order the two, and the
calling thread waits once, at the end (R8). Rows go straight into the host's cache where its memory is page-locked.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from frink_numba.backend import Edges
from frink_numba.cuda.body import WHOLE, Answer, Ends, KvSource, Member, Share
from frink_numba.cuda.ranges import open_ranges
from frink_numba.cuda.runtime import Runtime
from frink_numba.cuda.shapes import LayerShape
from frink_numba.cuda.tensor.ahead import go_ahead
from frink_numba.cuda.tensor.cuts import Block
from frink_numba.cuda.tensor.edges import TensorEdges, decline_edges, edges_bytes, logits_rows, upload_edges
from frink_numba.cuda.tensor.few_rows import FewRows
from frink_numba.cuda.tensor.group import GroupRun
from frink_numba.cuda.tensor.group_program import MOST_SEQUENCES, GroupProgram, GroupScratch, GroupShape
from frink_numba.cuda.tensor.lifts import lifted
from frink_numba.cuda.tensor.mirror import Mirror, Mirrors
from frink_numba.cuda.tensor.pack_ahead import PackAhead
from frink_numba.cuda.tensor.program import Program
from frink_numba.cuda.tensor.row_targets import LayerTargets, RowTargets, WholeTargets
from frink_numba.cuda.tensor.run import BlockRun, Part
from frink_numba.cuda.tensor.scratch import (
    AHEAD_ROWS,
    ATTENTION_WORKSPACE,
    CHUNK_ROWS,
    COUNTERS,
    STAGED_ROWS,
    TensorScratch,
)
from frink_numba.cuda.tensor.step_graph import StepGraphs
from frink_numba.cuda.tensor.weights import TensorLayer, decline, layer_bytes, upload_layer
from frink_numba.cuda.traffic import Traffic
from frink_numba.cuda.weights import Together
from frink_numba.errors import DeviceError
from frink_numba.kernels.fused_attention import head_pitch
from frink_numba.layer import Layer

if TYPE_CHECKING:
    from frink_numba.cuda.device import Workspace

_PROGRAMS = 12  # kept


class _Stack:
    """What is known of a sequence of layers: their serials and shapes, the scratch, and the parts of runs so far.

    Parts by rows, ends and the address of the scratch, each with its program's key.
    """

    __slots__ = ("parts", "scratch", "serials", "shapes")

    def __init__(self, serials: tuple[int, ...], shapes: list[LayerShape], scratch: TensorScratch) -> None:
        self.serials, self.shapes, self.scratch = serials, shapes, scratch
        self.parts: dict[Hashable, list[tuple[Hashable, Part]]] = {}


class TensorBody:
    """See `frink_numba.cuda.body.Body`. `kernels`: a TensorKernels.

    block_rows: how many rows of a step go through the layers together, where it is not for the scratch to say.
    """

    def __init__(self, runtime: Runtime, kernels: Any, *, block_rows: int | None = None) -> None:
        self.runtime = runtime
        self.kernels = kernels
        self.block_rows = block_rows
        self._mirrors = Mirrors(runtime)
        self._ranges = open_ranges()
        self._ahead: PackAhead | None = None  # while layers go up
        self._expected: tuple[object, PackAhead] | None = None  # for whom, from when they were announced
        self._expecting = threading.RLock()  # the collector may let go of a backend anywhere
        self._graphs = StepGraphs()
        self._programs: OrderedDict[Any, Program] = OrderedDict()
        self._group_programs: OrderedDict[Any, GroupProgram] = OrderedDict()
        self._group_sizes: tuple[Sequence[Layer], dict[Any, int]] | None = None
        self._stack: _Stack | None = None  # of the layers of the last run
        self._together: weakref.ref[Any] | None = None  # the sequence that it was made for, if that can be told again
        self._zeroed: weakref.ref[Any] | None = None  # the scratch block whose counters are known to be zero

    least_batch = 1
    most_sequences = MOST_SEQUENCES
    chunk_size = CHUNK_ROWS
    mirrors_rows = True
    most_ahead = AHEAD_ROWS

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
        return TensorScratch.of(layers, self.kernels, self.block_rows)

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

    def few_rows(self, layers: Sequence[Layer], edges: Edges) -> Callable[[int], int]:
        return FewRows(self.kernels, layers, edges).at

    def why_not_edges(self, edges: Edges) -> str | None:
        return decline_edges(edges)

    def edges_bytes(self, edges: Edges) -> int:
        return edges_bytes(edges)

    def upload_edges(self, edges: Edges, stream: Any, traffic: Traffic) -> TensorEdges:
        expected = self._expected
        packed = None if expected is None else expected[1].take(edges)
        self._forget_expected()
        return upload_edges(self.runtime, edges, stream, traffic, packed)

    def dropped(self) -> None:
        self._graphs.clear()
        self._programs.clear()
        self._group_programs.clear()
        self._zeroed = self._stack = self._together = None

    def expect(self, owner: object, layers: Sequence[Layer], edges: Edges | None) -> None:
        announced = owner, PackAhead(layers, edges)
        with self._expecting:
            before, self._expected = self._expected, announced
        if before is not None:
            before[1].close()

    def unexpect(self, owner: object) -> None:
        with self._expecting:
            before = self._expected
            if before is None or before[0] is not owner:
                return
            self._expected = None
        before[1].close()

    @contextmanager
    def preparing(self, layers: Sequence[Layer]) -> Iterator[None]:
        expected = self._expected
        if len(layers) < 2 or (expected is not None and expected[1].names(layers)):
            self._ahead = None if expected is None else expected[1]
            try:
                yield
            finally:
                self._ahead = None
                self._forget_expected()
            return
        self._ahead = ahead = PackAhead(layers)
        try:
            yield
        finally:
            self._ahead = None
            ahead.close()

    def _forget_expected(self) -> None:
        """Let go of what was taken as a whole."""
        expected = self._expected
        if expected is not None and expected[1].done:
            self.unexpect(expected[0])

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
        given = ends.tokens if hidden is None else hidden
        assert given is not None  # a step has the one or the other
        batch = len(given)
        mirrors, whole = list[Mirror](), None
        try:
            zeroed, self._zeroed = self._zeroed, None
            total = start_pos + max(batch, ends.ahead)
            stack = self._known(layers)
            if ends.cache is not None:
                whole = self._mirrors.whole(stack.shapes, ends.cache, total, work.compute)
                mirrors = whole.mirrors
            else:
                mirrors = self._mirrors.take(stack.shapes, [source.cache for source in sources], total, work.compute)
            parts = self._parts(stack, layers, mirrors, batch, self.runtime.address(block), ends)
            program = parts[0].program
            if zeroed is None or zeroed() is not block:
                self.runtime.zero(program.counters, ATTENTION_WORKSPACE + COUNTERS, work.compute)
            lacking: Sequence[KvSource] = sources
            if whole is not None and whole.fresh and whole.known_rows(ends.cache) < start_pos:
                whole.spread()
            if whole is not None and not whole.fresh:
                lacking = [KvSource(cache.prefix, cache) for cache in ends.cache]
            for layer, mirror, source in zip(layers, mirrors, lacking, strict=False):
                self._complete(layer, mirror, source, start_pos, program.staging, work, traffic)
            how = (self.runtime, work, traffic)
            make_targets: Callable[[int], RowTargets]
            if whole is None:
                make_targets = functools.partial(LayerTargets, *how, layers, mirrors, sources)
            else:
                if not whole.fresh:
                    whole.known_rows(ends.cache)
                make_targets = functools.partial(WholeTargets, *how, layers, whole, ends.cache)
            if ends.ahead:
                answer = go_ahead(*how, self._ranges, program, make_targets, start_pos, ends)
            else:
                run = BlockRun(*how, self._ranges, make_targets, self._graphs)
                answer = run.go(parts, layers[0].shape.hidden, hidden, start_pos, ends)
            self._zeroed = weakref.ref(block)
            return answer
        except BaseException:  # a keyboard interrupt too: memory that the device still writes to must not be reused
            for mirror in mirrors:
                mirror.rows, mirror.lease = 0, None
            if whole is not None:
                whole.rows, whole.lease = 0, None
            self.runtime.drain()
            raise

    def group_bytes(self, layers: Sequence[Layer], edges: Edges, members: Sequence[Member]) -> int:
        """Bytes of scratch of a step of these members over all `layers`."""
        shape = GroupShape.of(members)
        known = self._group_sizes  # others may ask meanwhile
        if known is None or known[0] is not layers:
            known = self._group_sizes = layers, {}  # a backend asks for its own layers again and again
        sizes, key = known[1], (shape, logits_rows(edges))
        if key not in sizes:
            sizes[key] = self._group_scratch(layers, edges, shape).nbytes()
        return sizes[key]

    def group_room(self, cache: Any) -> int:
        """Positions for which a cache of all layers is known to have room on the device."""
        return self._mirrors.whole_room(cache)

    def run_group(
        self,
        work: Workspace,
        layers: Sequence[TensorLayer],
        edges: TensorEdges,
        members: Sequence[Member],
        block: Any,
        traffic: Traffic,
        hidden: bool,
    ) -> list[Share]:
        """Take the members' tokens through all layers of the model; `hidden`: whether the hidden batch comes down."""
        shape, base = GroupShape.of(members), self.runtime.address(block)
        run = GroupRun(self.runtime, self._mirrors, work, layers, members, traffic, self._ranges)
        try:
            zeroed, self._zeroed = self._zeroed, None
            run.take_mirrors()
            key = (shape, base, edges.serial, *[layer.serial for layer in layers])
            program = self._group_programs.get(key)
            if program is None:
                scratch = self._group_scratch([layer.layer for layer in layers], edges.layer, shape)
                program = GroupProgram(self.kernels, scratch, layers, base, edges)
                self.kernels.settle()
                self._group_programs[key] = program
                if len(self._group_programs) > _PROGRAMS:
                    self._group_programs.popitem(last=False)
            self._group_programs.move_to_end(key)
            if zeroed is None or zeroed() is not block:
                self.runtime.zero(program.counters, ATTENTION_WORKSPACE + COUNTERS, work.compute)
            for layer, mirror, source, start_pos in run.incomplete():
                self._complete(layer, mirror, source, start_pos, program.staging, work, traffic)
            shares = run.go(program, edges, hidden)
            self._zeroed = weakref.ref(block)
            return shares
        except BaseException:  # a keyboard interrupt too: memory that the device still writes to must not be reused
            run.forget()
            self.runtime.drain()
            raise

    def _group_scratch(self, layers: Sequence[Layer], edges: Edges, shape: GroupShape) -> GroupScratch:
        return GroupScratch(self.scratch(layers), shape, edges)

    def _known(self, layers: Sequence[TensorLayer]) -> _Stack:
        stack = self._stack
        if stack is not None and self._together is not None and self._together() is layers:
            return stack
        serials = tuple(layer.serial for layer in layers)
        if stack is None or stack.serials != serials:
            shapes = [layer.shape for layer in layers]
            stack = self._stack = _Stack(serials, shapes, self.scratch([layer.layer for layer in layers]))
        self._together = weakref.ref(layers) if isinstance(layers, Together) else None
        return stack

    def _parts(
        self,
        stack: _Stack,
        layers: Sequence[TensorLayer],
        mirrors: Sequence[Mirror],
        batch: int,
        base: int,
        ends: Ends,
    ) -> list[Part]:
        """The programs of a run's blocks, in their order; `base`: the address of the scratch."""
        serial = None if ends.edges is None else ends.edges.serial
        key = (batch, base, serial, ends.tokens is not None, ends.logits, ends.choices, ends.hidden)
        made = stack.parts.get(key)
        if made is None or any(self._programs.get(name) is not part.program for name, part in made):
            blocks = stack.scratch.blocks(batch, ends.logits)
            made = [self._part(stack, layers, mirrors, block, base, ends) for block in blocks]
            if len(stack.parts) >= _PROGRAMS:
                stack.parts.clear()
            stack.parts[key] = made
        for name, part in made:
            self._programs.move_to_end(name)
            part.program.point_at(mirrors)
        return [part for _, part in made]

    def _part(
        self,
        stack: _Stack,
        layers: Sequence[TensorLayer],
        mirrors: Sequence[Mirror],
        block: Block,
        base: int,
        ends: Ends,
    ) -> tuple[Hashable, Part]:
        """A block's program by its key: made where there is none."""
        edges, from_tokens = ends.edges, ends.tokens is not None
        rest = (from_tokens, block.logits, ends.choices, ends.hidden)
        key = (block.rows, None if edges is None else edges.serial, *rest, base, stack.serials)
        program = self._programs.get(key)
        if program is None:
            program = Program(self.kernels, stack.scratch, layers, mirrors, block.rows, base, edges, *rest)
            self.kernels.settle()
            self._programs[key] = program
            if len(self._programs) > _PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return key, Part(program, block.first)

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
