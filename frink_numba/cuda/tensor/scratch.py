"""The scratch block of a tensor-core run: what lies where in it, from the layers' shapes and the batch alone.

A step of many rows goes through the layers in blocks of rows, one behind the other, so that its scratch is that of one
block however long it is. A block is a whole chunk where the device's memory then stays within MOST_SHARE of the
weights, else half of one; products of fewer rows would leave multiprocessors idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from frink_numba.backend import Edges
from frink_numba.cuda.arena import Layout, share
from frink_numba.cuda.parts import rope_key
from frink_numba.cuda.shapes import LayerShape
from frink_numba.cuda.tensor.cuts import Block, cut_layers, cut_rows, segment_layers
from frink_numba.cuda.tensor.edges import logits_rows
from frink_numba.cuda.tensor.weights import LayerPacks, separate_gate
from frink_numba.kernels import decode_attention
from frink_numba.kernels.fused_attention import SEQUENCE, head_pitch
from frink_numba.kernels.gemm_kinds import fragment_kind
from frink_numba.kernels.gemm_variant import FLAG_BYTES
from frink_numba.kernels.tma import MAP_BYTES
from frink_numba.layer import Layer
from frink_numba.quant import QuantMatrix

CHUNK_ROWS = 2048  # of a step, as the engine cuts prompts
_BLOCKS = (CHUNK_ROWS, CHUNK_ROWS // 2)  # rows of a block at most, the one or the other
MOST_SHARE = 0.15  # of the weights: scratch, and the K/V rows of a chunk
_ANYWAY = 58 << 20  # bytes that the scratch of a block may have, however small the weights are

STAGED_ROWS = 256  # prefix rows that go up at a time
AHEAD_ROWS = 32  # tokens that a run of one row chooses by itself at most (ahead.py)
THIN_ROWS = decode_attention.MOST_ROWS  # up to here products run at the speed of memory, with kernels of their own

ATTENTION_WORKSPACE = 1 << 16
COUNTERS = 1 << 17  # bytes that are zero between launches; sums follow them
_GROUP_SUMS = 32 << 20  # of the attention of few rows of several sequences, at most
_MOST_QUERIES = 16  # of a tile of that attention

_ATTENTION_MAPS = 4  # of a layer, at most

# The launches of a run in their order (program.py), and before them the upload of prefix rows.
_PREFIX, _NORM, _QKV, _PREPARE, _ATTENTION, _O, _O_NORM, _GATE_UP, _GATED, _DOWN, _DOWN_NORM, _HEAD = range(12)
# At which of them the contents of a part matter; what is not named here is needed from first to last. All launches
# follow each other in one stream, and each waits for the one before it.
_NEEDED = {
    "staging": (_PREFIX,),
    "normed": (_NORM, _QKV, _GATE_UP, _HEAD),
    "qkv": (_QKV, _PREPARE, _ATTENTION),  # the last for few rows of a sequence alone: one launch does both
    "q": (_PREPARE, _ATTENTION),
    "attended": (_ATTENTION, _O),
    "projected": (_O, _O_NORM, _DOWN, _DOWN_NORM),
    "gate": (_GATE_UP, _GATED),
    "up": (_GATE_UP, _GATED),
    "inner": (_GATE_UP, _GATED, _DOWN),
    "logits": (_HEAD,),
}
# Launches that leave sums for their own blocks to add, all from the same place on.
_SUMMING = {"qkv": _QKV, "attention": _ATTENTION, "o": _O, "gate_up": _GATE_UP, "down": _DOWN, "head": _HEAD}


class Product(NamedTuple):
    """A product as `Gemms.workspace` asks for it; `stage` is one of _SUMMING.

    The last `second_rows` rows are of another kind, `second`, where there is one.
    """

    stage: str
    kind: str
    rows: int
    cols: int
    second: str = ""
    second_rows: int = 0

    def workspace(self, kernels: Any, m: int) -> int:
        """Bytes that it wants for M tokens."""
        wanted: int = kernels.gemms.workspace(self.kind, self.rows, self.cols, m, self.second, self.second_rows)
        return wanted


class HeadSize(NamedTuple):
    """What makes logits of a step's last `rows` rows, `at_once` of them at a time."""

    product: Product
    rows: int
    at_once: int

    @classmethod
    def of(cls, edges: Edges | None, rows: int) -> HeadSize | None:
        """None where nobody wants logits."""
        if edges is None or not rows:
            return None
        output = edges.output
        return cls(Product("head", _form(output), output.rows, output.cols), rows, logits_rows(edges))


@dataclass(frozen=True, slots=True)
class Places:
    """Where each part begins in a block of `nbytes`, and how many bytes of sums there is room for, by launch."""

    at: Mapping[str, int]
    nbytes: int
    sums: Mapping[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class TensorScratch:
    """Sizes that a run's scratch must have room for: the largest of its layers."""

    layers: int
    hidden: int
    query_width: int
    padded_query_width: int  # heads at the pitch of `fused_attention`
    kv_width: int
    padded_kv_width: int
    ffn: int
    rope_pairs: int
    rope_tables: int
    post_norms: bool
    separate_gate: bool
    products: frozenset[Product]
    heads: frozenset[tuple[int, int, int]]  # n_heads, n_kv_heads and head_dim of the layers
    allowed: int  # bytes of a block's scratch that are worth their speed
    kernels: Any  # a TensorKernels: it knows what workspace its products want
    forced_rows: int | None = None  # of a block
    _known: dict[tuple[Any, ...], Places] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, layers: Sequence[Layer], kernels: Any, forced_rows: int | None = None) -> TensorScratch:
        """`kernels`: a TensorKernels. `forced_rows`: of a block, for who compares."""
        shapes = [LayerShape.of(layer) for layer in layers]
        padded = [shape.n_kv_heads * head_pitch(shape.head_dim) for shape in shapes]
        share_left = int(MOST_SHARE * sum(map(_file_bytes, layers))) - 4 * CHUNK_ROWS * sum(padded)
        return cls(
            layers=len(layers),
            hidden=max(shape.hidden for shape in shapes),
            query_width=max(shape.query_width for shape in shapes),
            padded_query_width=max(shape.n_heads * head_pitch(shape.head_dim) for shape in shapes),
            kv_width=max(shape.kv_width for shape in shapes),
            padded_kv_width=max(padded),
            ffn=max(shape.ffn for shape in shapes),
            rope_pairs=max(shape.rope_pairs for shape in shapes),
            rope_tables=len({rope_key(layer) for layer in layers} - {None}),
            post_norms=any(x.post_attn_norm is not None or x.post_ffn_norm is not None for x in layers),
            separate_gate=any(map(separate_gate, layers)),
            products=frozenset(product for layer in layers for product in _products(layer, kernels)),
            heads=frozenset((shape.n_heads, shape.n_kv_heads, shape.head_dim) for shape in shapes),
            allowed=max(_ANYWAY, share_left),
            kernels=kernels,
            forced_rows=forced_rows,
        )

    @property
    def block_rows(self) -> int:
        """Rows that go through the layers together, at most."""
        if self.forced_rows is not None:
            return self.forced_rows
        return next((rows for rows in _BLOCKS if self.places(rows).nbytes <= self.allowed), _BLOCKS[-1])

    def blocks(self, batch: int, logits: int = 0) -> list[Block]:
        """The blocks of a step whose last `logits` rows want logits."""
        most = self.block_rows if self.forced_rows is not None or batch > _BLOCKS[-1] else batch
        return cut_rows(batch, logits, most)

    def segments(self, rows: int) -> list[tuple[int, int]]:
        """First layer and end of each segment of a block of so many rows."""
        return cut_layers(self.layers, self._segment_layers(rows))

    def nbytes(self, batch: int, start_pos: int, edges: Edges | None = None, logits: int = 0) -> int:
        """Bytes of the whole block, wherever the batch begins."""
        sizes = {(block.rows, block.logits) for block in self.blocks(batch, logits)}
        return max(self.places(rows, HeadSize.of(edges, wanted)).nbytes for rows, wanted in sizes)

    def places(self, rows: int, head: HeadSize | None = None, most_rows: int | None = None) -> Places:
        """Where each part of `rows` rows lies; `most_rows`: of a sequence, where these are rows of several.

        Parts that are never needed at once share their room. What is zero between launches comes first and is always as
        long, so that it stays zero for the next run.
        """
        key = (rows, head, most_rows)
        if key not in self._known:
            self._known[key] = self._place(rows, head, most_rows)
        return self._known[key]

    def parts(self, rows: int, head: HeadSize | None = None) -> dict[str, int]:
        """Bytes of every part but sums, by name."""
        filled = 4 * (-(-rows // 256) * 256)  # scales and norms of rows, as long as the widest tile
        parts = {
            "step": step_bytes(rows, self.layers),
            "hidden": 4 * rows * self.hidden,
            "normed": 2 * rows * self.hidden,
            "normed_scale": filled,
            "normed_norm": filled,
            "attended": 2 * rows * self.query_width,
            "inner": 2 * rows * self.ffn,
            "inner_scale": filled,
            "inner_norm": filled,
            "qkv": 4 * rows * (self.query_width + 2 * self.kv_width),
            "staging": 8 * STAGED_ROWS * self.kv_width,
            "q": 2 * rows * self.padded_query_width,
        }
        if self.post_norms:
            parts["projected"] = 4 * rows * self.hidden
        if self.separate_gate:
            parts["gate"] = parts["up"] = 4 * rows * self.ffn
        segment = self._segment_layers(rows)
        for slot in range(min(2, len(self.segments(rows)))):
            parts[f"rows{slot}"] = segment * 8 * rows * self.kv_width
        if rows == 1:
            parts["ahead"] = self.layers * 8 * AHEAD_ROWS * self.kv_width
        for table in range(self.rope_tables):
            parts[f"cos{table}"] = parts[f"sin{table}"] = 4 * rows * self.rope_pairs
        if head is not None:
            parts["logits"] = 4 * min(head.rows, head.at_once) * head.product.rows
        return parts

    @property
    def _few(self) -> int:
        """Rows up to which the kernels for few rows are taken."""
        return 0 if self.kernels.invariant else THIN_ROWS

    def _segment_layers(self, rows: int) -> int:
        return segment_layers(self.layers, 8 * rows * self.kv_width)

    def _place(self, rows: int, head: HeadSize | None, most_rows: int | None) -> Places:
        parts = self.parts(rows, head)
        shared = {name: size for name, size in parts.items() if name in _NEEDED}
        used = _NEEDED if (most_rows or rows) <= self._few else _NEEDED | {"qkv": (_QKV, _PREPARE)}
        always, layout = Layout(), Layout()
        behind = {name: always.add(size) for name, size in parts.items() if name not in _NEEDED}
        at = {"attention_workspace": layout.add(ATTENTION_WORKSPACE), "counters": layout.add(COUNTERS)}
        first = layout.nbytes

        def total(sums: Mapping[str, int]) -> tuple[dict[str, int], int]:
            named = {f"{stage} sums": size for stage, size in sums.items()}
            needed = used | {f"{stage} sums": (_SUMMING[stage],) for stage in sums}
            return share(shared | named, needed, lowest=named)

        # Sums that would make the block larger than it may be are done without; groups may take what they want.
        sums: dict[str, int] = {}
        most = max(total(sums)[1], self.allowed - first - always.nbytes)
        for stage, size in self._sums(rows, head, most_rows).items():
            if size and (most_rows is not None or total(sums | {stage: size})[1] <= most):
                sums[stage] = size
        places, nbytes = total(sums)
        at |= {name: first + place for name, place in places.items()}
        at |= {name: first + nbytes + place for name, place in behind.items()}
        return Places(at, first + nbytes + always.nbytes, sums)

    def _sums(self, rows: int, head: HeadSize | None, most_rows: int | None) -> dict[str, int]:
        """Bytes of sums that the launches would like to leave; those of few rows must have them."""
        wanted = dict.fromkeys(_SUMMING, 0)
        if (most_rows or rows) <= self._few:
            wanted["attention"] = self._few_row_sums(rows) if most_rows is None else _GROUP_SUMS
        for product, m in self._all_products(rows, head):
            if m > self._few:
                size = product.workspace(self.kernels, m) - FLAG_BYTES
                wanted[product.stage] = max(wanted[product.stage], size)
        return wanted

    def _few_row_sums(self, rows: int) -> int:
        """Of the attention of a sequence's few rows: sums and states of each query, for each part of the keys."""
        most, parts = 0, decode_attention.MOST_PARTS
        for n_heads, n_kv_heads, head_dim in self.heads:
            queries = rows * (n_heads // n_kv_heads) + _MOST_QUERIES
            most = max(most, n_kv_heads * parts * queries * (4 * head_dim + 8))
        return most

    def _all_products(self, rows: int, head: HeadSize | None) -> Iterator[tuple[Product, int]]:
        for product in self.products:
            yield product, rows
        if head is not None:
            yield head.product, min(head.rows, head.at_once)


def step_bytes(batch: int, layers: int) -> int:
    """Most bytes of what goes up with a step: maps, a sequence record a layer, positions, tokens, scales of rows.

    A layer has up to seven products with two maps each, and a scale of V; layers of one form share them, and more than
    eight forms in one model are not known.
    """
    forms = min(layers, 8)
    maps = MAP_BYTES * (2 * 7 * forms + _ATTENTION_MAPS * layers)
    return maps + SEQUENCE.itemsize * layers + 2 * 4 * batch + forms * 4 * (-(-batch // 256) * 256) + 4096


def _products(layer: Layer, kernels: Any) -> Iterator[Product]:
    packs = LayerPacks.of(layer)
    stages = [("gate_up", part) for part in packs.gate_up]
    if packs.mixed and kernels.gemms.mixes:
        first, second = packs.qkv
        yield Product("qkv", first.kind.name, first.rows + second.rows, first.cols, second.kind.name, second.rows)
    else:
        stages += [("qkv", part) for part in packs.qkv]
    for stage, part in (*stages, ("o", packs.o), ("down", packs.down)):
        yield Product(stage, part.kind.name, part.rows, part.cols)


def _file_bytes(layer: Layer) -> int:
    """Bytes of the layer's matrices in the file."""
    return sum(matrix.data.nbytes for part in LayerPacks.of(layer).all() for matrix in part.matrices)


def _form(matrix: QuantMatrix) -> str:
    """The kind that it is packed as."""
    kind = fragment_kind(matrix.kind.name)
    assert kind is not None  # `decline` has seen it
    return kind.name
