"""A step over several sequences: launches prepared once for a class of sizes, and used for every group that fits it.

The rows of all sequences lie one behind the other, as one batch for everything but attention, which reads from a table
of records where each begins and which mirrors are its own. Rows and records beyond those of a step are there without a
use: a row of no sequence is stored nowhere, and a record may have no rows.

Where nobody keeps the K/V rows, no layer reads those of another: one mirror in the scratch serves all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from frink_numba.backend import Edges
from frink_numba.cuda.arena import Layout
from frink_numba.cuda.body import Member
from frink_numba.cuda.tensor.edges import TensorEdges, logits_rows
from frink_numba.cuda.tensor.launches import Launches
from frink_numba.cuda.tensor.mirror import Whole
from frink_numba.cuda.tensor.program import Head, Segment
from frink_numba.cuda.tensor.scratch import HeadSize, Places, TensorScratch, step_bytes
from frink_numba.cuda.tensor.weights import TensorLayer
from frink_numba.kernels.decode_attention import MOST_ROWS
from frink_numba.kernels.fused_attention import SEQUENCE, head_pitch
from frink_numba.kernels.scatter_bytes import COPY
from frink_numba.kernels.tma import MAP_BYTES

MOST_SEQUENCES = 64
_KEYS = 128  # that a kernel reads at a time, at most
_COPY_BLOCKS = 16  # of the launch that stores K/V rows in the caches


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The sizes that a program is made for; a group takes the smallest that it fits.

    most_rows: of a sequence. wanted: rows that go through the output matrix, and `make` what is made of them: "logits",
    "tokens" (the likeliest among the first `choices`) or "scores" (how likely the targets are). keep: whether K/V rows
    come down.
    """

    rows: int
    sequences: int
    most_rows: int
    wanted: int
    make: str
    keep: bool
    choices: int = 0

    @classmethod
    def of(cls, members: Sequence[Member]) -> GroupShape:
        sizes = [len(member.tokens) for member in members]
        rows, most, wanted = sum(sizes), max(sizes), sum(member.logits for member in members)
        make, choices = "logits", 0
        if all(member.targets is not None for member in members):
            make = "scores"
        elif members[0].choose and all(member.choose == members[0].choose for member in members):
            make, choices = "tokens", members[0].choose
        count = 1 << (len(members) - 1).bit_length()
        few = 1 << (most - 1).bit_length()
        rows = size_class(rows)
        most_rows = few if few <= MOST_ROWS else rows
        return cls(
            rows, count, most_rows, size_class(wanted) if wanted else 0, make, members[0].cache is not None, choices
        )


def size_class(n: int) -> int:
    """The number of rows that a program for `n` of them is made for: at most an eighth more, but for few."""
    if n <= 8:
        return 1 << (n - 1).bit_length()
    step = max(16, 1 << (n.bit_length() - 4))
    return -(-n // step) * step


@dataclass(frozen=True, slots=True)
class GroupScratch:
    """The scratch of a group: that of one sequence of as many rows, and what several need beside it."""

    scratch: TensorScratch
    shape: GroupShape
    edges: Edges

    def image_bytes(self) -> int:
        """Most bytes of what goes up with a step."""
        shape, layers = self.shape, self.scratch.layers
        records = layers * shape.sequences * (SEQUENCE.itemsize + 2 * MAP_BYTES + 2 * COPY.itemsize)
        return step_bytes(shape.rows, layers) + records + layers * 3 * 128 + 2 * 4 * shape.wanted + 1024

    def places(self) -> Places:
        """Where each part begins in the block, and the bytes of the block."""
        shape, scratch = self.shape, self.scratch
        places = scratch.places(shape.rows, HeadSize.of(self.edges, shape.wanted), shape.most_rows)
        layout = Layout()
        layout.add(places.nbytes)
        parts = {
            "step": self.image_bytes(),
            # One launch may read it for all the attention does, so that it shares its place with nothing.
            "qkv": 4 * shape.rows * (scratch.query_width + 2 * scratch.kv_width),
            "gathered": 4 * min(shape.wanted, logits_rows(self.edges)) * scratch.hidden,
            "chosen": 4 * shape.wanted,
            "scores": 4 * shape.wanted,
        }
        if not shape.keep:
            # Boxes of keys reach behind the last sequence's rows.
            parts["k_mirror"] = parts["v_mirror"] = 2 * (shape.rows + _KEYS) * scratch.padded_kv_width
        if shape.most_rows > MOST_ROWS:
            del parts["qkv"]
        added = {name: layout.add(size) for name, size in parts.items()}
        return Places({**places.at, **added}, layout.nbytes, places.sums)

    def nbytes(self) -> int:
        return self.places().nbytes


class GroupProgram(Launches):
    """The launches of `layers` for groups of a shape, in the scratch at `base`, from tokens to what `shape.make` says.

    `segments` and `heads` as in `Program`. `stores`: for each segment the launch that brings its rows to the caches.
    """

    def __init__(
        self, kernels: Any, scratch: GroupScratch, layers: Sequence[TensorLayer], base: int, edges: TensorEdges
    ) -> None:
        shape, plain = scratch.shape, scratch.scratch
        sizes = (scratch.places(), scratch.image_bytes(), shape.sequences, shape.most_rows)
        super().__init__(kernels, shape.rows, base, *sizes)
        self.shape = shape
        count, m = len(layers), shape.rows
        self._shapes = [layer.shape for layer in layers]
        self._records = self._part(SEQUENCE, count, shape.sequences)
        self._positions, self._ids = self._part(np.dtype(np.int32), m), self._part(np.dtype(np.int32), m)
        self._wanted = self._part(np.dtype(np.int32), shape.wanted)
        self._targets = self._part(np.dtype(np.int32), shape.wanted)
        # Bytes of a position in a layer's mirror, and of a row of its K.
        self._pitches = np.array([2 * s.n_kv_heads * head_pitch(s.head_dim) for s in self._shapes], np.uint64)
        self._widths = np.array([4 * s.kv_width for s in self._shapes], np.uint64)
        self._mapped: dict[int, tuple[Any, np.ndarray]] = {}  # by layer: its attention, the maps in the image
        self._shared_maps: dict[Any, int] = {}

        self.segments = [Segment(0, count, 0)]
        if shape.keep:
            cut = enumerate(plain.segments(m))
            self.segments = [Segment(first, last, self.slots[number % 2]) for number, (first, last) in cut]
        self._made = self.segments[0].launches
        ids = kernels.samplers.embed(
            edges.embedding, self._address(self._ids), m, self.hidden, scale=edges.layer.embedding_scale
        )
        self._add("embed", ids)
        self._tables = self._rope_tables(layers, self._address(self._positions))
        sources = []
        for segment in self.segments:
            self._made, rows = segment.launches, segment.rows
            for number in range(segment.first, segment.last):
                self._number = number
                self._layer(layers[number], self._address(self._records[number]), rows)
                sources.append(rows)
                rows += 8 * m * self._shapes[number].kv_width if rows else 0
        self._number = None
        self._sources = np.array(sources, np.uint64)
        at_once = logits_rows(edges.layer)
        self.heads = [Head(first, min(first + at_once, shape.wanted)) for first in range(0, shape.wanted, at_once)]
        self.logits = self._at.get("logits", 0)
        for head in self.heads:
            self._head(edges, head)
        self.stores: list[Callable[[int], None]] = []
        self.copies_at = self._image_end  # what lies behind it in the image only `stores` read
        self._copies = self._part(COPY, count if shape.keep else 0, shape.sequences, 2)
        for segment in self.segments if shape.keep else ():
            records = 2 * shape.sequences * (segment.last - segment.first)
            table = self._address(self._copies[segment.first])
            self.stores.append(kernels.scatter_bytes(_COPY_BLOCKS, table, records))
        self.image = self.image[: self._image_end]

    @property
    def mirror(self) -> tuple[int, int]:
        """(address, bytes) of the mirror of rows that nobody keeps."""
        return self._at["k_mirror"], 2 * (self._at["v_mirror"] - self._at["k_mirror"])

    @property
    def chosen(self) -> int:
        """Where the likeliest tokens are left, int32 [wanted]."""
        return self._at["chosen"]

    @property
    def scores(self) -> int:
        """Where it is left how likely targets or chosen tokens are, float32 [wanted]."""
        return self._at["scores"]

    @property
    def ids(self) -> int:
        """Where the tokens of a step are looked up, int32 [rows]."""
        return self._address(self._ids)

    def step(self, members: Sequence[Member], wholes: Sequence[Whole], places: Sequence[Any]) -> np.ndarray:
        """The image for a step of `members`, whose mirrors are `wholes`, and whose new rows go to `places`.

        Each of the latter has `k` and `v`, uint64 [layers]: the addresses of a layer's first new row. None of both
        where nobody keeps the rows.
        """
        count = len(members)
        sizes = np.fromiter((len(member.tokens) for member in members), np.int64, count)
        starts = np.fromiter((member.start_pos for member in members), np.int64, count)
        firsts = np.cumsum(sizes) - sizes
        total = int(sizes.sum())
        self._ids[:total] = np.concatenate([member.tokens for member in members])
        self._ids[total:] = 0
        self._positions[:total] = np.arange(total) + np.repeat(starts - firsts, sizes)
        self._positions[total:] = 0

        # Those with the most work first, so that the short ones fill the gaps at the end.
        order = np.argsort(-sizes * (sizes + 2 * starts), kind="stable")
        records = self._records
        records["rows"][:, count:] = 0
        records["first_row"][:, :count] = firsts[order]
        records["rows"][:, :count] = sizes[order]
        records["start_pos"][:, :count] = starts[order]
        if self.shape.keep:
            k = np.array([wholes[at].k for at in order]).T
            v = np.array([wholes[at].v for at in order]).T
            capacities = [wholes[at].capacity for at in order]
        else:
            place = firsts[order].astype(np.uint64) * self._pitches[:, None]
            k, v = (place + np.uint64(self._at[name]) for name in ("k_mirror", "v_mirror"))
            capacities = [-(-int(sizes.max()) // _KEYS) * _KEYS] * count
        records["k_base"][:, :count] = k
        records["v_base"][:, :count] = v
        self._describe(k, v, capacities)
        if self.shape.keep:
            self._copy(places, firsts.astype(np.uint64), sizes.astype(np.uint64))
        self._want(members, firsts + sizes)
        return self.image

    def next_step(self, count: int) -> np.ndarray:
        """The image of the step behind the last one, one position further: `count` members with a row each.

        Its tokens are not those of the image.
        """
        self._positions[:count] += 1
        self._records["start_pos"][:, :count] += 1
        self._copies["target"][:, :count] += self._widths[:, None, None]
        return self.image

    def _describe(self, k: np.ndarray, v: np.ndarray, capacities: Sequence[int]) -> None:
        """Fill in the tensor maps of mirrors at `k` and `v`, uint64 [layers, sequences]."""
        for number, (attention, maps) in self._mapped.items():
            made = maps[: len(capacities)]
            for capacity in set(capacities):
                mine = [at for at, other in enumerate(capacities) if other == capacity]
                made[mine] = attention.maps_at(k[number, mine], v[number, mine], capacity)

    def _copy(self, places: Sequence[Any], firsts: np.ndarray, sizes: np.ndarray) -> None:
        """Fill in where each layer's new rows of each sequence lie, and where they go."""
        count, copies = len(places), self._copies
        from_k = self._sources[:, None] + firsts * self._widths[:, None]
        copies["source"][:, :count, 0] = from_k
        copies["source"][:, :count, 1] = from_k + np.uint64(self.rows) * self._widths[:, None]
        copies["target"][:, :count, 0] = np.array([place.k for place in places]).T
        copies["target"][:, :count, 1] = np.array([place.v for place in places]).T
        copies["nbytes"][:, :count] = (sizes * self._widths[:, None])[:, :, None]
        copies["nbytes"][:, count:] = 0

    def _want(self, members: Sequence[Member], ends: np.ndarray) -> None:
        """Fill in which rows go through the output matrix, and the tokens that are looked for there."""
        if not self.shape.wanted:
            return
        counts = np.fromiter((member.logits for member in members), np.int64, len(members))
        total = int(counts.sum())
        self._wanted[:total] = np.arange(total) + np.repeat(ends - np.cumsum(counts), counts)
        self._wanted[total:] = 0
        if self.shape.make == "scores":
            self._targets[:total] = np.concatenate([member.targets for member in members])
            self._targets[total:] = 0

    def _maps_of(self, attention: Any) -> int:
        assert self._number is not None  # a layer's launches are made
        if not attention.mapped:
            return 0
        # Without mirrors of their own, layers of one form see the very same ones.
        key = self._number if self.shape.keep else (attention.shape, attention.variant)
        if key not in self._shared_maps:
            maps = self._part(np.dtype(np.uint64), self.shape.sequences, 2, MAP_BYTES // 8)
            self._mapped[self._number] = attention, maps
            self._shared_maps[key] = self._address(maps)
        return self._shared_maps[key]

    def _head(self, edges: TensorEdges, head: Head) -> None:
        """Final norm and output matrix over the wanted rows first .. last-1, and what is made of their logits."""
        self._made, rows, width = head.launches, head.last - head.first, edges.output.cols
        kernels, gathered = self._kernels, self._at["gathered"]
        wanted = self._address(self._wanted) + 4 * head.first
        self._add("gather", kernels.gather_rows(rows, width, self.hidden, wanted, gathered))
        x = self._normed("output norm", "head", gathered, width, edges.norm, edges.layer.norm_eps, rows)
        self._add("head", self._product(edges.output, x, self.logits, 4 * edges.output.rows, stage="head", m=rows))
        tokens, vocabulary = self._address(self._targets) + 4 * head.first, edges.output.rows
        if self.shape.make == "tokens":
            tokens, room = self.chosen + 4 * head.first, kernels.samplers.argmax_workspace(rows)
            choose = kernels.samplers.argmax(
                self.logits,
                rows,
                self.shape.choices,
                tokens,
                workspace=self._room("head", room, room),
                pitch=vocabulary,
            )
            self._add("choose", choose)
        if self.shape.make != "logits":  # of chosen tokens it tells whether the logits are numbers
            scores = self.scores + 4 * head.first
            self._add("scores", kernels.log_likelihood(rows, vocabulary, self.logits, tokens, scores))
