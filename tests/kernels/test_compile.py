"""Every SIMT kernel compiles for every GPU from sm_75 on: registers bounded, nothing spilled, no accidental float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from frink_numba.kernels.kinds import PLANES
from tests.kernels.compiling import compile_to_ltoir, link, missing_tools, ptx

_PROBLEM = missing_tools()
pytestmark = pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM))

_SHARED_LIMIT = 48 << 10  # what a block may have without opting in
_f32, _f64, _i32, _i64 = "f4", "f8", "i4", "i8"


def _types(*parts: str | tuple[str, int]) -> Any:
    """A signature from scalars ("f4") and C-contiguous arrays (("f4", rank))."""
    from numba.cuda import types

    names = {"f4": types.float32, "f8": types.float64, "i4": types.int32, "i8": types.int64, "u1": types.uint8}
    return types.void(*(names[p] if isinstance(p, str) else types.Array(names[p[0]], p[1], "C") for p in parts))


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], Any]
    arguments: tuple[str | tuple[str, int], ...]
    registers: int  # at most


_rows = (_f32, 2)


def _rms_norm(name: str) -> Callable[[], Any]:
    def make() -> Any:
        from frink_numba.kernels import rms_norm

        return getattr(rms_norm, name)

    return make


def _bias() -> Any:
    from frink_numba.kernels.bias import _add_bias

    return _add_bias


def _residual() -> Any:
    from frink_numba.kernels.residual import _residual_add

    return _residual_add


def _swiglu() -> Any:
    from frink_numba.kernels.swiglu import _swiglu

    return _swiglu


def _rope() -> Any:
    from frink_numba.kernels.rope import _rope

    return _rope


def _rope_table() -> Any:
    from frink_numba.kernels.rope import _rope_table

    return _rope_table


def _attention(width: int, granule: int, capped: bool) -> Callable[[], Any]:
    def make() -> Any:
        from frink_numba.kernels.attention import attention_kernel

        return attention_kernel(width, granule, capped)

    return make


def _matmul(kind: str, tile: int, granule: int) -> Callable[[], Any]:
    def make() -> Any:
        from frink_numba.kernels.quantized_matmul import TILES, quantized_matmul_kernel

        return quantized_matmul_kernel(kind, TILES[tile], granule)

    return make


def _thin(kind: str, height: int) -> Callable[[], Any]:
    def make() -> Any:
        from frink_numba.kernels.thin_matmul import thin_matmul_kernel

        return thin_matmul_kernel(kind, height, 4)

    return make


_matmul_arguments = (_rows, ("u1", 1), _rows, _i32, _i32)
_attention_arguments = (*[(_f32, 3)] * 4, _i32, _f32, _i32, _f32)
_norm_arguments = (_rows, (_f32, 1), _f32, _rows)

SMALL = [
    Case("rms_norm, long rows", _rms_norm("_rms_norm_long_rows"), _norm_arguments, 48),
    Case("rms_norm, short rows", _rms_norm("_rms_norm_short_rows"), _norm_arguments, 48),
    Case("add_bias", _bias, (_rows, (_f32, 1)), 40),
    Case("residual_add", _residual, (_rows, _rows), 40),
    Case("swiglu", _swiglu, (_rows, _rows, _rows), 40),
    Case("rope", _rope, ((_f32, 3), _rows, _rows, _i64, _i64), 64),
]
# Registers that launch bounds leave a thread, for the blocks that a multiprocessor is to hold.
MATMUL = [
    *(Case(f"quantized_matmul {kind}", _matmul(kind, 0, 8), _matmul_arguments, 168) for kind in sorted(PLANES)),
    Case("quantized_matmul Q4_K, middle tile", _matmul("Q4_K", 1, 8), _matmul_arguments, 128),
    Case("quantized_matmul Q4_K, small tile", _matmul("Q4_K", 2, 8), _matmul_arguments, 128),
    Case("quantized_matmul F16, K of quads", _matmul("F16", 0, 4), _matmul_arguments, 168),
    Case("quantized_matmul F16, any K", _matmul("F16", 0, 1), _matmul_arguments, 168),
]
THIN = [
    Case("thin_matmul Q4_K, one row", _thin("Q4_K", 1), _matmul_arguments, 128),
    Case("thin_matmul Q6_K, two rows", _thin("Q6_K", 2), _matmul_arguments, 128),
    Case("thin_matmul Q4_K, four rows", _thin("Q4_K", 4), _matmul_arguments, 168),
    Case("thin_matmul Q3_K, eight rows", _thin("Q3_K", 8), _matmul_arguments, 255),
]
ATTENTION = [
    Case("attention, 32 channels", _attention(32, 4, False), _attention_arguments, 128),
    Case("attention, 64 channels", _attention(64, 4, False), _attention_arguments, 168),
    Case("attention, 96 channels", _attention(96, 4, False), _attention_arguments, 168),
    Case("attention, 128 channels", _attention(128, 4, False), _attention_arguments, 168),
    Case("attention, 192 channels", _attention(192, 4, False), _attention_arguments, 255),
    Case("attention, 256 channels", _attention(256, 4, False), _attention_arguments, 255),
    Case("attention, 128 channels, soft cap", _attention(128, 4, True), _attention_arguments, 255),
    Case("attention, up to 128 channels, odd", _attention(128, 1, False), _attention_arguments, 255),
]


def _check(case: Case, ltoir: bytes) -> None:
    for architecture, used in link(ltoir).items():
        where = f"{case.name} on {architecture}: {used}"
        assert used.stack == used.spill_stores == used.spill_loads == 0, where
        assert used.registers <= case.registers, where
        assert used.shared <= _SHARED_LIMIT, where


@pytest.mark.parametrize("case", [*SMALL, *MATMUL, *THIN, *ATTENTION], ids=lambda case: case.name)
def test_kernel_stays_in_registers_and_in_float32(case: Case) -> None:
    """Issue 3, compile-only tests: all architectures, zero spills; int32 * float32 and the like would be float64."""
    ltoir = compile_to_ltoir(case.make(), _types(*case.arguments))
    assert not re.search(r"\.f64\b", ptx(ltoir)), "float64 in a float32 kernel"
    _check(case, ltoir)


def test_rope_table_has_float64_angles() -> None:
    """R17: a table whose angles were float32 would be 1e-4 off at position 3000. Its range reduction needs a stack."""
    table = _types((_f64, 1), _f64, _i64, _rows, _rows)
    ltoir = compile_to_ltoir(_rope_table(), table)
    assert re.search(r"\.f64\b", ptx(ltoir))
    for architecture, used in link(ltoir).items():
        assert used.spill_stores == used.spill_loads == 0, architecture
        assert used.stack <= 64, architecture
        assert used.registers <= 64, architecture


def test_wide_loads_are_wide() -> None:
    """The product reads x and stores its tile 16 bytes at a time, and weights through the read-only path."""
    text = ptx(compile_to_ltoir(_matmul("Q4_K", 0, 8)(), _types(*_matmul_arguments)))
    assert len(re.findall(r"ld\.global\.v4\.f32", text)) == 8  # four for the first slice, four in the loop
    assert len(re.findall(r"ld\.global\.nc\.u32", text)) == 4
    assert len(re.findall(r"ld\.shared\.v4\.f32", text)) == 64
    assert "ld.global.f32" not in text
    assert "st.global.v4.f32" in text
