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
one block of a tile of f16), `permute`, `fma2`, `mul2`, `sub2`, and the operators & | << >> on its registers. The
compiler's machine emits PTX (`gemm_emit.py`); the tests' machine computes with NumPy, so that the very code that runs
on the GPU is held against the `gguf` package without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

STEP = 64  # columns
SLAB = 64  # rows
GROUP_STEPS = 4  # steps of a super-block of 256 columns
THREADS = 128  # threads that share a slab

# Scale and offset of one block of 16 columns: (D, C) of row g and (D, C) of row g + 8, each twice in an f16x2 register.
BlockScale = tuple[Any, Any, Any, Any]


@dataclass(frozen=True, slots=True)
class FragmentKind:
    """A kind as the tensor-core kernels see it.

    Bytes of a slab's record for 256 columns: `header_bytes` * 64, then four steps of `step_bytes`. A step holds
    `scale_bytes` a row, then `planes`: vectors of so many bytes for each of the 128 threads.
    `header(m, base, row)` loads what four steps share; `scales(m, base, row, step, header)` gives a BlockScale for each
    of the step's four blocks; `codes(m, base, thread)` gives the 16 code registers. Both are None in `half`, whose
    step is the operand itself: 64 rows of 128 bytes, the 16-byte piece c of row r at c ^ (r & 7), as `wgmma` and
    `ldmatrix` read it.
    """

    name: str
    group_steps: int  # steps per record: 4 with super-blocks, else 1
    header_bytes: int
    scale_bytes: int
    planes: tuple[int, ...]
    lo: int  # mantissa bit of the codes of row g + 8
    operations: int  # that turn a step's codes into a thread's operands, on average over a record: for the plan
    codes: Callable[[Any, Any, Any], Sequence[Any]]
    header: Callable[[Any, Any, Any], Sequence[Any]] | None = None
    scales: Callable[..., Sequence[BlockScale]] | None = None

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

    def fragments(self, m: Any, base: Any, thread: Any, row: Any, step: int, header: Sequence[Any]) -> list[Any]:
        """The 16 operand registers of `thread` for one step whose data start at `base`; `row` is its row g in the slab.

        `step` counts within the record (0..3); `header` is what `self.header` gave for it.
        """
        codes = self.codes(m, base, thread)
        if self.scales is None:
            return list(codes)
        out = []
        for block, (d_a, c_a, d_b, c_b) in enumerate(self.scales(m, base, row, step, header)):
            for i in range(4):
                d, c = (d_b, c_b) if i & 1 else (d_a, c_a)
                out.append(m.fma2(codes[4 * block + i], d, c))
        return out


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


def _codes4(scale_bytes: int) -> Callable[[Any, Any, Any], list[Any]]:
    def codes(m: Any, base: Any, thread: Any) -> list[Any]:
        words = m.load128(_plane_address((16,), scale_bytes, 0, base, thread))
        return [code for word in words for code in _nibbles(word)]

    return codes


# Where bit 4 (row g) and bit 8 (row g + 8) of the registers of pair p lie in the word of fifth bits, and the shift that
# brings both into place at once: bits i and i + 4 of a half word move together.
FIFTH_BIT = tuple((i, 4 - i) for i in (0, 1, 2, 3, 8, 9, 10, 11))
# The same for the two high bits of six: bits i, i+1 to 4, 5 and i+4, i+5 to 8, 9.
HIGH_BITS = tuple((i, 4 - i) for i in (0, 2, 8, 10))
# Third bit of three: bit i to 2 and i + 2 to 4.
THIRD_BIT = tuple((i, 2 - i) for i in (0, 1, 4, 5, 8, 9, 12, 13))


def _shift(word: Any, left: int) -> Any:
    if left == 0:
        return word
    return word << left if left > 0 else word >> -left


def _codes5(scale_bytes: int) -> Callable[[Any, Any, Any], list[Any]]:
    def codes(m: Any, base: Any, thread: Any) -> list[Any]:
        words = m.load128(_plane_address((16, 4), scale_bytes, 0, base, thread))
        fifth = m.load32(_plane_address((16, 4), scale_bytes, 1, base, thread))
        low = [code for word in words for code in _nibbles(word)]
        out = []
        for pair, (_, left) in enumerate(FIFTH_BIT):
            bits = _shift(fifth, left)
            out += [low[2 * pair] | (bits & 0x00100010), low[2 * pair + 1] | (bits & 0x01000100)]
        return out

    return codes


def _codes6(scale_bytes: int) -> Callable[[Any, Any, Any], list[Any]]:
    def codes(m: Any, base: Any, thread: Any) -> list[Any]:
        words = m.load128(_plane_address((16, 8), scale_bytes, 0, base, thread))
        high = m.load64(_plane_address((16, 8), scale_bytes, 1, base, thread))
        low = [code for word in words for code in _nibbles(word)]
        out = []
        for pair in range(8):
            bits = _shift(high[pair // 4], HIGH_BITS[pair % 4][1])
            out += [low[2 * pair] | (bits & 0x00300030), low[2 * pair + 1] | (bits & 0x03000300)]
        return out

    return codes


def _codes8(scale_bytes: int) -> Callable[[Any, Any, Any], list[Any]]:
    """Bytes b0..b3 of word w are (low, high) of register 2w in b0, b2 and of register 2w+1 in b1, b3."""

    def codes(m: Any, base: Any, thread: Any) -> list[Any]:
        words = [w for i in range(2) for w in m.load128(_plane_address((16, 16), scale_bytes, i, base, thread))]
        return [m.permute(w, m.u32(0), selector) for w in words for selector in (0x4240, 0x4341)]

    return codes


def _two_bits(words: Sequence[Any]) -> list[Any]:
    out = []
    for word in words:
        for i in range(4):
            bits = _shift(word, -4 * i)
            out += [bits & 0x00030003, bits & 0x000C000C]
    return out


def _codes2(scale_bytes: int) -> Callable[[Any, Any, Any], list[Any]]:
    def codes(m: Any, base: Any, thread: Any) -> list[Any]:
        return _two_bits(m.load64(_plane_address((8,), scale_bytes, 0, base, thread)))

    return codes


def _codes3(scale_bytes: int) -> Callable[[Any, Any, Any], list[Any]]:
    def codes(m: Any, base: Any, thread: Any) -> list[Any]:
        low = _two_bits(m.load64(_plane_address((8, 4), scale_bytes, 0, base, thread)))
        third = m.load32(_plane_address((8, 4), scale_bytes, 1, base, thread))
        out = []
        for pair, (_, left) in enumerate(THIRD_BIT):
            bits = _shift(third, left)
            out += [low[2 * pair] | (bits & 0x00040004), low[2 * pair + 1] | (bits & 0x00100010)]
        return out

    return codes


# IQ4's sixteen values plus 128, four to a word (little end first). Source: kvalues_iq4nl of the GGUF format.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ4_WORDS = tuple(sum((IQ4_VALUES[4 * w + i] + 128) << (8 * i) for i in range(4)) for w in range(4))


def _codes_iq4(scale_bytes: int) -> Callable[[Any, Any, Any], list[Any]]:
    """A permute looks four nibbles up in eight bytes: one for codes 0-7, one for 8-15, a third chooses by bit 3.

    Nibble order in a word, low to high: (low, high) of register 0, of 1, of 2, of 3.
    """

    def codes(m: Any, base: Any, thread: Any) -> list[Any]:
        table = [m.u32(w) for w in _IQ4_WORDS]
        out = []
        for word in m.load128(_plane_address((16,), scale_bytes, 0, base, thread)):
            index = word & 0x77777777
            upper = ((word & 0x88888888) >> 1) | 0x32103210
            for shift in (0, 16):
                small = m.permute_by(table[0], table[1], _shift(index, -shift))
                large = m.permute_by(table[2], table[3], _shift(index, -shift))
                value = m.permute_by(small, large, _shift(upper, -shift))
                out += [m.permute(value, m.u32(0), 0x4140), m.permute(value, m.u32(0), 0x4342)]
        return out

    return codes


def _half_codes(m: Any, base: Any, thread: Any) -> list[Any]:
    return [word for block in range(4) for word in m.load_matrix(base, thread, block)]


# ---- scales ------------------------------------------------------------------------------------------------------

_LOW, _HIGH = 0x1010, 0x3232  # permutations that double the low or the high half of a word


def _symmetric32(offset: int, lo: int) -> Callable[..., list[BlockScale]]:
    """Blocks of 32 with D alone: two f16 a row and step; C = -offset * d."""

    def scales(m: Any, base: Any, row: Any, step: int, header: Sequence[Any]) -> list[BlockScale]:
        sides = []
        for side in range(2):
            word = m.load32(base + (row + 8 * side) * 4)
            factor = m.u32(half_bits(-offset * 2.0 ** ((lo if side else 0) - 24)))
            d = [m.permute(word, word, which) for which in (_LOW, _HIGH)]
            sides.append([(x, m.mul2(x, factor)) for x in d])
        return [(*sides[0][block // 2], *sides[1][block // 2]) for block in range(4)]

    return scales


def _affine32(m: Any, base: Any, row: Any, step: int, header: Sequence[Any]) -> list[BlockScale]:
    """Blocks of 32 with D and C: four f16 a row and step (D, D, C, C)."""
    sides = []
    for side in range(2):
        d, c = m.load64(base + (row + 8 * side) * 8)
        sides.append([(m.permute(d, d, which), m.permute(c, c, which)) for which in (_LOW, _HIGH)])
    return [(*sides[0][block // 2], *sides[1][block // 2]) for block in range(4)]


def _field(m: Any, word: Any, bit: int, width: int) -> Any:
    return _shift(word, -bit) & ((1 << width) - 1)


def _times(m: Any, byte_register: Any, byte: int, bias: int, d: Any) -> Any:
    """(byte - bias) * d in f16x2: 0x64 above the byte makes 1024 + byte, the difference is exact."""
    magic = m.permute(byte_register, m.u32(0x64), 0x4040 | byte * 0x0101)
    return m.mul2(m.sub2(magic, m.u32(half_bits(1024.0 + bias))), d)


def _header_k4(m: Any, base: Any, row: Any) -> list[Any]:
    return [*m.load128(base + row * 16), *m.load128(base + (row + 8) * 16)]


def _scales_k4(m: Any, base: Any, row: Any, step: int, header: Sequence[Any]) -> list[BlockScale]:
    """Q4_K and Q5_K: (D, -dmin * 2**24), then three words of 6-bit scales and minima.

    The half words of word s belong to the two sub-blocks of step s: scale at bit 0, minimum at bit 6. The upper four
    bits of the halves of all three words together are step 3's. Both sub-blocks are computed in one register, then
    spread. A minimum's bits are themselves the subnormal mn * 2**-24: one product gives C.
    """
    sides = []
    for side in range(2):
        d_word, *words = header[4 * side : 4 * side + 4]
        if step < 3:
            bits = words[step]
        else:
            bits = ((words[0] >> 12) & 0x000F000F) | ((words[1] >> 8) & 0x00F000F0) | ((words[2] >> 4) & 0x0F000F00)
        magic = (bits & 0x003F003F) | 0x64006400
        d = m.mul2(m.sub2(magic, m.u32(half_bits(1024.0))), m.permute(d_word, d_word, _LOW))
        c = m.mul2((bits >> 6) & 0x003F003F, m.permute(d_word, d_word, _HIGH))
        sides.append([(m.permute(d, d, which), m.permute(c, c, which)) for which in (_LOW, _HIGH)])
    return [(*sides[0][block // 2], *sides[1][block // 2]) for block in range(4)]


def _header_d(m: Any, base: Any, row: Any) -> list[Any]:
    return [m.load16(base + row * 2), m.load16(base + (row + 8) * 2)]


def _scales_q6(m: Any, base: Any, row: Any, step: int, header: Sequence[Any]) -> list[BlockScale]:
    """Q6_K: a signed byte (plus 128) for every 16 columns; offset 32."""
    sides = []
    for side in range(2):
        word = m.load32(base + (row + 8 * side) * 4)
        d = m.permute(header[side], header[side], _LOW)
        factor = m.u32(half_bits(-32 * 2.0 ** (4 * side - 24)))
        sides.append([_times(m, word, block, 128, d) for block in range(4)])
        sides[side] = [(x, m.mul2(x, factor)) for x in sides[side]]
    return [(*sides[0][block], *sides[1][block]) for block in range(4)]


def _header_q2(m: Any, base: Any, row: Any) -> list[Any]:
    return [m.load32(base + row * 4), m.load32(base + (row + 8) * 4)]


def _scales_q2(m: Any, base: Any, row: Any, step: int, header: Sequence[Any]) -> list[BlockScale]:
    """Q2_K: a 4-bit scale and a 4-bit minimum for every 16 columns."""
    sides = []
    for side in range(2):
        word = m.load32(base + (row + 8 * side) * 4)
        low, high = word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F
        d, dmin = (m.permute(header[side], header[side], which) for which in (_LOW, _HIGH))
        sides.append(
            [(_times(m, low, i, 0, d), m.mul2(m.permute(high, m.u32(0), 0x4040 | i * 0x0101), dmin)) for i in range(4)]
        )
    return [(*sides[0][block], *sides[1][block]) for block in range(4)]


def _header_q3(m: Any, base: Any, row: Any) -> list[Any]:
    """d, then three planes of 32 bits: 16 scales of 6 bits."""
    out = []
    for side in range(2):
        r = row + 8 * side
        out.append(m.load16(base + r * 2))
        out += [m.load32(base + (2 * SLAB + 4 * SLAB * i) + r * 4) for i in range(3)]
    return out


def _scales_q3(m: Any, base: Any, row: Any, step: int, header: Sequence[Any]) -> list[BlockScale]:
    """Q3_K: a 6-bit scale, offset 32, for every 16 columns; codes have offset 4."""
    sides = []
    for side in range(2):
        d_word, w1, w2, w3 = header[4 * side : 4 * side + 4]
        bits = (w1, m.funnel(w1, w2, 24), m.funnel(w2, w3, 16), w3 >> 8)[step]
        d = m.permute(d_word, d_word, _LOW)
        factor = m.u32(half_bits(-4 * 2.0 ** (2 * side - 24)))
        d_blocks = [_times(m, _field(m, bits, 6 * block, 6), 0, 32, d) for block in range(4)]
        sides.append([(x, m.mul2(x, factor)) for x in d_blocks])
    return [(*sides[0][block], *sides[1][block]) for block in range(4)]


def _header_iq4(m: Any, base: Any, row: Any) -> list[Any]:
    return [*m.load64(base + row * 8), *m.load64(base + (row + 8) * 8)]


def _scales_iq4(m: Any, base: Any, row: Any, step: int, header: Sequence[Any]) -> list[BlockScale]:
    """IQ4_XS: d and eight 6-bit scales, offset 32, in 64 bits; table values carry 128."""
    factor = m.u32(half_bits(-128 * 2.0**-24))
    sides = []
    for side in range(2):
        first, second = header[2 * side : 2 * side + 2]
        bits = (first >> 16, second, second >> 12, (second >> 24) | ((first >> 28) << 8))[step]
        d = m.permute(first, first, _LOW)
        d_blocks = [_times(m, _field(m, bits, 6 * sub, 6), 0, 32, d) for sub in range(2)]
        sides.append([(x, m.mul2(x, factor)) for x in d_blocks])
    return [(*sides[0][block // 2], *sides[1][block // 2]) for block in range(4)]


_ROWS = (
    # name, steps a record, header, scale bytes a row and step, planes, lo, operations, codes, header function, scales
    FragmentKind("Q4_0", 1, 0, 4, (16,), 4, 44, _codes4(4), None, _symmetric32(8, 4)),
    FragmentKind("Q4_1", 1, 0, 8, (16,), 4, 44, _codes4(8), None, _affine32),
    FragmentKind("Q5_0", 1, 0, 4, (16, 4), 4, 84, _codes5(4), None, _symmetric32(16, 4)),
    FragmentKind("Q5_1", 1, 0, 8, (16, 4), 4, 84, _codes5(8), None, _affine32),
    FragmentKind("Q8_0", 1, 0, 4, (16, 16), 0, 40, _codes8(4), None, _symmetric32(128, 0)),
    FragmentKind("IQ4_NL", 1, 0, 4, (16,), 0, 92, _codes_iq4(4), None, _symmetric32(128, 0)),
    FragmentKind("Q2_K", 4, 4, 4, (8,), 2, 88, _codes2(4), _header_q2, _scales_q2),
    FragmentKind("Q3_K", 4, 14, 0, (8, 4), 2, 132, _codes3(0), _header_q3, _scales_q3),
    FragmentKind("Q4_K", 4, 16, 0, (16,), 4, 66, _codes4(0), _header_k4, _scales_k4),
    FragmentKind("Q5_K", 4, 16, 0, (16, 4), 4, 106, _codes5(0), _header_k4, _scales_k4),
    FragmentKind("Q6_K", 4, 2, 4, (16, 8), 4, 110, _codes6(4), _header_d, _scales_q6),
    FragmentKind("IQ4_XS", 4, 8, 0, (16,), 0, 120, _codes_iq4(0), _header_iq4, _scales_iq4),
    FragmentKind("half", 1, 0, 0, (64,), 0, 0, _half_codes),
)

FRAGMENT_KINDS: dict[str, FragmentKind] = {row.name: row for row in _ROWS}

# Kinds of the file that become f16 operands at upload.
_AS_HALF = frozenset({"F16", "BF16", "F32"})


def fragment_kind(name: str) -> FragmentKind | None:
    """The row that serves GGUF kind `name`, or None when the tensor-core tiers do not know it."""
    return FRAGMENT_KINDS.get("half" if name in _AS_HALF else name)
