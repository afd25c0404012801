"""Division of non-negative 32-bit integers: numba divides in 64 bits and rounds down, some hundred instructions."""

from __future__ import annotations

from typing import Any

from numba.cuda import types

from frink_numba.kernels.extension import device_intrinsic


def _quotient_simulated(a: Any, b: Any) -> int:
    return int(a) // int(b)


@device_intrinsic(_quotient_simulated)
def quotient(typing_context: Any, a: Any, b: Any) -> Any:
    """a // b, as int32, of int32 a >= 0 and b > 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.udiv(*args)

    return types.int32(types.int32, types.int32), generate


def _remainder_simulated(a: Any, b: Any) -> int:
    return int(a) % int(b)


@device_intrinsic(_remainder_simulated)
def remainder(typing_context: Any, a: Any, b: Any) -> Any:
    """a % b, as int32, of int32 a >= 0 and b > 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.urem(*args)

    return types.int32(types.int32, types.int32), generate
