"""Random quantized matrices of every kind: all bits of a block random, its scales finite."""

from __future__ import annotations

import numpy as np

from frink_numba.quant import KINDS, QuantMatrix

# Bytes at which a block holds a float16 scale or minimum.
_HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ1_S": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "F16": (0,),
}
# Kinds whose scale is not a float16 in one piece: IQ1_M spreads its bits, the FP4 kinds have 8-bit floats, BF16 and F32
# are the numbers themselves.
_OTHER_SCALES = ("IQ1_M", "MXFP4", "NVFP4", "BF16", "F32")

RANDOM_KINDS = (*_HALVES, *_OTHER_SCALES)


def random_matrix(kind: str, rows: int, cols: int, rng: np.random.Generator, *, extreme: bool = False) -> QuantMatrix:
    """A matrix of `kind` (one of RANDOM_KINDS) with random bits in every block.

    Scales have random signs and magnitudes from 2**-12 to 2**-5, like those of weights; with `extreme` any finite bit
    pattern: zeros, subnormals, the largest numbers.
    """
    quant_kind = KINDS[kind]
    data = rng.integers(0, 256, (rows, quant_kind.row_bytes(cols)), dtype=np.uint8)
    blocks = data.reshape(-1, quant_kind.block_bytes)
    n = len(blocks)
    for start in _HALVES.get(kind, ()):
        blocks[:, start : start + 2] = _halves(n, rng, extreme).view(np.uint8).reshape(n, 2)
    if kind == "IQ1_M":
        # Nibble i of the scale is the upper nibble of 16-bit word i of the last eight bytes.
        bits = _halves(n, rng, extreme).view(np.uint16)
        for i in range(4):
            byte = blocks[:, 49 + 2 * i]
            byte &= 0x0F
            byte |= (((bits >> (4 * i)) & 0xF) << 4).astype(np.uint8)
    elif kind == "MXFP4" and not extreme:
        blocks[:, 0] = rng.integers(127 - 12, 127 - 4, n)
    elif kind == "NVFP4" and not extreme:
        blocks[:, :4] = rng.integers(1, 0x30, (n, 4))
    elif kind == "BF16":
        blocks[:] = (_singles(n, rng, extreme).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(n, 2)
    elif kind == "F32":
        blocks[:] = _singles(n, rng, extreme).view(np.uint8).reshape(n, 4)
    return QuantMatrix(quant_kind, data, rows, cols)


def _halves(n: int, rng: np.random.Generator, extreme: bool) -> np.ndarray:
    if not extreme:
        return (rng.choice([-1.0, 1.0], n) * 2.0 ** rng.uniform(-12, -5, n)).astype(np.float16)
    bits = rng.integers(0, 1 << 16, n, dtype=np.uint16)
    bits[(bits & 0x7C00) == 0x7C00] ^= 0x4000  # neither infinite nor not a number
    return bits.view(np.float16)


def _singles(n: int, rng: np.random.Generator, extreme: bool) -> np.ndarray:
    if not extreme:
        return (rng.choice([-1.0, 1.0], n) * 2.0 ** rng.uniform(-12, -5, n)).astype(np.float32)
    bits = rng.integers(0, 1 << 32, n, dtype=np.uint32)
    bits[(bits & 0x7F800000) == 0x7F800000] ^= 0x40000000
    return bits.view(np.float32)
