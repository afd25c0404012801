"""Attention of few query rows over the f16 mirror (generation), with RoPE and the new K/V rows in the same launch.

    y[r, h] = sum_j softmax_j(cap(scale * q[r, h] . k[j, h / group])) v[j, h / group],   j visible to row r

A *sequence* is 1 to 8 neighbouring rows of the step with a mirror of their own. Its record in the table (device memory,
read at each launch, so that a captured graph serves every position):

    bytes 0..15  int32 first_row, rows, start_pos, kv_row     16..31  uint64 k_base, v_base (this layer's mirrors)

Its float32 rows of K and V go to row first_row + kv_row and those behind it. Row r of a sequence is position
start_pos + r and sees the keys 0 .. start_pos + r (the last `window` of them). Mirrors are f16
[capacity, n_kv_heads, head_dim]; row p is position p.

In order of use:

    attentions = DecodeAttentions((9, 0), multiprocessors=132)            # per device
    attention = attentions.attention(DecodeShape(...), sequences=1, most_rows=1)
    launch = attention.bind(qkv, out, table, workspace=address, cos=..., sin=..., k_rows=..., v_rows=...)
    launch(stream)

A launch reads q, k and v as the product left them (float32 [M, (n_heads + 2 n_kv_heads) * head_dim], bias added) and
does everything: the norm of each head of q and k where the shape has one, RoPE, the f16 K and V rows at start_pos ..
start_pos + rows - 1 of the mirrors, the same rows as float32 for the host's cache, attention. Keys are cut over blocks
where there are many; the last block of a head to finish adds the parts in their order, so that results repeat bit by
bit. As in `qkv_prepare.py`, a row of K or V that f16 cannot hold becomes not-a-numbers and zeros in the mirrors.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from frink_numba.errors import ShapeError
from frink_numba.kernels import decode_attention_kernel
from frink_numba.kernels.cubins import Source
from frink_numba.kernels.decode_attention_variant import (
    ARGUMENTS,
    LEAST_KEYS,
    MOST_PARTS,
    PART_STEP,
    STEP,
    THREADS,
    WHOLE_KEYS,
    DecodeKernel,
)
from frink_numba.kernels.launch import KernelShelf, Launch, LoadedKernel
from frink_numba.kernels.thin_gemm_plan import ThinDevice
from frink_numba.layer import RopeLayout

MOST_ROWS = 8  # query rows of a sequence
_LEAST_SPREAD = 0.75  # of the multiprocessors
_LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What an attention computes, for unscaled q and k (ShapeError where `why_not` has a reason).

    rot_dim: channels that turn (0: no RoPE), even. q_norm, k_norm: an RMS norm of each head before RoPE (norm_last:
    after it), weights float32 [head_dim]. window: 0 sees all. softcap: 0 is none. scale: None is 1/sqrt(head_dim).
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float | None = None
    rot_dim: int = 0
    layout: RopeLayout = RopeLayout.NORM
    q_norm: bool = False
    k_norm: bool = False
    norm_last: bool = False
    window: int = 0
    softcap: float = 0.0

    def __post_init__(self) -> None:
        reason = why_not(self.n_heads, self.n_kv_heads, self.head_dim)
        if reason is not None:
            raise ShapeError(reason)
        if not 0 <= self.rot_dim <= self.head_dim or self.rot_dim % 2:
            raise ShapeError(f"heads of {self.head_dim} channels have no rotation of {self.rot_dim}")

    @property
    def group(self) -> int:
        """Query heads of a K/V head."""
        return self.n_heads // self.n_kv_heads


def why_not(n_heads: int, n_kv_heads: int, head_dim: int) -> str | None:
    """The reason why such heads cannot be served, or None."""
    if n_kv_heads < 1 or n_heads < 1 or n_heads % n_kv_heads:
        return f"{n_heads} query heads do not share {n_kv_heads} K/V heads evenly"
    if not 32 <= head_dim <= 256 or head_dim % 32:
        return f"the decode attention serves heads of 32, 64, ... 256 channels, not {head_dim}"
    return None


class DecodeAttentions:
    """The decode attentions of one device: kernels loaded once each. Thread-safe."""

    def __init__(self, capability: tuple[int, int], multiprocessors: int) -> None:
        self._shelf = KernelShelf(capability)
        self.multiprocessors = multiprocessors
        self._shared = ThinDevice(capability, multiprocessors).block_shared

    def attention(
        self, shape: DecodeShape, *, sequences: int, most_rows: int, parts: int | None = None
    ) -> DecodeAttention:
        """The attention of `sequences` records of the table, none with more than `most_rows` rows (1..8).

        parts: into how many the keys are cut at most (tests and benchmarks).
        """
        if sequences < 1 or not 1 <= most_rows <= MOST_ROWS:
            raise ShapeError(f"sequences of 1 to {MOST_ROWS} rows are served, got {sequences} of {most_rows}")
        variant = variant_of(shape, most_rows, self._shelf.overlap, self._shared)
        tiles = -(-most_rows * shape.group // variant.queries)
        cut = parts or self._parts(shape, sequences)
        if not 1 <= cut <= MOST_PARTS:
            raise ShapeError(f"keys are cut into 1 to {MOST_PARTS} parts, not {cut}")
        blocks = cut * tiles * shape.n_kv_heads * sequences
        spread = _halves(variant) and blocks <= self.multiprocessors
        blocks = self.multiprocessors if spread else blocks
        return DecodeAttention(shape, sequences, tiles, cut, blocks, spread, variant, self._kernel(variant))

    def alike(self, shape: DecodeShape, start: int, rows: int) -> int:
        """How many of the rows of one sequence from `start` on get the very bits that launches of their own would give.

        Of the shape, only the heads and the window count.
        """
        return cut_alike(shape.window, self._parts(shape, 1), start, rows)

    def _parts(self, shape: DecodeShape, sequences: int) -> int:
        """As many as one row of each sequence would have: the cut of the keys must not depend on the rows."""
        variant = variant_of(shape, 1, self._shelf.overlap, self._shared)
        tasks = -(-shape.group // variant.queries) * shape.n_kv_heads * sequences
        one, two = (max(1, min(MOST_PARTS, blocks * self.multiprocessors // tasks)) for blocks in (1, 2))
        # One block on nearly every multiprocessor, or two: long contexts need most of them.
        few = one < two and one * tasks < _LEAST_SPREAD * self.multiprocessors
        return two if few or not _halves(variant) else one

    def _kernel(self, variant: DecodeKernel) -> LoadedKernel:
        source, arguments = source_of(variant), ARGUMENTS
        return self._shelf.kernel(source, arguments, variant.shared, overlap=variant.overlap)

    def settle(self) -> None:
        """Load the kernels that were asked for so far; what the compiler or the driver raises."""
        self._shelf.settle()

    def close(self) -> None:
        """Unload the kernels; their launches must not run any more."""
        self._shelf.close()


def _halves(variant: DecodeKernel) -> bool:
    """Whether a block takes half of a multiprocessor, beside one of the launch before and then of the one behind."""
    return variant.overlap and variant.resident == 2


def cut_alike(window: int, parts: int, start: int, rows: int) -> int:
    """How many of `rows` rows from position `start` on have their keys cut as those of the first.

    Each query has sums of its own, in an order that follows from the cut alone.
    """
    cut = _cut(window, parts, start)
    return next((row for row in range(1, rows) if _cut(window, parts, start + row) != cut), rows)


def _cut(window: int, parts: int, position: int) -> tuple[int, int, int]:
    """Where the keys of a row begin to be read, and into how many parts of what length the kernel cuts them."""
    begin = (position + 1 - window) & -STEP if 0 < window < position + 1 else 0
    span = position + 1 - begin
    length = WHOLE_KEYS if span <= WHOLE_KEYS else max(LEAST_KEYS, -(-span // (parts * PART_STEP)) * PART_STEP)
    cut = -(-span // length)
    return begin, cut, length if cut > 1 else 0


def variant_of(shape: DecodeShape, most_rows: int, overlap: bool, block_shared: int) -> DecodeKernel:
    """What has to be compiled for a shape, where a block may have so many bytes of shared memory."""
    # Without a norm or a rotation there is no order of the two.
    norm_last = shape.norm_last and shape.rot_dim > 0 and (shape.q_norm or shape.k_norm)
    rest = (shape.rot_dim, shape.layout, shape.q_norm, shape.k_norm, shape.softcap > 0, overlap, norm_last)
    wide = DecodeKernel(shape.head_dim, 2, *rest)
    if most_rows * shape.group > 8 and wide.shared <= block_shared:
        return wide
    return DecodeKernel(shape.head_dim, 1, *rest)


def source_of(variant: DecodeKernel) -> Source:
    """What to compile for a variant. Two blocks a multiprocessor where the registers allow it."""
    build = functools.partial(decode_attention_kernel.build, variant)
    return Source(f"decode_attention {variant!r}", build, THREADS, variant.resident)


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """One attention's kernel and cut: `tiles` of queries for each K/V head, keys in at most `parts`.

    spread: it has one block a multiprocessor, which takes half of it at most; blocks without work stay until all before
    has ended. The launch behind finds equally much room everywhere, and may start early.
    """

    shape: DecodeShape
    sequences: int
    tiles: int
    parts: int
    blocks: int
    spread: bool
    variant: DecodeKernel
    kernel: LoadedKernel

    @property
    def tasks(self) -> int:
        """Groups of blocks whose sums meet."""
        return self.sequences * self.shape.n_kv_heads * self.tiles

    @property
    def _places(self) -> tuple[int, int, int]:
        """Where sums and states begin in the workspace, and its end."""
        tasks = self.tasks
        sums = -(-4 * tasks // 256) * 256
        states = sums + tasks * self.parts * self.variant.queries * self.shape.head_dim * 4
        return sums, states, states + tasks * self.parts * self.variant.queries * 8

    @property
    def counters(self) -> int:
        """Bytes at the workspace's beginning that must be zero; the rest may hold anything."""
        return self._places[0]

    @property
    def workspace(self) -> int:
        """Bytes of the workspace, zeroed once; launches leave its counters at zero. One per stream."""
        return self._places[2]

    def bind(
        self,
        qkv: int,
        out: int,
        table: int,
        *,
        workspace: int,
        cos: int = 0,
        sin: int = 0,
        q_norm: int = 0,
        k_norm: int = 0,
        eps: float = 0.0,
        sinks: int = 0,
        k_rows: int = 0,
        v_rows: int = 0,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Launch:
        """A launch with these buffers.

        qkv: float32 [M, (n_heads + 2 n_kv_heads) * head_dim]. out: f16 [M, n_heads * head_dim], true value / v_scale.
        cos, sin: float32 [M, rot_dim / 2], row by row of the step. q_norm, k_norm: float32 weights. sinks: float32
        [n_heads], or 0. k_rows, v_rows: float32 [M, n_kv_heads * head_dim], true values, or 0 where nobody wants them.
        k_scale, v_scale: powers of two; mirrors hold the true value divided by them.
        """
        shape = self.shape
        if shape.rot_dim and not (cos and sin):
            raise ShapeError("a rotation needs the tables cos and sin")
        if (shape.q_norm and not q_norm) or (shape.k_norm and not k_norm):
            raise ShapeError("a norm of q or k needs its weight")
        scale = k_scale * (shape.head_dim**-0.5 if shape.scale is None else shape.scale)
        scale, cap = (scale / shape.softcap, shape.softcap * _LOG2E) if shape.softcap > 0 else (scale * _LOG2E, 0.0)
        sums, states, _ = self._places
        addresses = (qkv, out, table, workspace, cos, sin, q_norm, k_norm, sinks, k_rows, v_rows)
        cut = (self.parts, self.tiles, shape.window, sums, states, self.tasks)
        sizes = (shape.n_heads, shape.n_kv_heads, *cut)
        return self.kernel.bind(self.blocks, *addresses, eps, scale, cap, 1 / k_scale, 1 / v_scale, *sizes)
