"""A run's launches, prepared once for a number of rows and a set of layers, and used for every such step.

They lie in segments, whose K/V rows come down while the next one runs, and heads, whose logits come down each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from frink_numba.cuda.ranges import Ranges
from frink_numba.cuda.runtime import Runtime
from frink_numba.cuda.tensor.edges import TensorEdges
from frink_numba.cuda.tensor.launches import Launches, Op
from frink_numba.cuda.tensor.mirror import Mirror
from frink_numba.cuda.tensor.scratch import AHEAD_ROWS, TensorScratch, step_bytes
from frink_numba.cuda.tensor.weights import TensorLayer
from frink_numba.kernels.fused_attention import SEQUENCE
from frink_numba.kernels.fused_attention import Mirror as MirrorAddress
from frink_numba.kernels.sample import NextStep

if TYPE_CHECKING:
    from frink_numba.cuda.device import Workspace


@dataclass(slots=True)
class Segment:
    """Layers first .. last-1: their launches, and where they leave their K/V rows, each K then V, layer by layer.

    `replay`: all the launches as one, made by the first run.
    """

    first: int
    last: int
    rows: int
    launches: list[Op] = field(default_factory=list)
    replay: Callable[[], None] | None = None


@dataclass(slots=True)
class Head:
    """The launches that leave rows first .. last-1 of the wanted logits at the edges' `logits`."""

    first: int
    last: int
    launches: list[Op] = field(default_factory=list)
    replay: Callable[[], None] | None = None


def launch(part: Segment | Head, runtime: Runtime, stream: Any, ranges: Ranges | None, first: int) -> None:
    """All launches of a part as one; or one by one where somebody watches, to whom layer 0 is the model's `first`."""
    if ranges is not None:
        ranges.launch(part.launches, runtime.handle(stream), first)
        return
    if part.replay is None:
        part.replay = runtime.graph(stream, part.launches)
    part.replay()


def send_image(program: Program, start_pos: int, tokens: np.ndarray | None, runtime: Runtime, work: Workspace) -> None:
    """What a program's launches read goes up, for a step from `start_pos` on, over `tokens` if it begins with them."""
    image = program.step(start_pos, tokens)
    if program.sent is None:
        program.sent = work.pinned.lend(image.nbytes)
    np.copyto(program.sent, image)
    runtime.send(program.step_address, program.sent, work.compute)


class Program(Launches):
    """The launches of `layers` over `m` rows in the scratch at `base`, whose K/V rows lie in `mirrors` (`point_at`).

    With `edges`, it begins with tokens where `from_tokens` says so, and ends with so many rows of logits. With
    `choices`, one row of logits is not for the host: the token among so many is chosen from it, put at `answers` and in
    place of the program's token, and all is moved one position further. The one segment is then a step (ahead.py).

    `image`: what `step` completes and the run sends to `step_address`, from page-locked memory that the first run makes
    for it, `sent`: a run ends when nothing reads there any more. `segments` run in order; every second one leaves
    its rows in the same place.
    """

    def __init__(
        self,
        kernels: Any,
        scratch: TensorScratch,
        layers: Sequence[TensorLayer],
        mirrors: Sequence[Mirror],
        m: int,
        base: int,
        edges: TensorEdges | None = None,
        from_tokens: bool = False,
        logits: int = 0,
        choices: int = 0,
    ) -> None:
        places = scratch.places(m)[0]
        super().__init__(kernels, m, base, places, scratch.workspace, step_bytes(m, len(layers)))
        self._mirrors = mirrors
        self._mapped: list[tuple[int, Any, int]] = []  # layers whose mirrors have tensor maps, and where these lie
        records = self._reserve(SEQUENCE.itemsize * len(layers))
        self._records = self.image[records : records + SEQUENCE.itemsize * len(layers)].view(SEQUENCE)
        positions = self._reserve(4 * m)
        self._positions = self.image[positions : positions + 4 * m].view(np.int32)
        self._records["rows"] = m
        self._start: int | None = None  # where the positions begin
        self._point()

        size = scratch.segment(m)
        self.segments = [
            Segment(first, min(first + size, len(layers)), self._at[f"rows{first // size % 2}"])
            for first in range(0, len(layers), size)
        ]
        if choices:
            self._kept = AHEAD_ROWS
            self.segments = [Segment(0, len(layers), self._at["ahead"])]
        self._made = self.segments[0].launches
        self._ids: np.ndarray | None = None
        self.sent: np.ndarray | None = None
        self.answers = ids = 0
        if edges is not None and from_tokens:
            ids = self._reserve(4 * m)
            self._ids = self.image[ids : ids + 4 * m].view(np.int32)
            scale, address = edges.layer.embedding_scale, self.step_address + ids
            self._add("embed", kernels.samplers.embed(edges.embedding, address, m, self.hidden, scale=scale))
        self._tables = self._rope_tables(layers, self.step_address + positions)
        for segment in self.segments:
            self._made, rows = segment.launches, segment.rows
            for number in range(segment.first, segment.last):
                self._number = number
                record = self.step_address + records + SEQUENCE.itemsize * number
                self._layer(layers[number], record, rows)
                rows += 8 * self._kept * layers[number].shape.kv_width

        self._number = None
        self.heads: list[Head] = []
        if choices:
            assert edges is not None  # there are logits
            self._head(edges, 0, Head(0, 1, self.segments[0].launches))
            self._choose(edges, choices, ids, positions, records)
            logits = 0
        for first in range(0, logits, edges.rows if edges is not None else 1):
            assert edges is not None  # logits are wanted
            self.heads.append(Head(first, min(first + edges.rows, logits)))
            self._head(edges, m - logits, self.heads[-1])
        self.image = self.image[: self._image_end]

    def point_at(self, mirrors: Sequence[Mirror]) -> None:
        """From now on the K/V rows lie in other mirrors: no launch knows where, but the image does."""
        if mirrors is not self._mirrors:
            self._mirrors = mirrors
            self._point()

    def _point(self) -> None:
        self._records["k_base"] = [mirror.k for mirror in self._mirrors]
        self._records["v_base"] = [mirror.v for mirror in self._mirrors]
        for number, attention, offset in self._mapped:
            self._put_maps(number, attention, offset)

    def _put_maps(self, number: int, attention: Any, offset: int) -> None:
        mirror = self._mirrors[number]
        maps = attention.maps([MirrorAddress(mirror.k, mirror.v, mirror.capacity)])
        self.image[offset : offset + len(maps)] = np.frombuffer(maps, np.uint8)

    def step(self, start_pos: int, tokens: np.ndarray | None = None) -> np.ndarray:
        """The image for a step from `start_pos` on, over `tokens` [m] where the program begins with them."""
        if self._ids is not None:
            self._ids[:] = tokens
        if start_pos != self._start:
            self._records["start_pos"] = start_pos
            self._positions[:] = np.arange(start_pos, start_pos + self._m, dtype=np.int32)
            self._start = start_pos
        return self.image

    def _maps_of(self, attention: Any) -> int:
        """Where the tensor maps of the layer's mirrors lie on the device."""
        assert self._number is not None  # a layer's launches are made
        mirror = self._mirrors[self._number]
        nbytes = len(attention.maps([MirrorAddress(mirror.k, mirror.v, mirror.capacity)]))
        if not nbytes:
            return 0
        offset = self._reserve(nbytes)
        self._mapped.append((self._number, attention, offset))
        self._put_maps(*self._mapped[-1])
        return self.step_address + offset

    def _choose(self, edges: TensorEdges, choices: int, ids: int, positions: int, records: int) -> None:
        """The token of the one row of logits, and the next step from there; all but the first are offsets."""
        done, answers = self._reserve(4), self._reserve(4 * AHEAD_ROWS)
        self.answers = self.step_address + answers
        samplers, at = self._kernels.samplers, self.step_address
        step = NextStep(self.answers, at + done, at + positions, at + records, len(self._records), AHEAD_ROWS)
        room = samplers.argmax_workspace(1)
        choice = samplers.argmax(
            edges.logits,
            1,
            choices,
            at + ids,
            workspace=self._room(room, room),
            pitch=edges.output.rows,
            next_step=step,
        )
        self._add("choice", choice)

    def _head(self, edges: TensorEdges, skipped: int, head: Head) -> None:
        """Final norm and output matrix over rows of the hidden batch, of which the first `skipped` are not wanted."""
        self._made, rows, width = head.launches, head.last - head.first, edges.output.cols
        hidden = self.hidden + 4 * width * (skipped + head.first)
        x = self._normed("output norm", hidden, width, edges.norm, edges.layer.norm_eps, rows)
        self._add("head", self._product(edges.output, x, edges.logits, 4 * edges.output.rows, m=rows))
