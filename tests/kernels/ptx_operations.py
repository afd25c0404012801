"""Arithmetic, comparisons, moves and conversions of PTX over NumPy arrays, for `ptx_machine.py`."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

TYPES: dict[str, Any] = {
    "u16": np.uint16, "b16": np.uint16, "u32": np.uint32, "b32": np.uint32, "s32": np.int32, "u64": np.uint64,
    "b64": np.uint64, "s64": np.int64, "f32": np.float32, "pred": bool,
}  # fmt: skip
_COMPARE = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "neu": operator.ne,
}  # fmt: skip


def float_of(register: np.ndarray) -> np.ndarray:
    return register.view(np.float32)


def literal(text: str, kind: str) -> Any:
    """A constant of PTX: 12, -1, 0x1f, 0f3F800000."""
    if text.startswith("0f"):
        return np.float32(struct.unpack("<f", struct.pack("<I", int(text[2:], 16)))[0])
    value = int(text, 0)
    if kind == "f32":
        raise ValueError(f"an integer where a float is wanted: {text}")
    wide = kind in ("u64", "b64", "s64")
    return (
        np.asarray(value & (0xFFFFFFFFFFFFFFFF if wide else 0xFFFFFFFF), np.uint64)
        .astype(np.uint64 if wide else np.uint32)
        .view(TYPES[kind] if kind not in ("u16", "b16", "pred") else np.uint32)
    )


def _exact_power(x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        out = np.exp2(x.astype(np.float64)).astype(np.float32)
    return np.where(np.abs(out) < np.float32(1.1754944e-38), np.where(np.isnan(out), out, np.float32(0)), out)


def _exact_logarithm(x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.log2(x.astype(np.float64)).astype(np.float32)


def _reciprocal(x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return (np.float32(1) / x).astype(np.float32)


def _larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.fmax(a, b)


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*values: np.ndarray) -> Any:
        with np.errstate(all="ignore"):
            return function(*values)

    return run


def _by_kind(function: Callable[..., Any], count: int, result: str | None = None) -> Any:
    """opcode.type d, a, b, ...: all of the type that the opcode ends with."""

    def make(machine: Any, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        kind = opcode.rpartition(".")[2]
        sources = [machine.operand(p, kind) for p in parts[1 : 1 + count]]
        return _into(machine, parts[0], result or kind, function, sources)

    return make


def _into(
    machine: Any, name: str, kind: str, function: Callable[..., Any], sources: list[Any]
) -> Callable[[Any], None]:
    register = machine.register(name)
    target = register if kind == "pred" else register.view(TYPES[kind]) if TYPES[kind] != np.uint16 else register
    run = _quiet(function)

    def act(active: Any) -> None:
        target[active] = run(*(source(active) for source in sources))

    return act


def _typed(function: Callable[..., Any], result: str, *kinds: str) -> Any:
    """Operands of the types given, whatever the opcode says."""

    def make(machine: Any, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        sources = [machine.operand(p, kind) for p, kind in zip(parts[1:], kinds, strict=True)]
        return _into(machine, parts[0], result, function, sources)

    return make


def _compare(machine: Any, opcode: str, parts: list[str]) -> Callable[[Any], None]:
    _, comparison, kind = opcode.split(".")[:3]
    sources = [machine.operand(p, kind) for p in parts[1:3]]
    function = _COMPARE[comparison]
    return _into(machine, parts[0], "pred", function, sources)


def _select(machine: Any, opcode: str, parts: list[str]) -> Callable[[Any], None]:
    kind = opcode.rpartition(".")[2]
    sources = [machine.operand(parts[1], kind), machine.operand(parts[2], kind), machine.operand(parts[3], "pred")]
    return _into(machine, parts[0], kind, lambda a, b, p: np.where(p, a, b), sources)


def _convert(machine: Any, opcode: str, parts: list[str]) -> Callable[[Any], None]:
    if opcode == "cvt.rn.f16x2.f32":
        sources = [machine.operand(p, "f32") for p in parts[1:3]]

        def pack(high: np.ndarray, low: np.ndarray) -> np.ndarray:
            bits = [np.ascontiguousarray(x.astype(np.float16)).view(np.uint16).astype(np.uint32) for x in (high, low)]
            return (bits[0] << 16) | bits[1]

        return _into(machine, parts[0], "u32", pack, sources)
    if opcode == "cvt.rn.f16.f32":
        half = lambda x: np.ascontiguousarray(x.astype(np.float16)).view(np.uint16).astype(np.uint32)  # noqa: E731
        return _into(machine, parts[0], "u32", half, [machine.operand(parts[1], "f32")])
    to, origin = opcode.split(".")[-2:]
    source = machine.operand(parts[1], origin)
    return _into(machine, parts[0], to, lambda x: x.astype(TYPES[to]), [source])


def _shift(function: Callable[..., Any]) -> Any:
    def make(machine: Any, opcode: str, parts: list[str]) -> Callable[[Any], None]:
        kind = opcode.rpartition(".")[2]
        value, count = machine.operand(parts[1], kind), machine.operand(parts[2], "u32")
        return _into(machine, parts[0], kind, lambda a, n: function(a, n.astype(a.dtype)), [value, count])

    return make


def _insert(a: np.ndarray, b: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    mask = ((np.uint64(1) << length.astype(np.uint64)) - np.uint64(1)).astype(np.uint32) << start
    return (b & ~mask) | ((a << start) & mask)


def _reversed_bits(x: np.ndarray) -> np.ndarray:
    return np.asarray([int(f"{int(v):032b}"[::-1], 2) for v in x], np.uint32)


def _leading_zeros(x: np.ndarray) -> np.ndarray:
    return np.asarray([32 - int(v).bit_length() for v in x], np.uint32)


def _truncated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a // b) if a.dtype.kind == "u" else (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)


PLAIN: dict[str, Any] = {
    "add": _by_kind(operator.add, 2),
    "sub": _by_kind(operator.sub, 2),
    "mul.lo.s32": _by_kind(operator.mul, 2),
    "mul.lo.u32": _by_kind(operator.mul, 2),
    "mul.lo.s64": _by_kind(operator.mul, 2),
    "mul.f32": _by_kind(operator.mul, 2),
    "mul.wide.u32": _typed(lambda a, b: a.astype(np.uint64) * b, "u64", "u32", "u32"),
    "mul.wide.s32": _typed(lambda a, b: a.astype(np.int64) * b, "s64", "s32", "s32"),
    "mad.wide.u32": _typed(lambda a, b, c: a.astype(np.uint64) * b + c, "u64", "u32", "u32", "u64"),
    "mad.lo.s32": _by_kind(lambda a, b, c: a * b + c, 3),
    "div.u32": _by_kind(_truncated, 2),
    "div.s32": _by_kind(_truncated, 2),
    "div.s64": _by_kind(_truncated, 2),
    "div.rn.f32": _by_kind(operator.truediv, 2),
    "div.full.f32": _by_kind(operator.truediv, 2),
    "rem": _by_kind(operator.mod, 2),
    "min": _by_kind(np.minimum, 2),
    "max": _by_kind(np.maximum, 2),
    "max.f32": _by_kind(_larger, 2),
    "max.NaN.f32": _by_kind(np.maximum, 2),
    "neg": _by_kind(operator.neg, 1),
    "abs.f32": _by_kind(np.abs, 1),
    "and.pred": _by_kind(operator.and_, 2),
    "and": _by_kind(operator.and_, 2),
    "or": _by_kind(operator.or_, 2),
    "xor": _by_kind(operator.xor, 2),
    "not.b32": _by_kind(operator.invert, 1),
    "not.b64": _by_kind(operator.invert, 1),
    "not.pred": _by_kind(operator.invert, 1),
    "shl": _shift(operator.lshift),
    "shr": _shift(operator.rshift),
    "bfi.b32": _typed(_insert, "u32", "u32", "u32", "u32", "u32"),
    "brev.b32": _by_kind(_reversed_bits, 1),
    "clz.b32": _by_kind(_leading_zeros, 1),
    "mov": _by_kind(lambda a: a, 1),
    "mov.b32": _typed(lambda a: a, "u32", "u32"),
    "setp": _compare,
    "selp": _select,
    "cvt": _convert,
    "fma.rn.f32": _by_kind(_fused, 3),
    "ex2.approx.ftz.f32": _by_kind(_exact_power, 1),
    "lg2.approx.f32": _by_kind(_exact_logarithm, 1),
    "rcp.approx.ftz.f32": _by_kind(_reciprocal, 1),
    "rcp.rn.f32": _by_kind(_reciprocal, 1),
    "sqrt.rn.f32": _by_kind(np.sqrt, 1),
}
