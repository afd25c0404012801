"""Runs the indexing of emitted code over NumPy arrays: its registers hold arrays instead of LLVM values."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from frink_numba.kernels.ptx import Register

_TYPES: dict[str, Any] = {"u32": np.uint32, "u64": np.uint64, "f32": np.float32}
_NAMES = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}
_COMPARE = {sign: getattr(operator, name) for sign, name in _NAMES.items()}


class _Type:
    """Stands in for an LLVM type, which is passed on and not looked at."""


class _Value(np.ndarray):
    type = _Type()


def _value(kind: str, value: Any) -> _Value:
    return np.asarray(value, _TYPES[kind]).view(_Value)


class _Builder:
    add, sub, mul = (staticmethod(f) for f in (operator.add, operator.sub, operator.mul))
    and_, or_, xor, shl, lshr = (
        staticmethod(f) for f in (operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift)
    )
    udiv, urem = staticmethod(operator.floordiv), staticmethod(operator.mod)

    def icmp_unsigned(self, comparison: str, a: Any, b: Any) -> Any:
        return _COMPARE[comparison](a, b)

    def icmp_signed(self, comparison: str, a: Any, b: Any) -> Any:
        return _COMPARE[comparison](a.astype(np.int32), b.astype(np.int32))

    def zext(self, value: Any, _: Any) -> Any:
        return _value("u32", value)

    def select(self, flag: Any, yes: Any, no: Any) -> Any:
        return np.where(flag, yes, no).view(_Value)


class ArrayEmitter:
    """What index arithmetic needs of `ptx.Emitter`. Of the instructions it knows the exchange within a warp."""

    def __init__(self) -> None:
        self.builder = _Builder()

    def constant(self, kind: str, value: float) -> Any:
        return self.array(kind, int(value) & 0xFFFFFFFF if kind == "u32" else value)

    def array(self, kind: str, values: Any) -> Any:
        return Register(self, kind, _value(kind, values))  # type: ignore[arg-type]

    def asm(self, template: str, result: str, arguments: Sequence[Any], **_: Any) -> Any:
        found = re.match(r"shfl\.sync\.bfly\.b32 \$0, \$1, (\d+),", template)
        if found is None:
            raise NotImplementedError(template)
        (source,) = arguments
        lanes = np.arange(source.value.shape[0])
        return self.array(result, source.value[lanes ^ int(found.group(1))])
