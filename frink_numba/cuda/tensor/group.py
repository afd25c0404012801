"""Groups of sequences on the tensor-core body: one upload, the launches, K/V rows into the caches, the answers down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from frink_numba.cuda.arena import Carver, float_bytes
from frink_numba.cuda.body import KvSource, Member, Rows, Share
from frink_numba.cuda.ranges import Ranges
from frink_numba.cuda.runtime import Runtime
from frink_numba.cuda.tensor.edges import TensorEdges
from frink_numba.cuda.tensor.group_program import GroupProgram
from frink_numba.cuda.tensor.mirror import Mirror, Mirrors, Whole
from frink_numba.cuda.tensor.program import launch
from frink_numba.cuda.tensor.row_targets import find_places
from frink_numba.cuda.tensor.weights import TensorLayer
from frink_numba.cuda.traffic import Traffic

if TYPE_CHECKING:
    from frink_numba.cuda.device import Workspace


class GroupRun:
    """One step of a group. `layers` are all of a model's; all of the members have caches, or none has one."""

    def __init__(
        self,
        runtime: Runtime,
        mirrors: Mirrors,
        work: Workspace,
        layers: Sequence[TensorLayer],
        members: Sequence[Member],
        traffic: Traffic,
        ranges: Ranges | None,
    ) -> None:
        self._runtime, self._mirrors, self._work, self._traffic = runtime, mirrors, work, traffic
        self._layers, self._members, self._ranges = layers, members, ranges
        self._keep = members[0].cache is not None
        self._ahead = _ahead(members)
        self._wholes: list[Whole] = []
        self._images: list[np.ndarray] = []  # page-locked, until all of them have gone up

    def take_mirrors(self) -> None:
        """Room on the device for the new rows of every member that has a cache."""
        shapes = [layer.shape for layer in self._layers]
        for member in self._members if self._keep else ():
            positions = member.start_pos + member.rows
            self._wholes.append(self._mirrors.whole(shapes, member.cache, positions, self._work.compute))

    def incomplete(self) -> Iterator[tuple[TensorLayer, Mirror, KvSource, int]]:
        """The mirrors that lack rows before the members' own, with the position up to which they must hold them (R11).

        Whoever takes one brings them up before the next.
        """
        for member, whole in zip(self._members, self._wholes, strict=False):
            if whole.known_rows(member.cache) < member.start_pos:
                whole.spread()
                for layer, mirror, cache in zip(self._layers, whole.mirrors, member.cache, strict=True):
                    yield layer, mirror, KvSource(cache.prefix, cache), member.start_pos
                whole.known_rows(member.cache)

    def go(self, program: GroupProgram, edges: TensorEdges, hidden: bool) -> list[Share]:
        """Run it; when this returns, everything has come down. `hidden`: whether the hidden batch does.

        Steps that go ahead are queued one behind the other: the host describes one while the device runs the last.
        """
        runtime, work = self._runtime, self._work
        stream, lend = work.compute, work.pinned.lend
        rows, leases = self._places()
        answers = [self._step(program, edges, leases, number) for number in range(self._ahead)]
        batch = None
        if hidden:
            width = self._layers[0].shape.hidden
            total = sum(len(member.tokens) for member in self._members)
            batch = Carver(lend(float_bytes(total * width))).array((total, width))
            runtime.fetch(batch, program.hidden, stream)
            self._traffic.hidden_down += batch.nbytes
        self._rows_down(program)
        runtime.synchronize(stream)
        self._traffic.synchronizations += 1
        self._traffic.runs += 1
        for whole, lease in zip(self._wholes, leases, strict=True):
            whole.lease = lease if isinstance(lease, Sequence) else None
        return self._shares(program.shape.make, rows, batch, answers)

    def _rows_down(self, program: GroupProgram) -> None:
        """Let what follows wait until the rows of the last two segments are down."""
        for slot in range(min(2, len(program.segments)) if self._keep else 0):
            self._runtime.wait(self._work.rows_down[slot], self._work.compute)

    def _step(
        self, program: GroupProgram, edges: TensorEdges, leases: Sequence[Any], number: int
    ) -> tuple[np.ndarray, ...]:
        """Queue one step: so many positions behind the members' own, from their tokens or from those chosen last."""
        runtime, work = self._runtime, self._work
        stream = work.compute
        image = work.pinned.lend(program.image.nbytes)
        self._images.append(image)
        count, at = len(self._members), program.copies_at
        np.copyto(image, program.next_step(count) if number else program.step(self._members, self._wholes, leases))
        runtime.send(program.step_address, image[:at], stream)
        if self._keep:  # in order with the launches that read it
            runtime.send(program.step_address + at, image[at:], work.downloads)
        if number:
            runtime.move(program.ids, program.chosen, 4 * count, stream)
        if not self._keep:
            runtime.zero(*program.mirror, stream)
        for which, segment in enumerate(program.segments):
            slot = which % 2
            if number or which >= 2:  # the rows of the segment that was here before must be down
                runtime.wait(work.rows_down[slot], stream)
            launch(segment, runtime, stream, self._ranges, 0)
            if self._keep:
                runtime.record(work.rows_ready[slot], stream)
                runtime.wait(work.rows_ready[slot], work.downloads)
                program.stores[which](runtime.handle(work.downloads))
                runtime.record(work.rows_down[slot], work.downloads)
        return self._heads(program, edges)

    def forget(self) -> None:
        """What the mirrors hold of the members' rows is not known any more."""
        for whole in self._wholes:
            for mirror in whole.mirrors:
                mirror.rows, mirror.lease = 0, None
            whole.rows, whole.lease = 0, None

    def _heads(self, program: GroupProgram, edges: TensorEdges) -> tuple[np.ndarray, ...]:
        """What is made of the wanted rows, on its way down: logits, or tokens and scores, or scores."""
        runtime, work, shape = self._runtime, self._work, program.shape
        wanted = sum(member.logits for member in self._members)
        if not wanted:
            return ()
        stream, lend = work.compute, work.pinned.lend
        if shape.make == "logits":
            vocabulary = edges.layer.output.rows
            logits = Carver(lend(float_bytes(wanted * vocabulary))).array((wanted, vocabulary))
        for head in program.heads:
            launch(head, runtime, stream, self._ranges, 0)
            if shape.make == "logits" and head.first < wanted:
                part = logits[head.first : head.last]
                runtime.fetch(part, program.logits, stream)
                self._traffic.logits_down += part.nbytes
        if shape.make == "logits":
            return (logits,)
        carver = Carver(lend(float_bytes(wanted, wanted)))
        scores, tokens = carver.array((wanted,)), carver.array((wanted,), np.int32)
        runtime.fetch(scores, program.scores, stream)
        if shape.make == "tokens":
            runtime.fetch(tokens, program.chosen, stream)
            return tokens, scores
        return (scores,)

    def _places(self) -> tuple[list[Sequence[Rows]], list[Any]]:
        """What holds each member's new rows, and the addresses there: the cache's room, or memory of the run."""
        if not self._keep:
            return [()] * len(self._members), []
        rows: list[Sequence[Rows]] = []
        places: list[Any] = []
        row_bytes = sum(8 * layer.shape.kv_width for layer in self._layers)
        for member, whole in zip(self._members, self._wholes, strict=True):
            cache, count = member.cache, self._ahead if self._ahead > 1 else len(member.tokens)
            lease = cache.lend(count)
            find_places(whole, cache, lease.places, self._layers, self._work)
            self._traffic.kv_down += count * row_bytes
            if whole.writable:
                rows.append(lease)
                places.append(lease)
            else:
                own = _OwnRows(self._layers, count, self._work)
                rows.append(own.rows)
                places.append(own)
        return rows, places

    def _shares(
        self, make: str, rows: list[Sequence[Rows]], batch: np.ndarray | None, answers: list[tuple[np.ndarray, ...]]
    ) -> list[Share]:
        shares, first, row = [], 0, 0
        if make == "tokens":
            chosen, scores = (np.stack(arrays) for arrays in zip(*answers, strict=True))
            # What follows from no number is no token.
            chosen[np.logical_or.accumulate(np.isnan(scores), axis=0)] = -1
        for member, own in zip(self._members, rows, strict=True):
            share = Share(None if batch is None else batch[row : row + len(member.tokens)], own)
            row += len(member.tokens)
            if member.logits:
                mine = slice(first, first + member.logits)
                first = mine.stop
                if make == "logits":
                    share.logits = answers[0][0][mine]
                elif make == "scores":
                    share.scores = answers[0][0][mine]
                else:  # of one step those of all rows, of several the row's one of each
                    share.tokens = chosen[0, mine] if self._ahead == 1 else chosen[:, mine.start]
            shares.append(share)
        return shares


def _ahead(members: Sequence[Member]) -> int:
    """How many tokens the members choose one after the other: as many as all want that have one row each."""
    choose = members[0].choose
    alike = all(len(one.tokens) == one.logits == 1 and one.choose == choose for one in members)
    return max(1, min(one.ahead for one in members)) if alike and choose else 1


class _OwnRows:
    """Page-locked memory of the run for a member's new rows, where the cache's is not float32, or not page-locked."""

    def __init__(self, layers: Sequence[TensorLayer], count: int, work: Workspace) -> None:
        shapes = [(count, layer.shape.n_kv_heads, layer.shape.head_dim) for layer in layers]
        sizes = [int(np.prod(shape)) for shape in shapes for _ in "kv"]
        carver = Carver(work.pinned.lend(float_bytes(*sizes)))
        self.rows: list[Rows] = [(carver.array(shape), carver.array(shape)) for shape in shapes]
        self.k = np.array([k.ctypes.data for k, _ in self.rows], np.uint64)
        self.v = np.array([v.ctypes.data for _, v in self.rows], np.uint64)
