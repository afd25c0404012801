"""Repack weight matrices once, at upload, into the order in which the tensor-core kernels read them.

The result has the file's bytes, no more: rows are filled up to a multiple of 64, columns to a multiple of 64, and four
bytes a row hold its power of two. Record layout: `gemm_kinds.py`. Several matrices of one kind and width become one
pack: their rows follow each other (Q, K, V in one launch), or gate and up rows alternate in eights (`gated`), so that
one thread holds both factors of an output.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from frink_numba.errors import ShapeError
from frink_numba.kernels.gemm_codes import CODES, Codes
from frink_numba.kernels.gemm_kinds import (
    FIFTH_BIT,
    HIGH_BITS,
    IQ4_VALUES,
    SLAB,
    STEP,
    THIRD_BIT,
    FragmentKind,
    fragment_kind,
)
from frink_numba.quant import QuantMatrix

_CHUNK_ELEMENTS = 1 << 21  # elements that a thread repacks at a time: bounds the scratch memory
_THREADS = 8


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """Weights W [rows, cols] in fragment order. With `gated`, rows counts gate and up rows together.

    data: uint8, one record after another, slab by slab. row_scale: float32 [rows filled up to 64]: the kernel's sum
    times this is the row's product. norm_bounds: for each source matrix, no row's 2-norm is larger.
    """

    kind: FragmentKind
    rows: int
    cols: int
    gated: bool
    data: np.ndarray
    row_scale: np.ndarray
    norm_bounds: tuple[float, ...]

    @property
    def slabs(self) -> int:
        return int(self.row_scale.shape[0]) // SLAB

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes + self.row_scale.nbytes)

    @property
    def outputs(self) -> int:
        """Columns of the product's result."""
        return self.rows // 2 if self.gated else self.rows


def pack(matrices: Sequence[QuantMatrix], *, gated: bool = False) -> PackedMatrix:
    """Repack `matrices`, all of one kind and `cols`. ShapeError names what does not fit.

    gated: exactly two matrices of equal rows, a multiple of 8: gate and up.
    """
    if not matrices:
        raise ShapeError("nothing to pack: at least one matrix is needed")
    first = matrices[0]
    for matrix in matrices:
        if matrix.kind != first.kind or matrix.cols != first.cols:
            raise ShapeError(
                f"matrices of one pack have one kind and width: {first.kind} x {first.cols} against "
                f"{matrix.kind} x {matrix.cols}"
            )
    kind = fragment_kind(first.kind.name)
    if kind is None:
        raise ShapeError(f"the tensor-core kernels do not know the kind {first.kind}")
    if first.cols % 32:
        raise ShapeError(f"a pack's width is a multiple of 32, got {first.cols}")
    if gated and (len(matrices) != 2 or matrices[0].rows != matrices[1].rows or matrices[0].rows % 8):
        raise ShapeError(
            f"gate and up are two matrices of equal rows, a multiple of 8; got rows {[m.rows for m in matrices]}"
        )

    rows = sum(matrix.rows for matrix in matrices)
    slabs = -(-rows // SLAB)
    slab_bytes = kind.slab_bytes(first.cols)
    data = np.empty((slabs, slab_bytes), np.uint8)
    row_scale = np.ones(slabs * SLAB, np.float32)
    squares = np.zeros(slabs * SLAB, np.float64)
    per_chunk = max(1, _CHUNK_ELEMENTS // (SLAB * first.cols))

    def pack_chunk(start: int) -> None:
        stop = min(slabs, start + per_chunk)
        raw = _gather(matrices, gated, start * SLAB, min(rows, stop * SLAB), stop * SLAB)
        span = slice(start * SLAB, stop * SLAB)
        data[start:stop], row_scale[span], squares[span] = _pack_rows(kind, first.kind.name, raw, first.cols)

    starts = range(0, slabs, per_chunk)
    if len(starts) == 1:
        pack_chunk(0)
    else:  # NumPy lets go of the interpreter while it works
        with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1, _THREADS)) as workers:
            list(workers.map(pack_chunk, starts))
    if gated:
        sides = squares[: rows // 16 * 16].reshape(-1, 2, 8)
        bounds = tuple(math.sqrt(float(sides[:, i].max(initial=0.0))) for i in range(2))
    else:
        edges = np.cumsum([0] + [m.rows for m in matrices])
        bounds = tuple(math.sqrt(float(squares[a:b].max(initial=0.0))) for a, b in itertools.pairwise(edges))
    return PackedMatrix(kind, rows, first.cols, gated, data.reshape(-1), row_scale, bounds)


def _gather(matrices: Sequence[QuantMatrix], gated: bool, start: int, stop: int, filled: int) -> np.ndarray:
    """Rows start..stop of the pack as file bytes, zeros up to `filled`."""
    width = matrices[0].data.shape[1]
    out = np.zeros((filled - start, width), np.uint8)
    if gated:
        # Slabs begin at multiples of 64 rows, so that pairs of eights are whole here.
        pairs = out[: stop - start].reshape(-1, 2, 8, width)
        for i, matrix in enumerate(matrices):
            pairs[:, i] = matrix.data[start // 2 : stop // 2].reshape(-1, 8, width)
        return out
    offset = 0
    for matrix in matrices:
        a, b = max(start, offset), min(stop, offset + matrix.rows)
        if a < b:
            out[a - start : b - start] = matrix.data[a - offset : b - offset]
        offset += matrix.rows
    return out


def _pack_rows(kind: FragmentKind, name: str, raw: np.ndarray, cols: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(data [slabs, slab bytes], row scales, squared norm bounds) of whole slabs of file rows."""
    rows = raw.shape[0]
    if kind.scales is None:
        return _pack_half(kind, name, raw, cols)
    block = 256 if kind.group_steps == 4 else 32
    codes = CODES[name](raw.reshape(rows, cols // block, -1))
    low_bit = np.where(np.arange(rows) & 8, kind.lo, 0)
    exponent = _row_exponents(codes, low_bit)
    steps = -(-cols // STEP)
    planes = _planes(kind, name, _threads(codes.codes, steps))
    if kind.group_steps == 4:
        header, scales = _super_block_scales(name, codes, 24 - low_bit - exponent, 24 - exponent)
    else:
        header, scales = None, _block_scales(codes, 24 - low_bit - exponent, -exponent, steps)
    slabs = rows // SLAB
    parts = [] if scales is None else [_by_slab(scales, slabs, steps)]
    step_data = np.concatenate(parts + planes, axis=-1)  # [slabs, steps, step bytes]
    if header is not None:
        step_data = step_data.reshape(slabs, steps // 4, 4 * kind.step_size)
        step_data = np.concatenate([_header_bytes(header, slabs), step_data], axis=-1)
    return step_data.reshape(slabs, -1), np.exp2(exponent).astype(np.float32), _squared_norms(name, codes, block)


def _row_exponents(codes: Codes, low_bit: np.ndarray) -> np.ndarray:
    """The power of two of each row: its largest D = d * scale * 2**(24 - lo), and minimum, end up under 2**15."""
    largest = np.abs(codes.d)
    if codes.scale is not None:
        largest = largest * np.maximum(np.abs(codes.scale).max(axis=-1), 1)
    top = _largest_finite(largest) * np.exp2(24.0 - low_bit)
    if codes.dmin is not None:
        # Super-blocks hold dmin * 2**24 (its integers are subnormals); plain blocks hold m itself.
        top = np.maximum(top, _largest_finite(np.abs(codes.dmin)) * (1.0 if codes.scale is None else 2.0**24))
    _, exponent = np.frexp(top)
    return np.where(top > 0, exponent - 15, 0).astype(np.int64)


def _largest_finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, 0).astype(np.float64).max(axis=-1, initial=0.0)


def _scaled_half(values: np.ndarray, power: np.ndarray) -> np.ndarray:
    """values [rows, ...] * 2**power[row], as f16 bits (uint16)."""
    shape = (-1,) + (1,) * (values.ndim - 1)
    return np.ldexp(values.astype(np.float64), power.reshape(shape)).astype(np.float16).view(np.uint16)


def _block_scales(codes: Codes, d_power: np.ndarray, m_power: np.ndarray, steps: int) -> np.ndarray:
    """Per row and step: two D, and two C where the kind has m. uint16 [rows, steps, 2 or 4]."""
    rows, blocks = codes.d.shape
    out = np.zeros((rows, steps * 2), np.uint16)
    out[:, :blocks] = _scaled_half(codes.d, d_power)
    pairs = out.reshape(rows, steps, 2)
    if codes.dmin is None:
        return pairs
    offsets = np.zeros((rows, steps * 2), np.uint16)
    offsets[:, :blocks] = _scaled_half(-codes.dmin, m_power)
    return np.concatenate([pairs, offsets.reshape(rows, steps, 2)], axis=-1)


def _fields(values: np.ndarray, width: int) -> np.ndarray:
    """Integers [..., n] of `width` bits, least significant first, in one uint64."""
    out = np.zeros(values.shape[:-1], np.uint64)
    for i in range(values.shape[-1]):
        out |= values[..., i].astype(np.uint64) << np.uint64(width * i)
    return out


def _super_block_scales(
    name: str, codes: Codes, d_power: np.ndarray, min_power: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray | None]:
    """(header regions, each [rows, blocks, words of 2 or 4 bytes]

    scales of each step [rows, steps, bytes] or None).
    """
    assert codes.scale is not None
    rows, blocks = codes.d.shape
    d = _scaled_half(codes.d, d_power)
    if name in ("Q4_K", "Q5_K"):
        assert codes.dmin is not None
        assert codes.minimum is not None
        head = np.empty((rows, blocks, 4), np.uint32)
        head[..., 0] = d | (_scaled_half(-codes.dmin, min_power).astype(np.uint32) << 16)
        halves = (codes.scale | (codes.minimum << 6)).astype(np.uint32).reshape(rows, blocks, 4, 2)
        steps = halves[..., 0] | (halves[..., 1] << 16)
        for word in range(3):
            spare = (steps[..., 3] >> (4 * word)) & 0x000F000F
            head[..., 1 + word] = steps[..., word] | (spare << 12)
        return [head], None
    if name == "Q6_K":
        return [d[..., None]], (codes.scale + 128).astype(np.uint8).reshape(rows, blocks * 4, 4)
    if name == "Q2_K":
        assert codes.dmin is not None
        assert codes.minimum is not None
        both_d = np.stack([d, _scaled_half(-codes.dmin, min_power)], axis=-1)
        return [both_d], (codes.scale | (codes.minimum << 4)).astype(np.uint8).reshape(rows, blocks * 4, 4)
    if name == "Q3_K":
        words = _six_bit_words((codes.scale + 32).reshape(rows, blocks, 4, 4))
        return [d[..., None], *(words[..., i : i + 1] for i in range(3))], None
    assert name == "IQ4_XS"
    steps = _fields((codes.scale + 32).reshape(rows, blocks, 4, 2), 6)  # 12 bits a step
    head = np.empty((rows, blocks, 2), np.uint32)
    head[..., 0] = d | (steps[..., 0] << np.uint64(16)) | ((steps[..., 3] >> np.uint64(8)) << np.uint64(28))
    head[..., 1] = (_fields(steps[..., 1:], 12)) & np.uint64(0xFFFFFFFF)
    return [head], None


def _six_bit_words(values: np.ndarray) -> np.ndarray:
    """[rows, blocks, 4 steps, 4] six-bit integers as three words: 24 bits a step, one after another."""
    steps = _fields(values, 6).astype(np.uint64)
    low = steps[..., 0] | (steps[..., 1] << np.uint64(24)) | (steps[..., 2] << np.uint64(48))
    out = np.empty((*values.shape[:2], 3), np.uint32)
    out[..., 0] = low & np.uint64(0xFFFFFFFF)
    out[..., 1] = low >> np.uint64(32)
    out[..., 2] = (steps[..., 2] >> np.uint64(16)) | (steps[..., 3] << np.uint64(8))
    return out


def _header_bytes(regions: list[np.ndarray], slabs: int) -> np.ndarray:
    """Header regions [rows, blocks, words] as bytes [slabs, blocks, header size]: region by region, row by row."""
    out = []
    for region in regions:
        _, blocks, words = region.shape
        by_slab = region.reshape(slabs, SLAB, blocks, words).transpose(0, 2, 1, 3)
        out.append(np.ascontiguousarray(by_slab).reshape(slabs, blocks, -1).view(np.uint8))
    return np.concatenate(out, axis=-1)


def _by_slab(scales: np.ndarray, slabs: int, steps: int) -> np.ndarray:
    """[rows, steps, n] to bytes [slabs, steps, 64 * n * itemsize]."""
    ordered = scales.reshape(slabs, SLAB, steps, -1).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(ordered).reshape(slabs, steps, -1).view(np.uint8)


def _threads(values: np.ndarray, steps: int) -> np.ndarray:
    """Elements [rows, cols] in the order [register 16, half 2, slabs, steps, thread 128]: see gemm_kinds.py."""
    rows, cols = values.shape
    if cols != steps * STEP:
        values = np.pad(values, ((0, 0), (0, steps * STEP - cols)))
    # slab, warp, upper row, g | step, block, upper column, t, half
    parts = values.reshape(rows // SLAB, 4, 2, 8, steps, 4, 2, 4, 2)
    ordered = parts.transpose(
        5, 6, 2, 8, 0, 4, 1, 3, 7
    )  # block, upper column, upper row, half | slab, step, warp, g, t
    return np.ascontiguousarray(ordered).reshape(16, 2, rows // SLAB, steps, 128)


def _words(values: np.ndarray, shifts: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """OR of values[register, half] << shift over `shifts`, uint32 [slabs, steps, 128]."""
    out = np.zeros(values.shape[2:], np.uint32)
    for register, half, shift in shifts:
        out |= values[register, half].astype(np.uint32) << np.uint32(shift)
    return out


def _plane(words: list[np.ndarray]) -> np.ndarray:
    """Words of each thread side by side, as bytes [slabs, steps, 128 * 4 * words]."""
    stacked = np.stack(words, axis=-1)
    return stacked.reshape(*stacked.shape[:2], -1).view(np.uint8)


def _nibble_words(t: np.ndarray) -> np.ndarray:
    return _plane([_words(t, [(4 * s + i, e, 4 * i + 16 * e) for i in range(4) for e in range(2)]) for s in range(4)])


def _pair_bits(t: np.ndarray, table: Sequence[tuple[int, int]], apart: int) -> np.ndarray:
    """High bits of pairs of registers:

    table[p] gives the place of register 2p's, `apart` that of 2p + 1's beyond it.
    """
    words = []
    for first in range(0, 8, len(table)):
        places = [
            (2 * (first + p) + j, e, bit + apart * j + 16 * e)
            for p, (bit, _) in enumerate(table)
            for j in range(2)
            for e in range(2)
        ]
        words.append(_words(t, places))
    return _plane(words)


def _planes(kind: FragmentKind, name: str, t: np.ndarray) -> list[np.ndarray]:
    """The code planes of one kind, from codes in thread order."""
    if name.startswith("IQ4"):
        return [
            _plane([_words(t, [(4 * s + i, e, 8 * i + 4 * e) for i in range(4) for e in range(2)]) for s in range(4)])
        ]
    if kind.planes == (16,):
        return [_nibble_words(t)]
    if kind.planes == (16, 4):
        return [_nibble_words(t & np.uint8(15)), _pair_bits(t >> np.uint8(4), FIFTH_BIT, 4)]
    if kind.planes == (16, 8):
        return [_nibble_words(t & np.uint8(15)), _pair_bits(t >> np.uint8(4), HIGH_BITS, 4)]
    if kind.planes == (16, 16):
        words = [_words(t, [(2 * w + j, e, 8 * j + 16 * e) for j in range(2) for e in range(2)]) for w in range(8)]
        return [_plane(words[:4]), _plane(words[4:])]
    low = t & np.uint8(3)
    two = _plane([_words(low, [(8 * w + r, e, 2 * r + 16 * e) for r in range(8) for e in range(2)]) for w in range(2)])
    return [two] if kind.planes == (8,) else [two, _pair_bits(t >> np.uint8(2), THIRD_BIT, 2)]


def _squared_norms(name: str, codes: Codes, block: int) -> np.ndarray:
    """An upper bound of each row's squared 2-norm, from its scales alone."""
    reach = {"Q8_0": 128, "Q6_K": 32, "Q5_0": 16, "Q4_0": 8, "Q3_K": 4, "Q4_1": 15, "Q4_K": 15, "Q5_1": 31, "Q5_K": 31}
    widest = reach.get(name, 3) if not name.startswith("IQ4") else max(abs(v) for v in IQ4_VALUES)
    d = np.abs(codes.d).astype(np.float64)
    size: np.ndarray = d * widest if codes.scale is None else d[..., None] * np.abs(codes.scale) * widest
    if codes.dmin is not None:
        dmin = np.abs(codes.dmin).astype(np.float64)
        size = size + (dmin if codes.minimum is None else dmin[..., None] * codes.minimum)
    sub = block if size.ndim == 2 else block // size.shape[-1]
    return sub * np.square(size).reshape(size.shape[0], -1).sum(axis=-1)


def _pack_half(kind: FragmentKind, name: str, raw: np.ndarray, cols: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """F16 as it is; BF16 and F32 rounded to f16 after a power of two per row that puts the largest just under 2**14."""
    rows = raw.shape[0]
    exponent = np.zeros(rows, np.int64)
    if name == "F16":
        halves = raw.view(np.float16)
        values = halves.astype(np.float32)
    else:
        if name == "BF16":
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.view(np.float32)
        top = _largest_finite(np.abs(values))
        exponent = np.where(top > 0, np.frexp(top)[1] - 14, 0).astype(np.int64)
        halves = np.ldexp(values, -exponent[:, None]).astype(np.float16)
    steps = -(-cols // STEP)
    if cols != steps * STEP:
        halves = np.pad(halves, ((0, 0), (0, steps * STEP - cols)))
    pieces = halves.reshape(rows // SLAB, SLAB, steps, 8, 8).transpose(0, 2, 1, 3, 4)
    row = np.arange(SLAB)[:, None]
    data = np.ascontiguousarray(pieces[:, :, row, np.arange(8) ^ (row & 7)]).view(np.uint8).reshape(rows // SLAB, -1)
    squares = np.square(values.astype(np.float64)).sum(axis=-1)
    return data, np.exp2(exponent).astype(np.float32), squares
