"""One run on the tensor-core body: the hidden batch up, the launches of each block, K/V rows and answers down.

The blocks of a long step follow each other in one stream, with nothing of the host between them. Rows of a block come
down while the next one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from frink_numba.cuda.arena import Carver, float_bytes
from frink_numba.cuda.body import Answer, Ends
from frink_numba.cuda.ranges import Ranges
from frink_numba.cuda.runtime import Runtime
from frink_numba.cuda.tensor.program import Head, Program, Segment, fill_image, launch
from frink_numba.cuda.tensor.row_targets import RowTargets
from frink_numba.cuda.tensor.step_graph import StepGraph, StepGraphs
from frink_numba.cuda.traffic import Traffic

if TYPE_CHECKING:
    from frink_numba.cuda.device import Workspace

T = TypeVar("T")


class Part(NamedTuple):
    """A block of a step's rows: its program, and where it begins among them."""

    program: Program
    first: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.program.rows)


class BlockRun:
    """The blocks of one step, and what goes up and comes down."""

    def __init__(
        self,
        runtime: Runtime,
        work: Workspace,
        traffic: Traffic,
        ranges: Ranges | None,
        make_targets: Callable[[int], RowTargets],
        graphs: StepGraphs,
    ) -> None:
        """`make_targets`: of so many rows; called once, while the device is at work unless a graph may be there."""
        self._graphs = graphs
        self._runtime, self._work, self._traffic, self._ranges = runtime, work, traffic, ranges
        self._make_targets = make_targets
        self._prepared = False
        self._targets: RowTargets | None = None
        self._answer: np.ndarray | None = None
        self._logits: np.ndarray | None = None
        self._slots: tuple[int, ...] = ()  # where the block before leaves its K/V rows
        self._busy: set[int] = set()  # which of them may not be down yet

    def go(self, parts: Sequence[Part], width: int, hidden: np.ndarray | None, start_pos: int, ends: Ends) -> Answer:
        """Run them; when this returns, everything has come down. `width`: of the hidden batch."""
        runtime, work, traffic = self._runtime, self._work, self._traffic
        stream, lend = work.compute, work.pinned.lend
        shape = (parts[-1].rows.stop, width)
        if hidden is not None:
            self._answer = Carver(lend(float_bytes(shape[0] * width))).array(shape)
            if not work.pinned.owns(hidden):
                np.copyto(self._answer, hidden)
                hidden = self._answer
            traffic.hidden_up += hidden.nbytes
        images: list[np.ndarray] = []
        for number, part in enumerate(parts):
            tokens = None if ends.tokens is None else ends.tokens[part.rows]
            filled = sum(other.program is part.program for other in parts[:number]) if number else 0
            images.append(fill_image(part.program, start_pos + part.first, tokens, work, filled))
        graph = self._graph(parts, images, shape, ends) if hidden is None else None
        if graph is None:
            self._queue(parts, images, shape, hidden, ends, self._launch)
        else:
            graph.replay()
            traffic.kv_down += graph.kv_down
            self._prepare(shape, ends)
        if ends.logits and _fetches_at_end(parts):
            runtime.fetch(_there(self._logits), parts[-1].program.logits, stream)
            traffic.logits_down += _there(self._logits).nbytes
        self._wait(set(self._busy))
        runtime.synchronize(stream)
        traffic.synchronizations += 1
        traffic.runs += 1
        assert self._targets is not None  # there is a segment
        self._targets.done()
        if ends.hidden:
            traffic.hidden_down += _there(self._answer).nbytes
        return Answer(self._answer if ends.hidden else None, self._targets.rows, self._logits)

    def _graph(
        self, parts: Sequence[Part], images: Sequence[np.ndarray], shape: tuple[int, int], ends: Ends
    ) -> StepGraph | None:
        """All of a run from tokens to its last logits as one graph, where there is one."""
        few = len(parts) == 1 and len(parts[0].program.segments) == 1  # as soon queued
        if few or self._ranges is not None or ends.hidden or not (_fetches_at_end(parts) or not ends.logits):
            return None
        self._targets = self._make_targets(shape[0])
        place = self._targets.place
        if place is None:
            return None

        def capture() -> StepGraph:
            before = self._traffic.kv_down
            try:
                replay = self._runtime.graph(
                    self._work.compute,
                    [lambda handle: self._queue(parts, images, shape, None, ends, _one_by_one(handle), joined=True)],
                )
                return StepGraph(replay, self._traffic.kv_down - before)
            finally:
                self._traffic.kv_down = before
                self._busy.clear()
                self._slots = ()

        return self._graphs.find((place, *parts), capture)

    def _launch(self, part: Segment | Head, ends: Ends) -> None:
        launch(part, self._runtime, self._work.compute, self._ranges, ends.first)

    def _queue(
        self,
        parts: Sequence[Part],
        images: Sequence[np.ndarray],
        shape: tuple[int, int],
        hidden: np.ndarray | None,
        ends: Ends,
        run: Callable[[Segment | Head, Ends], None],
        joined: bool = False,
    ) -> None:
        """Everything from the images on their way up to the last launch.

        run: makes the launches of a part. joined: nothing of it is left to other streams at the end.
        """
        runtime, stream = self._runtime, self._work.compute
        at_end, first_logit = _fetches_at_end(parts), 0
        for part, image in zip(parts, images, strict=True):
            program = part.program
            if program.slots != self._slots:  # the block before has left rows where this one has other things
                self._wait(set(self._busy))
                self._slots = program.slots
            runtime.send(program.step_address, image, stream)
            if hidden is not None:
                runtime.send(program.hidden, hidden[part.rows], stream)
            self._segments(part, shape, ends, run)
            first_logit = self._heads(program, first_logit, ends, run, fetch=not at_end)
            if ends.hidden:
                runtime.fetch(_there(self._answer)[part.rows], program.hidden, stream)
        if joined:
            self._wait(set(self._busy))

    def _segments(
        self, part: Part, shape: tuple[int, int], ends: Ends, run: Callable[[Segment | Head, Ends], None]
    ) -> None:
        runtime, work, program = self._runtime, self._work, part.program
        for number, segment in enumerate(program.segments):
            slot = number % 2
            self._wait({slot} & self._busy)  # the rows that were here before must be down
            run(segment, ends)
            if not self._prepared:
                self._prepare(shape, ends)
            runtime.record(work.rows_ready[slot], work.compute)
            runtime.wait(work.rows_ready[slot], work.downloads)
            _there(self._targets).fetch(
                segment.first, segment.last, segment.rows, work.downloads, program.rows, part.rows
            )
            runtime.record(work.rows_down[slot], work.downloads)
            self._busy.add(slot)

    def _wait(self, slots: set[int]) -> None:
        """Later launches wait until the rows in `slots` are down."""
        for slot in slots:
            self._runtime.wait(self._work.rows_down[slot], self._work.compute)
        self._busy -= slots

    def _prepare(self, shape: tuple[int, int], ends: Ends) -> None:
        """Where everything goes that comes down; while the device is at work."""
        lend, self._prepared = self._work.pinned.lend, True
        if self._targets is None:
            self._targets = self._make_targets(shape[0])
        if ends.hidden and self._answer is None:
            self._answer = Carver(lend(float_bytes(shape[0] * shape[1]))).array(shape)
        if ends.logits:
            vocabulary = ends.edges.output.rows
            self._logits = lend(4 * ends.logits * vocabulary).view(np.float32).reshape(ends.logits, vocabulary)

    def _heads(
        self, program: Program, first: int, ends: Ends, run: Callable[[Segment | Head, Ends], None], fetch: bool
    ) -> int:
        """A block's logits become those from row `first` on; answers where the next ones begin."""
        runtime, stream, end = self._runtime, self._work.compute, first
        for head in program.heads:
            run(head, ends)
            if head.last and fetch:
                part = _there(self._logits)[first + head.first : first + head.last]
                runtime.fetch(part, program.logits, stream)
                self._traffic.logits_down += part.nbytes
                end = first + head.last
        return end


def _fetches_at_end(parts: Sequence[Part]) -> bool:
    """Whether all logits are those of the last launch, and stay where it leaves them."""
    heads = [part for part in parts for head in part.program.heads if head.last]
    return len(heads) == 1 and heads[0] is parts[-1]


def _one_by_one(handle: int) -> Callable[[Segment | Head, Ends], None]:
    """Makes a part's launches each by itself, as they are captured."""

    def run(part: Segment | Head, _: Ends) -> None:
        for op in part.launches:
            op(handle)

    return run


def _there(made: T | None) -> T:
    assert made is not None  # asked for only where it was made
    return made
