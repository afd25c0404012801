"""The part of numba's extension API that the register and memory helpers stand on, and its place in the simulator.

A helper is written twice: once as a generator of LLVM IR, for the device, and once as plain Python over NumPy, for the
CUDA simulator, which runs kernels as Python and knows no generators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.cuda import config, types
from numba.cuda.extending import intrinsic

Octet = types.UniTuple(types.float32, 8)

i8, i16, i32, i64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
f32 = ir.FloatType()


def device_intrinsic(simulated: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make a typing function (of numba's `intrinsic`) callable in kernels; the simulator calls `simulated` instead."""

    def choose(typing_function: Callable[..., Any]) -> Any:
        return simulated if config.ENABLE_CUDASIM else intrinsic(typing_function)

    return choose


def data_pointer(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    """The LLVM pointer to an array argument's first element."""
    return context.make_array(array_type)(context, builder, array).data


def as_tuple(builder: Any, values: Sequence[Any]) -> Any:
    """The LLVM value of a UniTuple that holds `values`."""
    out: Any = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
    for i, value in enumerate(values):
        out = builder.insert_value(out, value, i)
    return out


def elements(builder: Any, value: Any) -> list[Any]:
    """The LLVM values that a UniTuple holds."""
    return [builder.extract_value(value, i) for i in range(value.type.count)]


def fused_multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once, whatever the compiler's contraction setting."""
    function = builder.module.declare_intrinsic("llvm.fma", [a.type], ir.FunctionType(a.type, [a.type] * 3))
    return builder.call(function, [a, b, c])


def multiply_rounded(builder: Any, a: Any, b: Any) -> Any:
    """float32 a * b, rounded; never contracted with an addition that follows (dequantization is exact, bit for bit)."""
    assembly = ir.InlineAsm(ir.FunctionType(f32, [f32, f32]), "mul.rn.f32 $0, $1, $2;", "=f,f,f", side_effect=False)
    return builder.call(assembly, [a, b])


def multiply_wide(builder: Any, a: Any, b: Any, addend: Any) -> Any:
    """64-bit a * b + addend of 32-bit factors, in one instruction.

    The optimizer would widen the factors ahead of a loop, and take more registers.
    """
    assembly = ir.InlineAsm(
        ir.FunctionType(i64, [i32, i32, i64]), "mad.wide.u32 $0, $1, $2, $3;", "=l,r,r,l", side_effect=False
    )
    return builder.call(assembly, [a, b, addend])


def global_address(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    """The 64-bit address of an array argument's first element."""
    return builder.ptrtoint(data_pointer(context, builder, array_type, array), i64)


def in_simulator(array: Any) -> np.ndarray:
    """The NumPy array behind a simulated kernel's array argument or shared array."""
    inner = getattr(array, "_item", array)
    return getattr(inner, "_ary", inner)
