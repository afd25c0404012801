"""Fused causal attention on tensor cores, and the kernel before it: the one interface over the `wgmma` and `mma` tiers.

    out[i, h] = sum_j softmax_j(cap(scale * q[i, h] . k[j, g])) v[j, g],   g the K/V head of h, j visible to i

In order of use, all addresses being integers (device memory of the caller, in the caller's current context):

    attentions = Attentions("wgmma", (9, 0), multiprocessors=132)        # per device
    shape = HeadShape(n_heads=32, n_kv_heads=8, head_dim=128)
    prepare = attentions.prepare(shape, rope=RopeForm(RopeLayout.NEOX, 128), norm="head")
    first = prepare.bind(m, qkv, q, table, sequences, cos=..., sin=..., q_norm=..., k_norm=..., eps=1e-6,
                         k_rows=..., v_rows=...)
    attention = attentions.attention(shape, m, windowed=True)            # picks tiles, compiles or loads the kernel
    maps = attention.maps([Mirror(k, v, capacity), ...])                 # bytes to upload to a 128-byte aligned address
    second = attention.bind(q, out, table, sequences, maps=address, workspace=address, window=4096)
    first(stream); second(stream)                                        # graphs capture both

Buffers, M rows of one or several sequences one behind the other:

    qkv      float32 [M, (n_heads + 2 n_kv_heads) * head_dim]: q, k and v side by side, bias added
    q        f16 [M, n_heads, pitch]: rotated, divided by q_scale. `HeadShape.pitch` is head_dim, rounded up to 8
    mirror   K and V of one layer and sequence, each f16 [capacity, n_kv_heads, pitch], zeroed when allocated, at a
             multiple of 16: row p is position p, divided by k_scale or v_scale. `prepare` writes the batch's rows
    k_rows, v_rows   float32 [M, n_kv_heads, head_dim]: the batch's rows for the host's cache, or 0
    out      f16 [M, n_heads * head_dim]: the true value divided by v_scale
    table    one SEQUENCE record a sequence: where its rows lie in the batch, how many, the position of the first, and
             its mirrors. It is read on the device at every launch: what changes from step to step changes there, and
             a captured graph stays valid. Sequences with the most work first are the fastest order; `rows` may be 0.
    workspace   `attention.workspace` bytes, one per stream, zeroed once; launches leave it at zero

Scales are powers of two, constants of a layer, so that nothing overflows f16 (1.0 for sane models). A row of V with a
number that f16 cannot hold becomes zeros in the mirror and its K row not-a-number: who sees the row gets
not-a-number, who does not see it is untouched, and a stale row never spoils a sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from frink_numba.errors import ShapeError
from frink_numba.kernels import fused_attention_mma, fused_attention_wgmma, qkv_prepare
from frink_numba.kernels.cubins import Source
from frink_numba.kernels.fused_attention_plan import (
    LOG2E,
    Layout,
    MmaLayout,
    make_layout,
    make_mma_layout,
    resident_positions,
)
from frink_numba.kernels.launch import KernelShelf, Launch, LoadedKernel
from frink_numba.kernels.qkv_prepare import NORMS, QkvPrepare
from frink_numba.kernels.tma import heads_map, heads_maps
from frink_numba.layer import RopeLayout

MAX_HEAD_DIM = 256
MAX_POSITIONS = 1 << 24

# One record of the table of sequences in device memory: 32 bytes.
SEQUENCE = np.dtype(
    [
        ("first_row", "<i4"),  # of the batch
        ("rows", "<i4"),
        ("start_pos", "<i4"),  # the position of the first row: as many keys precede it in the mirror
        ("kv_row", "<i4"),  # how far behind `first_row` the float32 rows of K and V are put
        ("k_base", "<u8"),  # mirrors of this layer
        ("v_base", "<u8"),
    ]
)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of a layer: n_heads share n_kv_heads evenly, channels even and at most 256 (ShapeError otherwise)."""

    n_heads: int
    n_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        reason = why_not(self.n_heads, self.n_kv_heads, self.head_dim)
        if reason is not None:
            raise ShapeError(reason)

    @property
    def group(self) -> int:
        """Query heads of a K/V head."""
        return self.n_heads // self.n_kv_heads

    @property
    def pitch(self) -> int:
        """Elements from head to head in q and in the mirrors: what the copy engine can address."""
        return head_pitch(self.head_dim)


def head_pitch(head_dim: int) -> int:
    """Elements from head to head in q and in the mirrors: `head_dim`, rounded up to 8."""
    return -(-head_dim // 8) * 8


def why_not(n_heads: int, n_kv_heads: int, head_dim: int) -> str | None:
    """The reason why such heads cannot be served, or None."""
    if n_kv_heads < 1 or n_heads < 1 or n_heads % n_kv_heads:
        return f"{n_heads} query heads do not share {n_kv_heads} K/V heads evenly"
    if not 2 <= head_dim <= MAX_HEAD_DIM or head_dim % 2:
        return f"heads of an even number of channels up to {MAX_HEAD_DIM} are served, got {head_dim}"
    return None


@dataclass(frozen=True, slots=True)
class RopeForm:
    """Which channels turn (R17): the first `rot_dim` of a head, in pairs as `layout` says."""

    layout: RopeLayout
    rot_dim: int


@dataclass(frozen=True, slots=True)
class Mirror:
    """K and V of one layer and one sequence on the device: f16 [capacity, n_kv_heads, pitch] each."""

    k: int
    v: int
    capacity: int


def f16_scale(bound: float) -> float:
    """The smallest power of two, at least 1, by which values up to `bound` are divided to stay under 2**15."""
    if not bound >= 0 or math.isinf(bound):
        raise ShapeError(f"a bound must be a finite number, not {bound}")
    return 1.0 if bound < 2.0**15 else 2.0 ** (math.frexp(bound)[1] - 15)


def sequence_table(records: Sequence[tuple[int, int, int, int, int]]) -> bytes:
    """The table's bytes of records (first_row, rows, start_pos, k_base, v_base)."""
    table = np.zeros(len(records), SEQUENCE)
    for at, (first_row, rows, start_pos, k_base, v_base) in enumerate(records):
        if min(first_row, rows, start_pos) < 0 or start_pos + rows > MAX_POSITIONS:
            raise ShapeError(
                f"sequence {at}: rows {first_row} to {first_row + rows} at position {start_pos} are outside what the "
                f"attention serves, 0 to {MAX_POSITIONS}"
            )
        table[at] = (first_row, rows, start_pos, 0, k_base, v_base)
    return table.tobytes()


class Attentions:
    """The attention kernels of one device, loaded once each. Thread-safe."""

    def __init__(self, tier: str, capability: tuple[int, int], multiprocessors: int) -> None:
        self.tier, self.multiprocessors = tier, multiprocessors
        self._shelf = KernelShelf(capability, tier)
        self._capability = capability

    def prepare(
        self, shape: HeadShape, *, rope: RopeForm | None = None, norm: str = "", norm_last: bool = False
    ) -> Prepare:
        """The kernel that makes q and the mirrors' rows from the projections.

        norm: "" (none), "head" (RMS norm of each head, weights float32 [head_dim]) or "whole" (of all heads of q, and
        all of k: weights float32 [n_heads * head_dim] and [n_kv_heads * head_dim]); before the rotation (R14), or
        after it with `norm_last`.
        """
        if norm not in NORMS:
            raise ShapeError(f"a norm of q and k is one of {NORMS}, not {norm!r}")
        if rope is not None and not (2 <= rope.rot_dim <= shape.head_dim and rope.rot_dim % 2 == 0):
            raise ShapeError(f"heads of {shape.head_dim} channels have no rotation of {rope.rot_dim}")
        layout, rot_dim = (rope.layout, rope.rot_dim) if rope else (None, 0)
        # Without a norm or a rotation there is no order of the two.
        norm_last = norm_last and norm != "" and rope is not None
        variant = QkvPrepare(shape.head_dim, norm, layout, rot_dim, self._shelf.overlap, norm_last)
        return Prepare(shape, variant, self._kernel(variant))

    def attention(self, shape: HeadShape, m: int, *, windowed: bool = False, softcap: bool = False) -> Attention:
        """The attention of M rows in all.

        `windowed` and `softcap` say what its launches will give: kernels of their own.
        """
        if m < 1:
            raise ShapeError(f"an attention needs at least one row, got {m}")
        layout: Layout | MmaLayout
        if self.tier == "mma":
            layout = make_mma_layout(shape.head_dim, self._capability, windowed=windowed, capped=softcap)
        else:
            layout = make_layout(shape.head_dim, windowed=windowed, capped=softcap)
        return Attention(shape, m, layout, self._kernel(layout), self.multiprocessors)

    def _kernel(self, variant: QkvPrepare | Layout | MmaLayout) -> LoadedKernel:
        shelf, source = self._shelf, source_of(variant)
        if isinstance(variant, QkvPrepare):
            return shelf.kernel(source, qkv_prepare.ARGUMENTS, overlap=shelf.overlap)
        if isinstance(variant, MmaLayout):
            return shelf.kernel(source, fused_attention_mma.ARGUMENTS, variant.shared)
        return shelf.kernel(source, fused_attention_wgmma.ARGUMENTS, variant.shared, overlap=True)

    def settle(self) -> None:
        """Load the kernels that were asked for so far; what the compiler or the driver raises."""
        self._shelf.settle()

    def close(self) -> None:
        """Unload the kernels; their launches must not run any more."""
        self._shelf.close()


def source_of(variant: QkvPrepare | Layout | MmaLayout) -> Source:
    """What to compile for a variant."""
    if isinstance(variant, QkvPrepare):
        return qkv_prepare.source(variant)
    if isinstance(variant, MmaLayout):
        small = functools.partial(fused_attention_mma.build, variant)
        return Source(f"attention_mma {variant!r}", small, variant.threads, variant.blocks)
    build = functools.partial(fused_attention_wgmma.build, variant)
    return Source(f"attention_wgmma {variant!r}", build, variant.threads)


@dataclass(frozen=True, slots=True)
class Prepare:
    """QK norm, rotation, and the stores of q, the mirrors' rows and the host's K/V rows, in one kernel."""

    shape: HeadShape
    variant: QkvPrepare
    kernel: LoadedKernel

    def bind(
        self,
        m: int,
        qkv: int,
        q: int,
        table: int,
        sequences: int,
        *,
        cos: int = 0,
        sin: int = 0,
        q_norm: int = 0,
        k_norm: int = 0,
        eps: float = 0.0,
        k_rows: int = 0,
        v_rows: int = 0,
        q_scale: float = 1.0,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Launch:
        """A launch over M rows. `table` holds `sequences` records; their rows do not overlap.

        cos, sin: float32 [M, rot_dim / 2], a row a row of the batch, the magnitude scale folded in. Rows of no
        sequence are rotated into q all the same, and stored nowhere else but in k_rows and v_rows.
        """
        shape = self.shape
        if self.variant.layout is not None and not (cos and sin):
            raise ShapeError("a rotation needs the tables cos and sin")
        if self.variant.norm and not (q_norm and k_norm):
            raise ShapeError("a norm of q and k needs the weights of both")
        head = 4 * shape.head_dim
        k, v = qkv + shape.n_heads * head, qkv + (shape.n_heads + shape.n_kv_heads) * head
        addresses = (qkv, k, v, q, table, k_rows, v_rows, cos, sin, q_norm, k_norm)
        pitch = (shape.n_heads + 2 * shape.n_kv_heads) * head
        per_row = self._blocks_per_row(m, shape.n_heads + shape.n_kv_heads)
        scales = (1 / q_scale, 1 / k_scale, 1 / v_scale)
        shapes = (pitch, shape.n_heads, shape.n_kv_heads, sequences, per_row)
        return self.kernel.bind(m * per_row, *addresses, eps, *scales, *shapes)

    def _blocks_per_row(self, m: int, tasks: int) -> int:
        """Few rows are spread over more blocks."""
        if m < 1:
            raise ShapeError(f"a launch needs at least one row, got {m}")
        return 1 if self.variant.norm == "whole" or m >= 256 else -(-tasks // qkv_prepare.WARPS)


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention kernel of one shape and number of rows."""

    shape: HeadShape
    m: int
    variant: Layout | MmaLayout
    kernel: LoadedKernel
    multiprocessors: int

    @property
    def workspace(self) -> int:
        """Bytes of the workspace, zeroed once. One per stream; attentions of all shapes may share it."""
        return 0 if isinstance(self.variant, MmaLayout) else fused_attention_wgmma.WORKSPACE_BYTES

    def maps(self, mirrors: Sequence[Mirror]) -> bytes:
        """What `bind` wants at `maps` (at a multiple of 128), in the order of the table's records.

        Depends on the mirrors alone. Empty where the tier needs none.
        """
        if isinstance(self.variant, MmaLayout):
            return b""
        made = []
        for mirror in mirrors:
            sizes = (mirror.capacity, self.shape.n_kv_heads, self.shape.pitch, self.variant.keys)
            made += [heads_map(mirror.k, *sizes), heads_map(mirror.v, *sizes)]
        return b"".join(made)

    @property
    def mapped(self) -> bool:
        """Whether the kernel reads mirrors through tensor maps."""
        return not isinstance(self.variant, MmaLayout)

    def maps_at(self, k: np.ndarray, v: np.ndarray, capacity: int) -> np.ndarray:
        """`maps` of many mirrors of one capacity at addresses uint64 [n]: uint64 [n, 2, 16], K's and V's map each."""
        addresses = np.stack([k, v], axis=1).reshape(-1)
        made = heads_maps(addresses, capacity, self.shape.n_kv_heads, self.shape.pitch, self.variant.keys)
        return made.reshape(len(k), 2, -1)

    def bind(
        self,
        q: int,
        out: int,
        table: int,
        sequences: int,
        *,
        maps: int = 0,
        workspace: int = 0,
        scale: float | None = None,
        q_scale: float = 1.0,
        k_scale: float = 1.0,
        window: int = 0,
        softcap: float = 0.0,
        sinks: int = 0,
    ) -> Launch:
        """A launch with these buffers.

        scale: of the true scores, None: 1/sqrt(head_dim). window: key j is visible to position i iff
        0 <= i - j < window, 0: all up to i. softcap: scores become cap * tanh(score / cap), 0: none. sinks: float32
        [n_heads], an extra logit of each head that takes weight and gives no value, or 0.
        """
        shape = self.shape
        if window < 0 or softcap < 0 or bool(window) != self.variant.windowed or bool(softcap) != self.variant.capped:
            raise ShapeError(
                f"the attention was made for {'a' if self.variant.windowed else 'no'} window and "
                f"{'a' if self.variant.capped else 'no'} soft cap, got {window} and {softcap}"
            )
        true = 1 / math.sqrt(shape.head_dim) if scale is None else scale
        if not (true > 0 and q_scale > 0 and k_scale > 0):
            raise ShapeError(f"scales must be above zero, got {true}, of q {q_scale} and of k {k_scale}")
        factor = true * q_scale * k_scale * LOG2E
        inner = 0.0
        if softcap:
            factor, inner = softcap * LOG2E, 2 * factor / softcap
        heads = (sequences, shape.n_heads, shape.n_kv_heads, shape.group, resident_positions(shape.pitch), window)
        scales = (factor, inner)
        if isinstance(self.variant, MmaLayout):
            # As many blocks as the sequences can need, however the rows are spread over them.
            tiles = self.m * shape.group // self.variant.rows + sequences
            return self.kernel.bind(tiles * shape.n_kv_heads, q, out, table, sinks, *scales, *heads)
        return self.kernel.bind(self.multiprocessors, q, out, table, maps, workspace, sinks, *scales, *heads)
