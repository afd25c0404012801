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
from dataclasses import dataclass

import numpy as np

from frink_numba.errors import ShapeError
from frink_numba.kernels.gemm_codes import CODES, Codes
from frink_numba.kernels.gemm_kinds import IQ4_VALUES, SLAB, STEP, FragmentKind, fragment_kind
from frink_numba.kernels.gemm_planes import code_planes, has_nibbles, nibble_plane
from frink_numba.kernels.in_threads import in_threads
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


def pack(matrices: Sequence[QuantMatrix], *, gated: bool = False, threads: int | None = None) -> PackedMatrix:
    """Repack `matrices`, all of one kind and `cols`. ShapeError names what does not fit.

    gated: exactly two matrices of equal rows, a multiple of 8: gate and up. threads: at most; None: what suits.
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
        row_scale[span], squares[span] = _pack_rows(kind, first.kind.name, raw, first.cols, data[start:stop])

    starts = range(0, slabs, per_chunk)
    # NumPy lets go of the interpreter while it works.
    in_threads(pack_chunk, starts, min(len(starts), threads or min(os.cpu_count() or 1, _THREADS)))
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


def _pack_rows(
    kind: FragmentKind, name: str, raw: np.ndarray, cols: int, data: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Fill data [slabs, slab bytes] from whole slabs of file rows; (row scales, squared norm bounds)."""
    rows = raw.shape[0]
    if kind.scales is None:
        data[...], row_scale, squares = _pack_half(name, raw, cols)
        return row_scale, squares
    block = 256 if kind.group_steps == 4 else 32
    raw = raw.reshape(rows, cols // block, -1)
    codes = CODES[name](raw)
    low_bit = np.where(np.arange(rows) & 8, kind.lo, 0)
    exponent = _row_exponents(codes, low_bit)
    steps, slabs = -(-cols // STEP), rows // SLAB
    nibbles = has_nibbles(name)
    parts = [nibble_plane(name, raw, steps)] if nibbles else code_planes(kind, name, _padded(codes.codes(), steps))
    if kind.group_steps == 4:
        header, scales = _super_block_scales(name, codes, 24 - low_bit - exponent, 24 - exponent)
        data = data.reshape(slabs, steps // 4, kind.record_size)
        data[..., : kind.header_size] = _header_bytes(header, slabs)
        # What follows a header: [slabs, records, 4, step bytes].
        steps_data: np.ndarray = data[..., kind.header_size :].reshape(slabs, steps // 4, 4, kind.step_size)
    else:
        scales = _block_scales(codes, 24 - low_bit - exponent, -exponent, steps)
        steps_data = data.reshape(slabs, steps, kind.step_size)
    if scales is not None:
        parts.insert(0, _by_slab(scales, slabs, steps))
    at = 0
    for part in parts:
        size = part.shape[-1]
        steps_data[..., at : at + size] = part.reshape(*steps_data.shape[:-1], size)
        at += size
    return np.exp2(exponent).astype(np.float32), _squared_norms(name, codes, block)


def _row_exponents(codes: Codes, low_bit: np.ndarray) -> np.ndarray:
    """The power of two of each row: its largest D = d * scale * 2**(24 - lo), and minimum, end up under 2**15."""
    largest = codes.d if codes.scale is None else codes.d * np.maximum(np.abs(codes.scale).max(axis=-1), 1)
    top = _largest_finite(largest) * np.exp2(24.0 - low_bit)
    if codes.dmin is not None:
        # Super-blocks hold dmin * 2**24 (its integers are subnormals); plain blocks hold m itself.
        top = np.maximum(top, _largest_finite(codes.dmin) * (1.0 if codes.scale is None else 2.0**24))
    _, exponent = np.frexp(top)
    return np.where(top > 0, exponent - 15, 0).astype(np.int64)


def _largest_finite(values: np.ndarray) -> np.ndarray:
    """The largest absolute value of each row, float64, without infinities and NaN."""
    size = np.abs(values)
    largest = size.max(axis=-1, initial=0.0)
    if not np.isfinite(largest).all():
        largest = np.where(np.isfinite(size), size, 0).max(axis=-1, initial=0.0)
    return largest.astype(np.float64)


def _scaled_half(values: np.ndarray, power: np.ndarray) -> np.ndarray:
    """values [rows, ...] * 2**power[row], as f16 bits (uint16). `values` are f16 numbers: float32 holds the product."""
    shape = (-1,) + (1,) * (values.ndim - 1)
    return (values * np.exp2(power.astype(np.float32)).reshape(shape)).astype(np.float16).view(np.uint16)


def _block_scales(codes: Codes, d_power: np.ndarray, m_power: np.ndarray, steps: int) -> np.ndarray:
    """Per row and step: two D, and two C where the kind has m. uint16 [rows, steps, 2 or 4]."""
    rows, blocks = codes.d.shape
    values = [_scaled_half(codes.d, d_power)]
    if codes.dmin is not None:
        values.append(_scaled_half(-codes.dmin, m_power))
    out = np.zeros((rows, steps, len(values), 2), np.uint16)
    for i, scaled in enumerate(values):
        if blocks % 2:  # half a step
            scaled = np.pad(scaled, ((0, 0), (0, 1)))
        out[:, :, i] = scaled.reshape(rows, steps, 2)
    return out.reshape(rows, steps, -1)


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
    item = {4: np.uint32, 8: np.uint64}[scales.shape[-1] * scales.itemsize]  # a row's scales of a step, moved as one
    ordered = scales.view(item).reshape(slabs, SLAB, steps).transpose(0, 2, 1)
    return np.ascontiguousarray(ordered).view(np.uint8)


def _padded(codes: np.ndarray, steps: int) -> np.ndarray:
    """Codes [rows, cols] with zeros up to whole steps."""
    rows, cols = codes.shape
    if cols == steps * STEP:
        return codes
    out = np.zeros((rows, steps * STEP), np.uint8)
    out[:, :cols] = codes
    return out


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


def _pack_half(name: str, raw: np.ndarray, cols: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
