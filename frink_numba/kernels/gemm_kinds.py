"""How each quantized kind becomes f16 operands inside the tensor-core GEMMs: one table row a kind.

The weights are the A operand of `mma`/`wgmma`. A warp owns 16 rows of W; lane = 4 g + t holds, for every block of 16
columns, four registers of two f16 each:

    a0 = (row g,     columns 2t, 2t+1)      a2 = (row g,     columns 2t+8, 2t+9)
    a1 = (row g + 8, columns 2t, 2t+1)      a3 = (row g + 8, columns 2t+8, 2t+9)

A *step* is 64 columns: 16 registers. A *slab* is 64 rows: four warps. `gemm_pack.py` lays the file's bits out so that a
thread finds the codes of its 16 registers in one to four vector loads.

**Codes are never converted.** An integer q at mantissa bits lo.. of an f16 word *is* the number q * 2**(lo - 24) (a
subnormal), and `fma.rn.f16x2` takes subnormals at full speed. So a register costs a mask and one fma with
D = d * 2**(24 - lo) and the offset C: (q - offset) * d comes out rounded once. Row g reads its codes at bit 0, row g +
8 at bit `lo` of the kind, because masks of neighbouring codes then need no shift; D is stored with that factor, and
with a power of two per row that puts the row's largest D just under 2**15 (`gemm_pack.py`). The GEMM's epilogue undoes
it.

The functions below are written against a *machine* `m`: loads from shared memory (`load_matrix`: the four registers of
one block of a tile of f16), `permute`, `low` and `high` (a half of a register twice: the compiler makes it part of the
instruction that uses it), `fma2`, `mul2`, `sub2`, and the operators & | << >> on its registers. The compiler's machine
emits PTX (`gemm_emit.py`); the tests' machine computes with NumPy, so that the very code that runs on the GPU is held
against the `gguf` package without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

STEP = 64  # columns
SLAB = 64  # rows
GROUP_STEPS = 4  # steps of a super-block of 256 columns
THREADS = 128  # threads that share a slab

# Scale and offset of one block of 16 columns: (D, C) of row g and (D, C) of row g + 8, each twice in an f16x2 register.
BlockScale = tuple[Any, Any, Any, Any]
Blocks = Iterator[list[Any]]


@dataclass(frozen=True, slots=True)
class FragmentKind:
    """A kind as the tensor-core kernels see it.

    Bytes of a slab's record for 256 columns: `header_bytes` * 64, then four steps of `step_bytes`. A step holds
    `scale_bytes` a row, then `planes`: vectors of so many bytes for each of the 128 threads.
    `header(m, base, row)` loads what four steps share. Block by block, so that their arithmetic can be spread between
    multiplications: `scales(m, base, row, step, header)` gives a BlockScale for each of the step's four blocks,
    `codes(m, base, thread)` the four code registers of each. Both are None in `half`, whose step is the operand
    itself: 64 rows of 128 bytes, the 16-byte piece c of row r at c ^ (r & 7), as `wgmma` and `ldmatrix` read it.
    """

    name: str
    group_steps: int  # steps per record: 4 with super-blocks, else 1
    header_bytes: int
    scale_bytes: int
    planes: tuple[int, ...]
    lo: int  # mantissa bit of the codes of row g + 8
    operations: int  # that turn a step's codes into a thread's operands, on average over a record: for the plan
    codes: Callable[[Any, Any, Any], Blocks]
    header: Callable[[Any, Any, Any], Sequence[Any]] | None = None
    scales: Callable[..., Iterator[BlockScale]] | None = None

    @property
    def header_size(self) -> int:
        return self.header_bytes * SLAB

    @property
    def step_size(self) -> int:
        return self.scale_bytes * SLAB + sum(self.planes) * THREADS

    @property
    def loaded_words(self) -> int:
        """Registers that a thread loads for one step, the header's aside."""
        return sum(self.planes) // 4 + self.scale_bytes // 2

    @property
    def record_size(self) -> int:
        return self.header_size + self.group_steps * self.step_size

    def slab_bytes(self, cols: int) -> int:
        """Bytes of 64 rows of `cols` columns (rounded up to a step)."""
        steps = -(-cols // STEP)
        return steps // self.group_steps * self.record_size

    def plane_offset(self, i: int) -> int:
        return self.scale_bytes * SLAB + sum(self.planes[:i]) * THREADS

    def blocks(self, m: Any, base: Any, thread: Any, row: Any, step: int, header: Sequence[Any]) -> Blocks:
        """The four operand registers of `thread` for each block of one step whose data start at `base`.

        `row` is its row g in the slab. `step` counts within the record (0..3); `header` is what `self.header` gave.
        """
        codes = self.codes(m, base, thread)
        if self.scales is None:
            yield from codes
            return
        for block, (d_a, c_a, d_b, c_b) in zip(codes, self.scales(m, base, row, step, header), strict=True):
            yield [m.fma2(code, *((d_b, c_b) if i & 1 else (d_a, c_a))) for i, code in enumerate(block)]

    def fragments(self, m: Any, base: Any, thread: Any, row: Any, step: int, header: Sequence[Any]) -> list[Any]:
        """The 16 operand registers of one step: those of `blocks`, one after another."""
        return [register for block in self.blocks(m, base, thread, row, step, header) for register in block]


def half_bits(value: float) -> int:
    """An f16 constant twice, as the bits of an f16x2 register; the value must be exact."""
    import numpy as np

    half = np.float16(value)
    if float(half) != value:
        raise ValueError(f"{value} is not an f16 number")
    return int(half.view(np.uint16)) * 0x10001


# ---- codes -------------------------------------------------------------------------------------------------------


def _plane_address(kind_planes: tuple[int, ...], scale_bytes: int, i: int, base: Any, thread: Any) -> Any:
    return base + (scale_bytes * SLAB + sum(kind_planes[:i]) * THREADS) + thread * kind_planes[i]


def _nibbles(word: Any) -> list[Any]:
    """Four nibbles a half word: bits 0-3 and 4-7 as they lie, 8-11 and 12-15 after a shift."""
    high = word >> 8
    return [word & 0x000F000F, word & 0x00F000F0, high & 0x000F000F, high & 0x00F000F0]


def _codes4(scale_bytes: int) -> Callable[[Any, Any, Any], Blocks]:
    def codes(m: Any, base: Any, thread: Any) -> Blocks:
        for word in m.load128(_plane_address((16,), scale_bytes, 0, base, thread)):
            yield _nibbles(word)

    return codes


# Third bit of three: bit i to 2 and i + 2 to 4.
THIRD_BIT = tuple((i, 2 - i) for i in (0, 1, 4, 5, 8, 9, 12, 13))


def _shift(word: Any, left: int) -> Any:
    if left == 0:
        return word
    return word << left if left > 0 else word >> -left


def _codes5(scale_bytes: int) -> Callable[[Any, Any, Any], Blocks]:
    """Half a block's word: register 0 at bits 0-4, 1 at 5-9, 2 at 10-14, bit 0 of register 3 at 15.

    The other four bits of register 3 are a nibble of the fifth word's half: that of block i at 4i.
    """

    def codes(m: Any, base: Any, thread: Any) -> Blocks:
        words = m.load128(_plane_address((16, 4), scale_bytes, 0, base, thread))
        rest = m.load32(_plane_address((16, 4), scale_bytes, 1, base, thread))
        for block, word in enumerate(words):
            high = word >> 10
            last = (_shift(rest, 6 - 4 * block) & 0x03C003C0) | (high & 0x00200020)
            yield [word & 0x001F001F, word & 0x03E003E0, high & 0x001F001F, last]

    return codes


def _codes6(scale_bytes: int) -> Callable[[Any, Any, Any], Blocks]:
    """Half a block's word: register 0 at bits 0-5, 2 at 6-11, bits 2-5 of register 3 at 12-15.

    Two blocks share a word whose halves have the others: bits 0, 1 of their registers 3 at 0 and at 2, their registers
    1 at 4-9 and at 10-15.
    """

    def codes(m: Any, base: Any, thread: Any) -> Blocks:
        words = m.load128(_plane_address((16, 8), scale_bytes, 0, base, thread))
        shared = m.load64(_plane_address((16, 8), scale_bytes, 1, base, thread))
        for block, word in enumerate(words):
            second, high, rest = block & 1, word >> 6, shared[block // 2]
            last = (high & 0x03C003C0) | (_shift(rest, 2 if second else 4) & 0x00300030)
            yield [word & 0x003F003F, _shift(rest, -6 * second) & 0x03F003F0, high & 0x003F003F, last]

    return codes


def _codes8(scale_bytes: int) -> Callable[[Any, Any, Any], Blocks]:
    """Bytes b0..b3 of word w are (low, high) of register 2w in b0, b2 and of register 2w+1 in b1, b3."""

    def codes(m: Any, base: Any, thread: Any) -> Blocks:
        words = [w for i in range(2) for w in m.load128(_plane_address((16, 16), scale_bytes, i, base, thread))]
        for block in range(4):
            pair = words[2 * block : 2 * block + 2]
            yield [m.permute(w, m.u32(0), selector) for w in pair for selector in (0x4240, 0x4341)]

    return codes


def _two_bits(words: Sequence[Any]) -> Blocks:
    for word in words:
        for half in range(2):
            pairs = [_shift(word, -4 * i) for i in (2 * half, 2 * half + 1)]
            yield [bits & mask for bits in pairs for mask in (0x00030003, 0x000C000C)]


def _codes2(scale_bytes: int) -> Callable[[Any, Any, Any], Blocks]:
    def codes(m: Any, base: Any, thread: Any) -> Blocks:
        return _two_bits(m.load64(_plane_address((8,), scale_bytes, 0, base, thread)))

    return codes


def _codes3(scale_bytes: int) -> Callable[[Any, Any, Any], Blocks]:
    def codes(m: Any, base: Any, thread: Any) -> Blocks:
        words = m.load64(_plane_address((8, 4), scale_bytes, 0, base, thread))
        third = m.load32(_plane_address((8, 4), scale_bytes, 1, base, thread))
        for block, low in enumerate(_two_bits(words)):
            out = []
            for pair in range(2):
                bits = _shift(third, THIRD_BIT[2 * block + pair][1])
                out += [low[2 * pair] | (bits & 0x00040004), low[2 * pair + 1] | (bits & 0x00100010)]
            yield out

    return codes


# IQ4's sixteen values plus 128, four to a word (little end first). Source: kvalues_iq4nl of the GGUF format.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ4_WORDS = tuple(sum((IQ4_VALUES[4 * w + i] + 128) << (8 * i) for i in range(4)) for w in range(4))


def _codes_iq4(scale_bytes: int) -> Callable[[Any, Any, Any], Blocks]:
    """A permute looks four nibbles up in eight bytes: one for codes 0-7, one for 8-15, a third chooses by bit 3.

    Nibble order in a word, low to high: (low, high) of register 0, of 1, of 2, of 3.
    """

    def codes(m: Any, base: Any, thread: Any) -> Blocks:
        table = [m.u32(w) for w in _IQ4_WORDS]
        for word in m.load128(_plane_address((16,), scale_bytes, 0, base, thread)):
            index = word & 0x77777777
            upper = ((word & 0x88888888) >> 1) | 0x32103210
            out = []
            for shift in (0, 16):
                small = m.permute_by(table[0], table[1], _shift(index, -shift))
                large = m.permute_by(table[2], table[3], _shift(index, -shift))
                value = m.permute_by(small, large, _shift(upper, -shift))
                out += [m.permute(value, m.u32(0), 0x4140), m.permute(value, m.u32(0), 0x4342)]
            yield out

    return codes


def _half_codes(m: Any, base: Any, thread: Any) -> Blocks:
    for block in range(4):
        yield m.load_matrix(base, thread, block)


# ---- scales ------------------------------------------------------------------------------------------------------

# Two blocks are computed at a time, one in each half of a register.


def _spread(m: Any, words: Sequence[Any], times: int = 1) -> Iterator[BlockScale]:
    """(D, C, D, C) whose low halves belong to one block, the high ones to another: each `times` in a row."""
    for half in (m.low, m.high):
        d_a, c_a, d_b, c_b = (half(word) for word in words)
        yield from [(d_a, c_a, d_b, c_b)] * times


def _with_offsets(m: Any, d: Sequence[Any], offset: int, lo: int) -> list[Any]:
    """(D, C, D, C) of rows g and g + 8 from their D: C = -offset * d."""
    factors = [m.u32(half_bits(-offset * 2.0 ** (bit - 24))) for bit in (0, lo)]
    return [x for own, factor in zip(d, factors, strict=True) for x in (own, m.mul2(own, factor))]


def _symmetric32(offset: int, lo: int) -> Callable[..., Iterator[BlockScale]]:
    """Blocks of 32 with D alone: two f16 a row and step."""

    def scales(m: Any, base: Any, row: Any, step: int, header: Sequence[Any]) -> Iterator[BlockScale]:
        words = [m.load32(base + (row + 8 * side) * 4) for side in range(2)]
        return _spread(m, _with_offsets(m, words, offset, lo), 2)

    return scales


def _affine32(m: Any, base: Any, row: Any, step: int, header: Sequence[Any]) -> Iterator[BlockScale]:
    """Blocks of 32 with D and C: four f16 a row and step (D, D, C, C)."""
    return _spread(m, [word for side in range(2) for word in m.load64(base + (row + 8 * side) * 8)], 2)


def _two_fields(word: Any, first: int) -> Any:
    """Fields `first` and `first` + 1 of six bits each, one in each half."""
    return (_shift(word, -6 * first) & 0x3F) | (_shift(word, 10 - 6 * first) & 0x003F0000)


def _two_bytes(m: Any, word: Any, first: int, above: int) -> Any:
    """Bytes `first` and `first` + 1, one in each half, with the byte `above` above them."""
    return m.permute(word, m.u32(above), 0x4140 + 0x0202 * first // 2)


def _times(m: Any, magic: Any, bias: int, d: Any) -> Any:
    """(n - bias) * d in f16x2; 0x6400 + n is the number 1024 + n, the difference is exact."""
    return m.mul2(m.sub2(magic, m.u32(half_bits(1024.0 + bias))), d)


def _header_k4(m: Any, base: Any, row: Any) -> list[Any]:
    return [*m.load128(base + row * 16), *m.load128(base + (row + 8) * 16)]


def _scales_k4(m: Any, base: Any, row: Any, step: int, header: Sequence[Any]) -> Iterator[BlockScale]:
    """Q4_K and Q5_K: (D, -dmin * 2**24), then three words of 6-bit scales and minima.

    The half words of word s belong to the two sub-blocks of step s: scale at bit 0, minimum at bit 6. The upper four
    bits of the halves of all three words together are step 3's. A minimum's bits are themselves the subnormal
    mn * 2**-24: one product gives C.
    """
    both = []
    for side in range(2):
        d_word, *words = header[4 * side : 4 * side + 4]
        if step < 3:
            bits = words[step]
        else:
            bits = ((words[0] >> 12) & 0x000F000F) | ((words[1] >> 8) & 0x00F000F0) | ((words[2] >> 4) & 0x0F000F00)
        both.append(_times(m, (bits & 0x003F003F) | 0x64006400, 0, m.low(d_word)))
        both.append(m.mul2((bits >> 6) & 0x003F003F, m.high(d_word)))
    return _spread(m, both, 2)


def _header_q6(m: Any, base: Any, row: Any) -> list[Any]:
    """d, with 0x6400 above it: the step's scales take 0x64 from there, so that nobody holds a register for it."""
    return [m.load16(base + (row + 8 * side) * 2) | 0x64000000 for side in range(2)]


def _scales_q6(m: Any, base: Any, row: Any, step: int, header: Sequence[Any]) -> Iterator[BlockScale]:
    """Q6_K: a signed byte (plus 128) for every 16 columns; offset 32."""
    words = [m.load32(base + (row + 8 * side) * 4) for side in range(2)]
    for first in (0, 2):
        # Bytes `first` and `first` + 1, one in each half, below the 0x64 of the header.
        magic = [m.permute(words[i], header[i], 0x7170 + 0x0202 * first // 2) for i in range(2)]
        d = [_times(m, magic[i], 128, m.low(header[i])) for i in range(2)]
        yield from _spread(m, _with_offsets(m, d, 32, 4))


def _header_q2(m: Any, base: Any, row: Any) -> list[Any]:
    return [m.load32(base + row * 4), m.load32(base + (row + 8) * 4)]


def _scales_q2(m: Any, base: Any, row: Any, step: int, header: Sequence[Any]) -> Iterator[BlockScale]:
    """Q2_K: a 4-bit scale and a 4-bit minimum for every 16 columns."""
    words = [m.load32(base + (row + 8 * side) * 4) for side in range(2)]
    for first in (0, 2):
        both = []
        for word, d_word in zip(words, header, strict=False):
            low, high = word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F
            both.append(_times(m, _two_bytes(m, low, first, 0x64), 0, m.low(d_word)))
            both.append(m.mul2(_two_bytes(m, high, first, 0), m.high(d_word)))
        yield from _spread(m, both)


def _header_q3(m: Any, base: Any, row: Any) -> list[Any]:
    """d, then three planes of 32 bits: 16 scales of 6 bits."""
    out = []
    for side in range(2):
        r = row + 8 * side
        out.append(m.load16(base + r * 2))
        out += [m.load32(base + (2 * SLAB + 4 * SLAB * i) + r * 4) for i in range(3)]
    return out


def _scales_q3(m: Any, base: Any, row: Any, step: int, header: Sequence[Any]) -> Iterator[BlockScale]:
    """Q3_K: a 6-bit scale, offset 32, for every 16 columns; codes have offset 4."""
    bits, d = [], []
    for side in range(2):
        d_word, w1, w2, w3 = header[4 * side : 4 * side + 4]
        bits.append((w1, m.funnel(w1, w2, 24), m.funnel(w2, w3, 16), w3 >> 8)[step])
        d.append(m.low(d_word))
    for first in (0, 2):
        scaled = [_times(m, _two_fields(bits[i], first) | 0x64006400, 32, d[i]) for i in range(2)]
        yield from _spread(m, _with_offsets(m, scaled, 4, 2))


def _header_iq4(m: Any, base: Any, row: Any) -> list[Any]:
    return [*m.load64(base + row * 8), *m.load64(base + (row + 8) * 8)]


def _scales_iq4(m: Any, base: Any, row: Any, step: int, header: Sequence[Any]) -> Iterator[BlockScale]:
    """IQ4_XS: d and eight 6-bit scales, offset 32, in 64 bits; table values carry 128."""
    d = []
    for side in range(2):
        first, second = header[2 * side : 2 * side + 2]
        bits = (first >> 16, second, second >> 12, (second >> 24) | ((first >> 28) << 8))[step]
        d.append(_times(m, _two_fields(bits, 0) | 0x64006400, 32, m.low(first)))
    return _spread(m, _with_offsets(m, d, 128, 0), 2)


_ROWS = (
    # name, steps a record, header, scale bytes a row and step, planes, lo, operations, codes, header function, scales
    FragmentKind("Q4_0", 1, 0, 4, (16,), 4, 38, _codes4(4), None, _symmetric32(8, 4)),
    FragmentKind("Q4_1", 1, 0, 8, (16,), 4, 36, _codes4(8), None, _affine32),
    FragmentKind("Q5_0", 1, 0, 4, (16, 4), 5, 50, _codes5(4), None, _symmetric32(16, 5)),
    FragmentKind("Q5_1", 1, 0, 8, (16, 4), 5, 48, _codes5(8), None, _affine32),
    FragmentKind("Q8_0", 1, 0, 4, (16, 16), 0, 34, _codes8(4), None, _symmetric32(128, 0)),
    FragmentKind("IQ4_NL", 1, 0, 4, (16,), 0, 86, _codes_iq4(4), None, _symmetric32(128, 0)),
    FragmentKind("Q2_K", 4, 4, 4, (8,), 2, 70, _codes2(4), _header_q2, _scales_q2),
    FragmentKind("Q3_K", 4, 14, 0, (8, 4), 2, 118, _codes3(0), _header_q3, _scales_q3),
    FragmentKind("Q4_K", 4, 16, 0, (16,), 4, 54, _codes4(0), _header_k4, _scales_k4),
    FragmentKind("Q5_K", 4, 16, 0, (16, 4), 5, 66, _codes5(0), _header_k4, _scales_k4),
    FragmentKind("Q6_K", 4, 2, 4, (16, 8), 4, 66, _codes6(4), _header_q6, _scales_q6),
    FragmentKind("IQ4_XS", 4, 8, 0, (16,), 0, 112, _codes_iq4(0), _header_iq4, _scales_iq4),
    FragmentKind("half", 1, 0, 0, (64,), 0, 0, _half_codes),
)

FRAGMENT_KINDS: dict[str, FragmentKind] = {row.name: row for row in _ROWS}

# Kinds of the file that become f16 operands at upload.
_AS_HALF = frozenset({"F16", "BF16", "F32"})


def fragment_kind(name: str) -> FragmentKind | None:
    """The row that serves GGUF kind `name`, or None when the tensor-core tiers do not know it."""
    return FRAGMENT_KINDS.get("half" if name in _AS_HALF else name)
