"""The launches of a layer, and the places in a run's scratch that they work on: what all programs are made from.

Eight launches a layer, of which the second norm is part of the product behind it on the `wgmma` tier, so seven there:

    norm -> qkv product -> QK norm, rotation, mirror -> attention -> o product, added to hidden
    norm -> gate and up product with the activation  ->  down product, added to hidden

More where matrices are of mixed kinds: Q, K and V of two kinds are one product on the `wgmma` tier and two elsewhere;
gate and up of two kinds are two products, and the activation is a launch of its own.

Products of NORMS_INSIDE do the norm in front of them themselves, one launch less each, on the `wgmma` tier from 65 rows
on, unless rows are very wide. Up to THIN_ROWS rows, five: the products norm their operands themselves, and attention
does what comes before it.

Nothing that changes from step to step is an argument of a launch: positions and the mirrors' lengths are read from
device memory, where the step's image lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from frink_numba.cuda.shapes import LayerShape
from frink_numba.cuda.tensor.lifts import GATES
from frink_numba.cuda.tensor.scratch import ATTENTION_WORKSPACE, COUNTERS, THIN_ROWS, Places
from frink_numba.cuda.tensor.weights import TensorLayer, qk_norm_form
from frink_numba.errors import DeviceError
from frink_numba.kernels import decode_attention
from frink_numba.kernels.decode_attention import DecodeShape
from frink_numba.kernels.few_gemm_plan import MOST_ROWS
from frink_numba.kernels.fused_attention import HeadShape, RopeForm
from frink_numba.kernels.gemm import DeviceWeights, HalfRows, MixedWeights, why_no_norm
from frink_numba.kernels.gemm_variant import FLAG_BYTES
from frink_numba.kernels.thin_gemm import MOST_NORM_COLUMNS, NormRows
from frink_numba.layer import RopeLayout

Launch = Callable[[int], None]

# The stages, of qkv and gate_up, that do the norms in front: where that costs no shape 1 % (docs/kernels/gemm.md).
NORMS_INSIDE = frozenset({"gate_up"})

_TICKETS = 128  # bytes of the counters


@dataclass(frozen=True, slots=True)
class RowsToNorm:
    """Rows that the next product norms on its way: into `operand`, which those after it take."""

    source: NormRows
    operand: HalfRows


@dataclass(frozen=True, slots=True)
class Op:
    """A launch, and what it does: `name`, of which layer of the run; a launch between layers has none."""

    name: str
    layer: int | None
    launch: Launch

    def __call__(self, stream: int) -> None:
        self.launch(stream)

    def __str__(self) -> str:
        return self.name if self.layer is None else f"layer {self.layer} {self.name}"


class Launches:
    """Launches over `m` rows of so many `sequences`, none with more than `most_rows`, behind the scratch's base.

    `image`: bytes that go to `step_address` before every run; its parts are reserved while launches are made.
    """

    def __init__(
        self,
        kernels: Any,
        m: int,
        base: int,
        places: Places,
        image_bytes: int,
        sequences: int = 1,
        most_rows: int = 0,
    ) -> None:
        """`places`: of the scratch's parts behind `base`."""
        self._kernels, self._m = kernels, m
        self._few = 0 if kernels.invariant else THIN_ROWS
        self.rows = m
        self._kept = m  # new K rows of a layer, and V rows, that there is room for
        self._at = {name: base + place for name, place in places.at.items()}
        self._sums = places.sums
        self.hidden, self.step_address, self.staging = (self._at[name] for name in ("hidden", "step", "staging"))
        self.counters = self._at["attention_workspace"]  # and those of all other launches behind it
        self.slots = tuple(self._at.get(f"rows{slot}", 0) for slot in range(2))  # where K/V rows are left, in turn
        self.image: np.ndarray = np.zeros(image_bytes, np.uint8)
        self._maps: dict[bytes, int] = {}
        self._constants: dict[float, int] = {}
        self._image_end: int = 0
        self._number: int | None = None  # of the layer whose launches are made
        self._spread = False  # whether its attention leaves equally much room everywhere for the launch behind
        self._sequences, self._most_rows = sequences, most_rows or m
        self._made: list[Op] = []
        self._tables: dict[Any, tuple[int, int]] = {}

    def _maps_of(self, attention: Any) -> int:
        """Where the tensor maps of the layer's mirrors lie on the device."""
        raise NotImplementedError

    # --- what the launches work on ---

    def _reserve(self, nbytes: int) -> int:
        """The offset of a new part of the image, at a multiple of 128."""
        offset, self._image_end = self._image_end, self._image_end + -(-nbytes // 128) * 128
        if self._image_end > self.image.size:
            raise DeviceError("the layers of one run differ in more ways than a step has room to describe")
        return offset

    def _part(self, dtype: np.dtype[Any], *shape: int) -> np.ndarray:
        """A new part of the image."""
        nbytes = dtype.itemsize * int(np.prod(shape))
        offset = self._reserve(nbytes)
        return self.image[offset : offset + nbytes].view(dtype).reshape(shape)

    def _address(self, part: np.ndarray) -> int:
        """Where a part of the image lies on the device."""
        return self.step_address + part.ctypes.data - self.image.ctypes.data

    def _map_address(self, maps: bytes) -> int:
        """Where equal tensor maps lie on the device."""
        if not maps:
            return 0
        offset = self._maps.get(maps)
        if offset is None:
            offset = self._maps[maps] = self._reserve(len(maps))
            self.image[offset : offset + len(maps)] = np.frombuffer(maps, np.uint8)
        return self.step_address + offset

    def _operand(self, name: str) -> HalfRows:
        at = self._at
        return HalfRows(at[name], at[f"{name}_scale"], at[f"{name}_norm"])

    def _attended(self, v_scale: float) -> HalfRows:
        """The attention's result: every row has the scale of V."""
        address = self._constants.get(v_scale)
        if address is None:
            nbytes = 4 * (-(-self._m // 256) * 256)
            offset = self._reserve(nbytes)
            self.image[offset : offset + nbytes].view(np.float32)[:] = v_scale
            address = self._constants[v_scale] = self.step_address + offset
        return HalfRows(self._at["attended"], address, self._at["normed_norm"])  # the norm is of no use to `o`

    def _rope_tables(self, layers: Sequence[TensorLayer], positions: int) -> dict[Any, tuple[int, int]]:
        tables: dict[Any, tuple[int, int]] = {}
        for layer in layers:
            rope, key = layer.layer.attention.rope, layer.rope_key
            if rope is None or key in tables:
                continue
            cos, sin = (self._at[f"{name}{len(tables)}"] for name in ("cos", "sin"))
            tables[key] = cos, sin
            frequencies, pairs = layer.vectors["inverse_frequencies"], layer.shape.rope_pairs
            scale = rope.magnitude_scale
            turns = self._kernels.rope_rows(self._m, pairs, positions, frequencies, scale, cos, sin)
            self._add("rotation", turns)
        return tables

    # --- a layer ---

    def _layer(self, layer: TensorLayer, record: int, rows: int) -> None:
        """Append the layer's launches; its K rows go to `rows`, its V rows behind them."""
        self._layer_rows(layer, record, rows)
        self._layer_rest(layer, record)

    def _layer_rows(self, layer: TensorLayer, record: int, rows: int) -> None:
        """Append the launches up to the one that makes K/V rows."""
        m, shape = self._m, layer.shape
        weight, eps = layer.vectors.get("attn_norm"), layer.layer.norm_eps
        x = self._normed("norm", "qkv", self.hidden, shape.hidden, weight, eps, m)
        width = shape.query_width + 2 * shape.kv_width
        self._add_qkv(self._qkv(layer), x, 4 * width)
        if self._decodes(layer):
            self._add("attention", self._decode_attention(layer, self._attended(layer.scales[2]), record, rows))
        else:
            self._spread = False
            self._add("prepare", self._prepare(layer, record, rows))

    def _qkv(self, layer: TensorLayer) -> Sequence[tuple[DeviceWeights | MixedWeights, int]]:
        """The products of Q, K and V, and the columns where their results begin."""
        if layer.mixed is not None and self._m > self._few and self._kernels.gemms.mixes:
            return ((layer.mixed, 0),)
        return layer.qkv

    def _add_qkv(
        self,
        parts: Sequence[tuple[DeviceWeights | MixedWeights, int]],
        x: HalfRows | NormRows | RowsToNorm,
        pitch: int,
    ) -> None:
        """Append the products of Q, K and V: one for all of a kind, and for few rows one for two kinds."""
        out, thins, cut = self._at["qkv"], self._kernels.thins, None
        if len(parts) == 2 and isinstance(x, NormRows):
            (first, _), (second, _) = parts
            pair, cut = thins.pair(first, second, self._m), thins.pair_row_groups(first, second)
            if pair is not None:
                outs = tuple(out + 4 * column for _, column in parts)
                self._add("qkv", pair.bind((first, second), x, outs, pitch))
                return
        for weights, column in parts:
            self._add("qkv", self._product(weights, x, out + 4 * column, pitch, stage="qkv", row_groups=cut))
            x = _once_normed(x)

    def _layer_rest(self, layer: TensorLayer, record: int, first: int = 0) -> None:
        """Append the launches behind it, over rows `first` .. m-1 alone, to which `record` belongs."""
        at, m, shape = self._at, self._m - first, layer.shape
        eps, vectors = layer.layer.norm_eps, layer.vectors
        attended, inner = self._attended(layer.scales[2]), self._operand("inner")
        hidden = self.hidden + 4 * shape.hidden * first
        if not self._decodes(layer):
            self._add("attention", self._attention(layer, attended, record, m))
        # Its scales are all one number, and there is always one behind the last row.
        attended = replace(attended, half=attended.half + 2 * shape.query_width * first)
        self._into_hidden("o", layer.o, attended, hidden, vectors.get("post_attn_norm"), shape, eps, m)

        x = self._normed("ffn norm", "gate_up", hidden, shape.hidden, vectors.get("ffn_norm"), eps, m)
        gate = GATES[layer.layer.ffn.activation]
        if len(layer.gate_up) == 1:
            product = self._product(
                layer.gate_up[0], x, inner.half, 2 * shape.ffn, stage="gate_up", gate=gate, out_scale=inner.scale, m=m
            )
            self._add("gate_up", product)
        else:
            for weights, name in zip(layer.gate_up, ("gate", "up"), strict=True):
                self._add(name, self._product(weights, x, at[name], 4 * shape.ffn, stage="gate_up", m=m))
                x = _once_normed(x)
            self._add("activation", self._kernels.gated_half(gate, m, shape.ffn, at["gate"], at["up"], inner))
        self._into_hidden("down", layer.down, inner, hidden, vectors.get("post_ffn_norm"), shape, eps, m)

    def _add(self, name: str, launch: Launch) -> None:
        self._made.append(Op(name, self._number, launch))

    def _normed(
        self, op: str, stage: str, hidden: int, width: int, weight: int | None, eps: float, m: int
    ) -> HalfRows | NormRows | RowsToNorm:
        """`m` hidden rows, normed where there is a weight, as an operand of the products of `stage`.

        Products of few rows norm them on the way in, and others where NORMS_INSIDE says so.
        """
        if weight is None:
            plain = self._operand("normed")
            self._add(op, self._kernels.gemms.half_rows(hidden, m, width, plain))
            return plain
        if m <= self._few and width <= MOST_NORM_COLUMNS:
            return NormRows(hidden, weight, eps)
        normed = self._operand("normed")
        if stage in NORMS_INSIDE and self._norms_inside(width, m):
            return RowsToNorm(NormRows(hidden, weight, eps), normed)
        self._add(op, self._kernels.norm_half(m, width, hidden, weight, eps, normed))
        return normed

    def _norms_inside(self, width: int, m: int) -> bool:
        """Whether products norm so many rows; not where the kernels of a step must not depend on their number."""
        kernels = self._kernels
        return not kernels.invariant and m > MOST_ROWS and why_no_norm(kernels.gemms.tier, width) is None

    def _rotation(self, layer: TensorLayer) -> tuple[int, int]:
        """Cosines and sines; zeros for a layer that is not rotated."""
        return (0, 0) if layer.rope_key is None else self._tables[layer.rope_key]

    def _decodes(self, layer: TensorLayer) -> bool:
        """Whether one launch makes q, K/V rows and attention: for few rows of a sequence, in a form that it serves."""
        return self._most_rows <= self._few and _decodes(layer)

    def _row_targets(self, layer: TensorLayer, rows: int) -> dict[str, int]:
        if not rows:  # nobody wants them
            return {}
        return {"k_rows": rows, "v_rows": rows + 4 * self._kept * layer.shape.kv_width}

    def _decode_attention(self, layer: TensorLayer, out: HalfRows, record: int, rows: int) -> Launch:
        """QK norm, rotation, mirror and attention in one launch, for few rows."""
        spec, vectors = layer.layer.attention, layer.vectors
        rope = spec.rope
        shape = DecodeShape(
            *_heads(layer.shape),
            scale=spec.scale,
            rot_dim=0 if rope is None else rope.rot_dim,
            layout=RopeLayout.NORM if rope is None else rope.layout,
            q_norm="q_norm" in vectors,
            k_norm="k_norm" in vectors,
            norm_last=spec.qk_norm_after_rope,
            window=spec.window,
            softcap=spec.softcap,
        )
        attention = self._kernels.decodes.attention(shape, sequences=self._sequences, most_rows=self._most_rows)
        self._spread = attention.spread
        cos, sin = self._rotation(layer)
        bound: Launch = attention.bind(
            self._at["qkv"],
            out.half,
            record,
            workspace=self._room("attention", attention.counters, attention.workspace),
            cos=cos,
            sin=sin,
            q_norm=vectors.get("q_norm", 0),
            k_norm=vectors.get("k_norm", 0),
            eps=layer.layer.norm_eps,
            sinks=vectors.get("sinks", 0),
            **self._row_targets(layer, rows),
            k_scale=layer.scales[1],
            v_scale=layer.scales[2],
        )
        return bound

    def _prepare(self, layer: TensorLayer, record: int, rows: int) -> Launch:
        """QK norm, rotation and the mirror's new rows."""
        spec, vectors = layer.layer.attention, layer.vectors
        rope, norm = spec.rope, qk_norm_form(layer.layer)
        form = None if rope is None else RopeForm(rope.layout, rope.rot_dim)
        prepare = self._kernels.attentions.prepare(
            HeadShape(*_heads(layer.shape)), rope=form, norm=norm, norm_last=spec.qk_norm_after_rope
        )
        cos, sin = self._rotation(layer)
        q_scale, k_scale, v_scale = layer.scales
        bound: Launch = prepare.bind(
            self._m,
            self._at["qkv"],
            self._at["q"],
            record,
            self._sequences,
            cos=cos,
            sin=sin,
            q_norm=vectors.get("q_norm", 0),
            k_norm=vectors.get("k_norm", 0),
            eps=layer.layer.norm_eps,
            **self._row_targets(layer, rows),
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return bound

    def _attention(self, layer: TensorLayer, out: HalfRows, record: int, m: int) -> Launch:
        spec, heads = layer.layer.attention, HeadShape(*_heads(layer.shape))
        windowed, capped = spec.window > 0, spec.softcap > 0
        attention = self._kernels.attentions.attention(heads, m, windowed=windowed, softcap=capped)
        if attention.workspace > ATTENTION_WORKSPACE:
            raise DeviceError(f"the attention wants a workspace of {attention.workspace} bytes")
        bound: Launch = attention.bind(
            self._at["q"],
            out.half,
            record,
            self._sequences,
            maps=self._maps_of(attention),
            workspace=self._at["attention_workspace"],
            scale=spec.scale,
            sinks=layer.vectors.get("sinks", 0),
            q_scale=layer.scales[0],
            k_scale=layer.scales[1],
            window=spec.window,
            softcap=spec.softcap,
        )
        return bound

    def _into_hidden(
        self,
        op: str,
        weights: DeviceWeights,
        x: HalfRows,
        hidden: int,
        post_norm: int | None,
        shape: LayerShape,
        eps: float,
        m: int,
    ) -> None:
        """hidden += product(x), normed first where there is a post-norm."""
        pitch = 4 * shape.hidden
        alone = op == "o" and not self._spread
        if post_norm is None:
            self._add(op, self._product(weights, x, hidden, pitch, stage=op, m=m, add=True, alone=alone))
            return
        projected = self._at["projected"]
        self._add(op, self._product(weights, x, projected, pitch, stage=op, m=m, alone=alone))
        self._add(f"{op} norm", self._kernels.norm_add(m, shape.hidden, hidden, projected, post_norm, eps))

    def _product(
        self,
        weights: DeviceWeights | MixedWeights,
        x: HalfRows | NormRows | RowsToNorm,
        out: int,
        pitch: int,
        *,
        stage: str,
        gate: str = "",
        add: bool = False,
        out_scale: int = 0,
        m: int | None = None,
        alone: bool = False,
        row_groups: int | None = None,
    ) -> Launch:
        """`stage`: whose sums the product may leave. row_groups: of a product of few rows that is to be cut so."""
        kernels, half, m = self._kernels, bool(out_scale), m or self._m
        bound: Launch
        if m <= self._few:
            norm = isinstance(x, NormRows)
            thin = kernels.thins.product(
                weights, m, gate=gate, half=half, norm=norm, alone=alone, row_groups=row_groups
            )
            bound = thin.bind(weights, x, out, pitch, add=add, out_scale=out_scale)
            return bound
        room = FLAG_BYTES + self._sums.get(stage, 0)
        how: dict[str, Any] = {"add": add, "out_scale": out_scale}
        if isinstance(x, RowsToNorm):
            how["norm"], how["tickets"], x = x.source, self._at["counters"], x.operand
        product = kernels.gemms.product(weights, m, gate=gate, half=half, norm="norm" in how, room=room)
        maps = self._map_address(product.maps(x, out, pitch))
        workspace = self._room(stage, min(FLAG_BYTES, product.workspace), product.workspace)
        bound = product.bind(weights, x, out, pitch, maps=maps, workspace=workspace, **how)
        return bound

    def _room(self, stage: str, counters: int, nbytes: int) -> int:
        """Where a workspace of `nbytes` lies that begins with `counters` bytes of counters.

        All lie over each other: the counters, which every launch leaves at zero, before one place, sums from there on.
        The first line of counters is left to products with norms, which take tickets before their predecessors end.
        """
        if not nbytes:
            return 0
        if counters > COUNTERS - _TICKETS or nbytes - counters > self._sums.get(stage, 0):
            raise DeviceError(f"a launch wants a workspace of {nbytes} bytes, {counters} of them for counters")
        return self._at["counters"] + COUNTERS - counters


def _once_normed(x: HalfRows | NormRows | RowsToNorm) -> HalfRows | NormRows:
    """What the products behind the first one take."""
    return x.operand if isinstance(x, RowsToNorm) else x


def _decodes(layer: TensorLayer) -> bool:
    """Whether the attention of few rows serves a layer: norms head by head, and a q that f16 holds as it is."""
    plain = layer.scales[0] == 1 and qk_norm_form(layer.layer) != "whole"
    return plain and decode_attention.why_not(*_heads(layer.shape)) is None


def _heads(shape: LayerShape) -> tuple[int, int, int]:
    return shape.n_heads, shape.n_kv_heads, shape.head_dim
