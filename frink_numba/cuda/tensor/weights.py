"""A layer's weights on the device in the order of the tensor-core products, uploaded once (R8, R19).

Projections of one kind and width that read the same operands share a pack, and so a launch: Q, K and V; gate and up.
Where Q, K and V are of two kinds, their two packs may still be one product's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from frink_numba.cuda.arena import Layout
from frink_numba.cuda.parts import RopeKey, rope_key, vectors
from frink_numba.cuda.runtime import Runtime
from frink_numba.cuda.shapes import LayerShape
from frink_numba.cuda.tensor.lifts import LARGEST_STREAM
from frink_numba.cuda.traffic import Traffic
from frink_numba.kernels import fused_attention
from frink_numba.kernels.fused_attention import f16_scale
from frink_numba.kernels.gemm import DeviceWeights, MixedWeights, why_not, why_not_mixed
from frink_numba.kernels.gemm_kinds import SLAB, FragmentKind, fragment_kind
from frink_numba.kernels.gemm_pack import PackedMatrix, pack
from frink_numba.layer import Layer
from frink_numba.quant import QuantMatrix

_serials = itertools.count()
_BIASES = ("q_bias", "k_bias", "v_bias")


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """Matrices that become one product, and where its results begin in a row: `column`."""

    matrices: tuple[QuantMatrix, ...]
    column: int = 0
    gated: bool = False
    bias: np.ndarray | None = None  # float32, as long as the rows
    factor: float = 1.0  # of all results, the bias too

    @property
    def rows(self) -> int:
        return sum(matrix.rows for matrix in self.matrices)

    @property
    def cols(self) -> int:
        return self.matrices[0].cols

    @property
    def kind(self) -> FragmentKind:
        """What the matrices are packed as."""
        kind = fragment_kind(self.matrices[0].kind.name)
        assert kind is not None  # `decline` has seen it
        return kind

    @property
    def slabs(self) -> int:
        return -(-self.rows // SLAB)


@dataclass(frozen=True, slots=True)
class LayerPacks:
    """The products of a layer. `gate_up` is one gated pack, or two where the kinds differ or there are biases."""

    qkv: tuple[Pack, ...]
    o: Pack
    gate_up: tuple[Pack, ...]
    down: Pack

    @classmethod
    def of(cls, layer: Layer) -> LayerPacks:
        spec, expert = layer.attention, layer.ffn.experts[0]
        qkv: list[Pack] = []
        column = 0
        for members in _alike((spec.q, spec.k, spec.v)):
            named = [_BIASES[i] for i in members]
            matrices = tuple((spec.q, spec.k, spec.v)[i] for i in members)
            biases = [getattr(spec, name) for name in named]
            bias = None
            if any(b is not None for b in biases):
                parts = zip(biases, matrices, strict=True)
                bias = np.concatenate([np.zeros(m.rows, np.float32) if b is None else b for b, m in parts])
            qkv.append(Pack(matrices, column, bias=bias))
            column += sum(matrix.rows for matrix in matrices)
        gate_up: tuple[Pack, ...] = (Pack((expert.gate, expert.up), gated=True),)
        if separate_gate(layer):
            gate_up = (Pack((expert.gate,), bias=expert.gate_bias), Pack((expert.up,), bias=expert.up_bias))
        # x += residual_scale * o(..): in the product, or in the norm's weight where one stands between (`_uploaded`).
        o, down = (
            Pack((matrix,), bias=bias, factor=layer.residual_scale if norm is None else 1.0)
            for matrix, bias, norm in (
                (spec.o, spec.o_bias, layer.post_attn_norm),
                (expert.down, expert.down_bias, layer.post_ffn_norm),
            )
        )
        return cls(tuple(qkv), o, gate_up, down)

    @property
    def mixed(self) -> bool:
        """Whether Q, K and V are two packs that can be one product's."""
        return len(self.qkv) == 2 and why_not_mixed(self.qkv[0].rows, *(part.cols for part in self.qkv)) is None

    def groups(self) -> tuple[tuple[Pack, ...], ...]:
        """Packs whose rows' scales are one array on the device, and so are their biases: Q, K and V; each other one."""
        return (self.qkv, *((part,) for part in (self.o, *self.gate_up, self.down)))

    def all(self) -> tuple[Pack, ...]:
        return tuple(part for group in self.groups() for part in group)


@dataclass(frozen=True, slots=True, eq=False)
class TensorLayer:
    """A layer on the device: products, vectors by name as addresses, and what keeps their memory.

    mixed: all of qkv as one product, where they are of two kinds. scales: powers of two by which q, K and V are divided
    on the device, so that f16 holds them (design: numerics).
    """

    layer: Layer
    shape: LayerShape
    nbytes: int
    qkv: tuple[tuple[DeviceWeights, int], ...]  # with the column where the results begin
    o: DeviceWeights
    gate_up: tuple[DeviceWeights, ...]
    down: DeviceWeights
    mixed: MixedWeights | None
    vectors: dict[str, int]
    scales: tuple[float, float, float]
    rope_key: RopeKey | None
    serial: int  # of all layers ever uploaded: what is made for one never fits another
    block: Any = field(repr=False)


def group_sizes(group: Sequence[Pack]) -> list[int]:
    """Bytes of each pack's codes, then of all rows' scales, then of the biases if there are any."""
    floats = 4 * SLAB * sum(part.slabs for part in group)
    codes = [part.slabs * part.kind.slab_bytes(part.cols) for part in group]
    return [*codes, floats] + [floats] * _has_bias(group)


def decline(layer: Layer) -> str | None:
    """Why the tensor-core tiers cannot run a layer that the SIMT tier can; None when they can."""
    spec, expert = layer.attention, layer.ffn.experts[0]
    sites = {"q": spec.q, "k": spec.k, "v": spec.v, "o": spec.o, "gate": expert.gate, "up": expert.up}
    for site, matrix in {**sites, "down": expert.down}.items():
        reason = why_not(matrix.kind, matrix.cols)
        if reason is not None:
            return f"the {site} projection: {reason}"
    reason = fused_attention.why_not(spec.n_heads, spec.n_kv_heads, spec.head_dim)
    if reason is not None:
        return reason
    if spec.q.rows % 4 or spec.k.rows % 4:
        return f"projections of {spec.q.rows} and {spec.k.rows} rows, which are not multiples of 4"
    if (spec.q_norm is None) != (spec.k_norm is None) or _norm_form(layer) is None:
        return "a QK norm of q and another or none of k"
    return None


def separate_gate(layer: Layer) -> bool:
    """Whether gate and up are products of their own: of different kinds, or with a bias, which no gated product has."""
    expert = layer.ffn.experts[0]
    return expert.gate.kind != expert.up.kind or expert.gate_bias is not None or expert.up_bias is not None


def qk_norm_form(layer: Layer) -> str:
    """ "", "head" or "whole": how q and k are normed (R14)."""
    form = _norm_form(layer)
    assert form is not None  # `decline` has seen it
    return form


def layer_bytes(layer: Layer) -> int:
    """Bytes that the layer's weights take on the device."""
    return _layout(layer).nbytes


def pack_layer(layer: Layer, threads: int | None = None) -> list[PackedMatrix]:
    """The layer's products repacked, in the order of `LayerPacks.all`, by so many threads (None: what suits)."""
    return [pack(part.matrices, gated=part.gated, threads=threads) for part in LayerPacks.of(layer).all()]


def upload_layer(
    runtime: Runtime, layer: Layer, stream: Any, traffic: Traffic, packed: Sequence[PackedMatrix] | None = None
) -> TensorLayer:
    """Allocate one block for `layer` and fill it in the order of `stream`. Raises what the runtime raises.

    packed: what `pack_layer` made of it, where that is there already.
    """
    nbytes = layer_bytes(layer)
    block = runtime.device_bytes(nbytes)
    base, layout = runtime.address(block), Layout()

    def place(source: np.ndarray) -> int:
        address = base + layout.add(source.nbytes)
        runtime.send(address, np.ascontiguousarray(source), stream)
        traffic.weights_up += source.nbytes
        return address

    packs = LayerPacks.of(layer)
    made_of = dict(zip(map(id, packs.all()), packed or pack_layer(layer), strict=True))

    def weights(group: tuple[Pack, ...]) -> list[DeviceWeights]:
        made = [made_of[id(part)] for part in group]
        data = [place(each.data) for each in made]
        scales = place(
            np.concatenate([each.row_scale * np.float32(part.factor) for each, part in zip(made, group, strict=True)])
        )
        filled = [_filled(part) for part in group]
        biases = place(np.concatenate(filled)) if _has_bias(group) else 0
        out, at = [], 0
        for each, where, bias in zip(made, data, filled, strict=True):
            bound = float(np.max(np.abs(bias)))
            out.append(DeviceWeights.of(each, where, scales + at, biases and biases + at, bound))
            at += bias.nbytes
        return out

    parts, *others = map(weights, packs.groups())
    qkv = tuple(zip(parts, (part.column for part in packs.qkv), strict=True))
    (o,), *between, (down,) = others
    gate_up = tuple(part for (part,) in between)
    named = {name: place(vector) for name, vector in _uploaded(layer).items()}
    norms = [bound for part in packs.qkv for bound in made_of[id(part)].norm_bounds]
    scales = _scales(layer, norms)
    shape, serial = LayerShape.of(layer), next(_serials)
    mixed = MixedWeights(*parts) if packs.mixed else None
    return TensorLayer(
        layer, shape, nbytes, qkv, o, gate_up, down, mixed, named, scales, rope_key(layer), serial, block
    )


def _has_bias(group: Sequence[Pack]) -> bool:
    return any(part.bias is not None for part in group)


def _filled(part: Pack) -> np.ndarray:
    """float32 as long as whole slabs: the bias, times the factor; zeros where there is none."""
    filled = np.zeros(SLAB * part.slabs, np.float32)
    if part.bias is not None:
        filled[: part.bias.size] = part.bias * np.float32(part.factor)
    return filled


def _alike(matrices: Sequence[QuantMatrix]) -> list[list[int]]:
    """Neighbours of one kind, by number."""
    runs: list[list[int]] = []
    for i, matrix in enumerate(matrices):
        if runs and matrices[runs[-1][-1]].kind == matrix.kind:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def _uploaded(layer: Layer) -> dict[str, np.ndarray]:
    """The layer's vectors but the biases, which go with their packs."""
    named = {name: vector for name, vector in vectors(layer).items() if name not in _BIASES}
    for name in ("post_attn_norm", "post_ffn_norm"):
        if name in named:
            named[name] = named[name] * np.float32(layer.residual_scale)
    return named


def _layout(layer: Layer) -> Layout:
    layout = Layout()
    for group in LayerPacks.of(layer).groups():
        for size in group_sizes(group):
            layout.add(size)
    for vector in _uploaded(layer).values():
        layout.add(vector.nbytes)
    return layout


def _norm_form(layer: Layer) -> str | None:
    spec = layer.attention
    if spec.q_norm is None or spec.k_norm is None:
        return ""
    lengths = (spec.q_norm.shape[0], spec.k_norm.shape[0])
    if lengths == (spec.head_dim, spec.head_dim):
        return "head"
    return "whole" if lengths == (spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim) else None


def _scales(layer: Layer, norms: Sequence[float]) -> tuple[float, float, float]:
    """Powers of two for q, K and V from what they can reach at most.

    The 2-norm of a normed row is at most sqrt(hidden) times its largest weight (of a row of the stream itself, it is
    taken to be at most that times LARGEST_STREAM), and a product no larger than that times the 2-norm of the matrix's
    longest row. A QK norm bounds q and k by itself.
    """
    spec = layer.attention
    largest = LARGEST_STREAM if layer.attn_norm is None else float(np.abs(layer.attn_norm).max())
    row = math.sqrt(layer.hidden_dim) * largest
    biases = [0.0 if b is None else float(np.max(np.abs(b))) for b in (spec.q_bias, spec.k_bias, spec.v_bias)]
    bounds = [norm * row + bias for norm, bias in zip(norms, biases, strict=True)]
    for i, weight in enumerate((spec.q_norm, spec.k_norm)):
        if weight is not None:
            length = spec.head_dim if qk_norm_form(layer) == "head" else weight.shape[0]
            bounds[i] = math.sqrt(length) * float(np.abs(weight).max())
    turned = math.sqrt(2.0) * max(1.0, abs(spec.rope.magnitude_scale)) if spec.rope is not None else 1.0
    return f16_scale(bounds[0] * turned), f16_scale(bounds[1] * turned), f16_scale(bounds[2])
