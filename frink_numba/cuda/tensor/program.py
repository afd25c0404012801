"""A block's launches, prepared once for a number of rows and a set of layers, and used for every such block.

They lie in segments, whose K/V rows come down while the next one runs, and heads, whose logits come down each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from frink_numba.cuda.ranges import Ranges
from frink_numba.cuda.runtime import Runtime
from frink_numba.cuda.tensor.edges import TensorEdges, logits_rows
from frink_numba.cuda.tensor.launches import Launches, Op
from frink_numba.cuda.tensor.mirror import Mirror
from frink_numba.cuda.tensor.scratch import AHEAD_ROWS, THIN_ROWS, HeadSize, TensorScratch, step_bytes
from frink_numba.cuda.tensor.weights import TensorLayer
from frink_numba.kernels.fused_attention import SEQUENCE
from frink_numba.kernels.fused_attention import Mirror as MirrorAddress
from frink_numba.kernels.sample import NextStep

if TYPE_CHECKING:
    from frink_numba.cuda.device import Workspace


@dataclass(slots=True)
class Segment:
    """Layers first .. last-1 up to where their K/V rows are made, each K then V, layer by layer, from `rows` on.

    What is left of the last of them belongs to what comes next, beside which the rows come down. `replay`: all the
    launches as one, made by the first run.
    """

    first: int
    last: int
    rows: int
    launches: list[Op] = field(default_factory=list)
    replay: Callable[[], None] | None = None


@dataclass(slots=True)
class Head:
    """The launches that leave rows first .. last-1 of the wanted logits; before the first, the rest of the layers."""

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


def fill_image(
    program: Program, start_pos: int, tokens: np.ndarray | None, work: Workspace, number: int = 0
) -> np.ndarray:
    """What a program's launches read, for rows from `start_pos` on, of `tokens` if it begins with them: page-locked.

    It goes to `program.step_address`, and to nobody else until then. number: how many the run has filled before.
    """
    image = program.step(start_pos, tokens)
    if len(program.sent) == number:
        program.sent.append(work.pinned.lend(image.nbytes))
    np.copyto(program.sent[number], image)
    return program.sent[number]


class Program(Launches):
    """The launches of `layers` over `m` rows in the scratch at `base`, whose K/V rows lie in `mirrors` (`point_at`).

    With `edges`, it begins with tokens where `from_tokens` says so, and ends with so many rows of logits. Where nobody
    wants the `hidden` batch, the last layer makes K/V rows of all rows, and the rest of it only those with logits. With
    `choices`, one row of logits is not for the host: the token among so many is chosen from it, put at `answers` and in
    place of the program's token, and all is moved one position further. The one segment is then a step (ahead.py).

    `image`: what `step` completes and the run sends to `step_address`, from page-locked memory that the first run makes
    for it, `sent`: a run ends when nothing reads there any more. `segments` run in order; every second one leaves
    its rows in the same place. `heads` follow them.
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
        hidden: bool = True,
    ) -> None:
        ends = HeadSize.of(None if edges is None else edges.layer, 1 if choices else logits)
        super().__init__(kernels, m, base, scratch.places(m, ends), step_bytes(m, len(layers)))
        self._mirrors = mirrors
        self._mapped: list[tuple[int, Any, int]] = []  # layers whose mirrors have tensor maps, and where these lie
        self._records, self._rest = self._part(SEQUENCE, len(layers)), self._part(SEQUENCE, 1)
        self._positions = self._part(np.dtype(np.int32), m)
        # Of the last layer's rest; few rows take no longer than one does.
        self._skipped = 0 if hidden or m <= THIN_ROWS else m - logits
        self._records["rows"] = m
        self._rest["first_row"], self._rest["rows"] = self._skipped, m - self._skipped
        self._start: int | None = None  # where the positions begin
        self._point()

        self.segments = [
            Segment(first, last, self.slots[number % 2]) for number, (first, last) in enumerate(scratch.segments(m))
        ]
        if choices:
            self._kept = AHEAD_ROWS
            self.segments = [Segment(0, len(layers), self._at["ahead"])]
        self._made = self.segments[0].launches
        self._ids: np.ndarray | None = None
        self.answers = 0
        self.sent: list[np.ndarray] = []
        if edges is not None and from_tokens:
            self._ids = self._part(np.dtype(np.int32), m)
            scale, address = edges.layer.embedding_scale, self._address(self._ids)
            self._add("embed", kernels.samplers.embed(edges.embedding, address, m, self.hidden, scale=scale))
        self._tables = self._rope_tables(layers, self._address(self._positions))
        # Few rows come down in no time, and a launch of its own takes longer.
        whole = choices or m <= THIN_ROWS or (len(self.segments) == 1 and not logits)
        behind = Head(0, 0, self.segments[-1].launches if whole else [])
        following = [segment.launches for segment in self.segments[1:]] + [behind.launches]
        for segment, rest in zip(self.segments, following, strict=True):
            self._segment(layers, segment, rest)
        self._number = None
        self.logits = self._at.get("logits", 0)
        self.heads: list[Head] = []
        if choices:
            assert edges is not None  # there are logits
            self._head(edges, 0, behind)
            self._choose(edges, choices)
        else:
            self._add_heads(edges, logits, [] if whole else behind.launches)
        self.image = self.image[: self._image_end]

    def _segment(self, layers: Sequence[TensorLayer], segment: Segment, rest: list[Op]) -> None:
        """The segment's launches; what is left of its last layer goes to `rest`."""
        self._made, rows = segment.launches, segment.rows
        for number in range(segment.first, segment.last):
            layer, record = layers[number], self._address(self._records[number:])
            self._number = number
            self._layer_rows(layer, record, rows)
            rows += 8 * self._kept * layer.shape.kv_width
            if number + 1 == segment.last:
                self._made = rest
            if number + 1 < len(layers) or not self._skipped:
                self._layer_rest(layer, record)
            elif self._skipped < self._m:
                self._layer_rest(layer, self._address(self._rest), self._skipped)

    def _add_heads(self, edges: TensorEdges | None, logits: int, begun: list[Op]) -> None:
        """The heads for so many rows of logits; the launches of the first begin with `begun`."""
        at_once = 1 if edges is None else logits_rows(edges.layer)
        self.heads = [Head(first, min(first + at_once, logits)) for first in range(0, logits, at_once)]
        if begun and not logits:
            self.heads = [Head(0, 0)]
        if self.heads:
            self.heads[0].launches = begun
        for head in self.heads[: None if logits else 0]:
            assert edges is not None  # logits are wanted
            self._head(edges, self._m - logits, head)

    @property
    def parts(self) -> list[Segment | Head]:
        """Segments and heads that have launches, in their order."""
        parts: list[Segment | Head] = [*self.segments, *self.heads]
        return [part for part in parts if part.launches]

    def point_at(self, mirrors: Sequence[Mirror]) -> None:
        """From now on the K/V rows lie in other mirrors: no launch knows where, but the image does."""
        if mirrors is not self._mirrors:
            self._mirrors = mirrors
            self._point()

    def _point(self) -> None:
        self._records["k_base"] = [mirror.k for mirror in self._mirrors]
        self._records["v_base"] = [mirror.v for mirror in self._mirrors]
        self._rest["k_base"], self._rest["v_base"] = self._records["k_base"][-1], self._records["v_base"][-1]
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
            self._records["start_pos"], self._rest["start_pos"] = start_pos, start_pos + self._skipped
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

    def _choose(self, edges: TensorEdges, choices: int) -> None:
        """The token of the one row of logits, and the next step from there."""
        assert self._ids is not None  # it begins with a token
        done, answers = self._part(np.dtype(np.int32), 1), self._part(np.dtype(np.int32), AHEAD_ROWS)
        self.answers = self._address(answers)
        samplers, at = self._kernels.samplers, self._address
        count, records = len(self._records), at(self._records)
        step = NextStep(self.answers, at(done), at(self._positions), records, count, AHEAD_ROWS)
        room = samplers.argmax_workspace(1)
        choice = samplers.argmax(
            self.logits,
            1,
            choices,
            at(self._ids),
            workspace=self._room("head", room, room),
            pitch=edges.output.rows,
            next_step=step,
        )
        self._add("choice", choice)

    def _head(self, edges: TensorEdges, skipped: int, head: Head) -> None:
        """Final norm and output matrix over rows of the hidden batch, of which the first `skipped` are not wanted."""
        self._made, rows, width = head.launches, head.last - head.first or 1, edges.output.cols
        hidden = self.hidden + 4 * width * (skipped + head.first)
        x = self._normed("output norm", "head", hidden, width, edges.norm, edges.layer.norm_eps, rows)
        product = self._product(edges.output, x, self.logits, 4 * edges.output.rows, stage="head", m=rows)
        self._add("head", product)
