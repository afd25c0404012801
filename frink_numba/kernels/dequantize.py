"""One quantization kind is one function here: from the bits that `fetch` loads to eight float32 weights.

Each follows the gguf package's arithmetic operation for operation, so that weights are bit-equal to the host's. `raw`
holds the words of kinds.PLANES in the table's order; `octet` is the number of the eight elements within their row.
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import types

from frink_numba.kernels.kinds import PLANES
from frink_numba.kernels.octet import (
    float_bits,
    half,
    make_lookup,
    make_unpack,
    multiply,
    scale,
    scale_add,
    signed_bytes,
)
from frink_numba.kernels.vector_memory import make_fetch

_nibbles = make_unpack(4)
_nibbles_minus_8 = make_unpack(4, 0, -8)
_five_bits = make_unpack(4, 1)
_five_bits_minus_16 = make_unpack(4, 1, -16)
_six_bits_minus_32 = make_unpack(4, 2, -32)
_two_bits = make_unpack(2)
_three_bits_minus_4 = make_unpack(2, 1, -4)
_codebook = make_lookup((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))

_u32, _f32, _i32 = types.uint32, types.float32, types.int32


@cuda.jit(device=True)
def _f32_octet(raw, octet):
    return (
        float_bits(raw[0]),
        float_bits(raw[1]),
        float_bits(raw[2]),
        float_bits(raw[3]),
        float_bits(raw[4]),
        float_bits(raw[5]),
        float_bits(raw[6]),
        float_bits(raw[7]),
    )


@cuda.jit(device=True)
def _f16_octet(raw, octet):
    return (
        half(raw[0]),
        half(raw[0] >> 16),
        half(raw[1]),
        half(raw[1] >> 16),
        half(raw[2]),
        half(raw[2] >> 16),
        half(raw[3]),
        half(raw[3] >> 16),
    )


@cuda.jit(device=True)
def _bf16_octet(raw, octet):
    return (
        float_bits(raw[0] << 16),
        float_bits(raw[0] & 0xFFFF0000),
        float_bits(raw[1] << 16),
        float_bits(raw[1] & 0xFFFF0000),
        float_bits(raw[2] << 16),
        float_bits(raw[2] & 0xFFFF0000),
        float_bits(raw[3] << 16),
        float_bits(raw[3] & 0xFFFF0000),
    )


@cuda.jit(device=True)
def _q4_0_octet(raw, octet):
    return scale(_nibbles_minus_8(raw[0], 0), half(raw[1]))


@cuda.jit(device=True)
def _q4_1_octet(raw, octet):
    return scale_add(_nibbles(raw[0], 0), half(raw[1]), half(raw[1] >> 16))


@cuda.jit(device=True)
def _q5_0_octet(raw, octet):
    return scale(_five_bits_minus_16(raw[0], raw[2]), half(raw[1]))


@cuda.jit(device=True)
def _q5_1_octet(raw, octet):
    return scale_add(_five_bits(raw[0], raw[2]), half(raw[1]), half(raw[1] >> 16))


@cuda.jit(device=True)
def _q8_0_octet(raw, octet):
    return scale(signed_bytes(raw[0], raw[1]), half(raw[2]))


@cuda.jit(device=True)
def _q2_k_octet(raw, octet):
    factor = multiply(half(raw[0]), _f32(_u32(raw[2] & 15)))
    minimum = multiply(half(raw[0] >> 16), _f32(_u32(raw[2] >> 4)))
    return scale_add(_two_bits(raw[1], 0), factor, -minimum)


@cuda.jit(device=True)
def _q3_k_octet(raw, octet):
    # Sub-blocks of 16 elements: their scales' low nibbles come in pairs, the two high bits in fours.
    low = _u32(raw[3] >> _u32(octet >> 1 & 1) * 4) & 15
    high = _u32(raw[4] >> _u32(octet >> 1 & 3) * 2) & 3
    factor = multiply(half(raw[1]), _f32(_i32(low | high << 4) - 32))
    return scale(_three_bits_minus_4(raw[0], raw[2]), factor)


@cuda.jit(device=True)
def _scale_and_minimum(pair, low, high, octet):
    """The factor and minimum of the 32 elements around `octet`, from their 6-bit forms (Q4_K and Q5_K)."""
    pairs = _u32(high >> _u32(octet >> 2 & 1) * 4)
    factor = multiply(half(pair), _f32(_u32((low & 15) | (pairs & 3) << 4)))
    minimum = multiply(half(pair >> 16), _f32(_u32((low >> 4) | (pairs >> 2 & 3) << 4)))
    return factor, minimum


@cuda.jit(device=True)
def _q4_k_octet(raw, octet):
    factor, minimum = _scale_and_minimum(raw[1], raw[2], raw[3], octet)
    return scale_add(_nibbles(raw[0], 0), factor, -minimum)


@cuda.jit(device=True)
def _q5_k_octet(raw, octet):
    factor, minimum = _scale_and_minimum(raw[1], raw[3], raw[4], octet)
    return scale_add(_five_bits(raw[0], raw[2]), factor, -minimum)


@cuda.jit(device=True)
def _q6_k_octet(raw, octet):
    signed = (_i32(raw[3]) ^ 128) - 128  # the byte's sign
    return scale(_six_bits_minus_32(raw[0], raw[1]), multiply(half(raw[2]), _f32(_i32(signed))))


@cuda.jit(device=True)
def _iq4_nl_octet(raw, octet):
    return scale(_codebook(raw[0]), half(raw[1]))


@cuda.jit(device=True)
def _iq4_xs_octet(raw, octet):
    low = _u32(raw[3] >> _u32(octet >> 2 & 1) * 4) & 15
    high = _u32(raw[2] >> _u32(octet >> 2 & 7) * 2) & 3
    factor = multiply(half(raw[1]), _f32(_i32(low | high << 4) - 32))
    return scale(_codebook(raw[0]), factor)


_OCTETS: dict[str, Any] = {
    "F32": _f32_octet,
    "F16": _f16_octet,
    "BF16": _bf16_octet,
    "Q4_0": _q4_0_octet,
    "Q4_1": _q4_1_octet,
    "Q5_0": _q5_0_octet,
    "Q5_1": _q5_1_octet,
    "Q8_0": _q8_0_octet,
    "Q2_K": _q2_k_octet,
    "Q3_K": _q3_k_octet,
    "Q4_K": _q4_k_octet,
    "Q5_K": _q5_k_octet,
    "Q6_K": _q6_k_octet,
    "IQ4_NL": _iq4_nl_octet,
    "IQ4_XS": _iq4_xs_octet,
}


def dequantizer(kind_name: str) -> tuple[Any, Any]:
    """The device functions of a kind: fetch(data, rows, cols, row, octet) -> raw, and decode(raw, octet) -> octet."""
    return make_fetch(PLANES[kind_name]), _OCTETS[kind_name]
