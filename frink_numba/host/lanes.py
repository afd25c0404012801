"""Sixteen float32 or integers worked on at once in numba's CPU code: the only file that knows numba's extension API.

LLVM maps the sixteen lanes to what the processor has: one AVX-512 register, two of AVX2, four of NEON. Addresses are
plain integers (`array.ctypes.data` and what is added to it): nothing here checks bounds. Little-endian machines only.
Import this where compiled code is made, not before: it imports numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16

_i8, _i16, _i32, _i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_f16, _f32 = ir.HalfType(), ir.FloatType()


def _vector(element: Any) -> Any:
    return ir.VectorType(element, LANES)


class _Floats(types.Type):
    """numba's type of sixteen float32."""


class _Integers(types.Type):
    """numba's type of sixteen 32-bit integers."""


@register_model(_Floats)
class _FloatsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _vector(_f32))


@register_model(_Integers)
class _IntegersModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _vector(_i32))


Floats, Integers = _Floats("sixteen_floats"), _Integers("sixteen_integers")


def _operation(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a generator of LLVM IR, called with the builder and the operands, a function of compiled code.

    `result` and `parameters` are numba's types; numba brings integers to the width of their parameter.
    """

    def make(generate: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
            return generate(builder, *operands)

        # numba looks at the number of parameters, so that it has to be written out.
        if len(parameters) == 0:
            return intrinsic(lambda typing: (result(), codegen))
        if len(parameters) == 1:
            return intrinsic(lambda typing, a: (result(*parameters), codegen))
        if len(parameters) == 2:
            return intrinsic(lambda typing, a, b: (result(*parameters), codegen))
        return intrinsic(lambda typing, a, b, c: (result(*parameters), codegen))

    return make


def _at(builder: Any, address: Any, kind: Any, alignment: int) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=alignment)


def _spread(builder: Any, value: Any) -> Any:
    """Sixteen times `value`."""
    kind = _vector(value.type)
    nothing = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(_i32, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(_vector(_i32), [0] * LANES))


# Loads and a store


@_operation(Integers, types.int64)
def unsigned_bytes(builder: Any, address: Any) -> Any:
    """Sixteen bytes, 0 to 255."""
    return builder.zext(_at(builder, address, _vector(_i8), 1), _vector(_i32))


@_operation(Integers, types.int64)
def signed_bytes(builder: Any, address: Any) -> Any:
    """Sixteen bytes, -128 to 127."""
    return builder.sext(_at(builder, address, _vector(_i8), 1), _vector(_i32))


@_operation(Floats, types.int64)
def floats(builder: Any, address: Any) -> Any:
    """Sixteen float32, at a multiple of 4."""
    return _at(builder, address, _vector(_f32), 4)


@_operation(Floats, types.int64)
def halves(builder: Any, address: Any) -> Any:
    """Sixteen float16."""
    return builder.fpext(_at(builder, address, _vector(_f16), 1), _vector(_f32))


@_operation(Floats, types.int64)
def brain_halves(builder: Any, address: Any) -> Any:
    """Sixteen bfloat16: the upper halves of float32."""
    wide = builder.zext(_at(builder, address, _vector(_i16), 1), _vector(_i32))
    return builder.bitcast(builder.shl(wide, ir.Constant(_vector(_i32), [16] * LANES)), _vector(_f32))


@_operation(types.float32, types.int64)
def half(builder: Any, address: Any) -> Any:
    """One float16."""
    return builder.fpext(_at(builder, address, _f16, 1), _f32)


@_operation(types.int32, types.int64)
def unsigned_byte(builder: Any, address: Any) -> Any:
    """One byte, 0 to 255."""
    return builder.zext(_at(builder, address, _i8, 1), _i32)


@_operation(types.int32, types.int64)
def signed_byte(builder: Any, address: Any) -> Any:
    """One byte, -128 to 127."""
    return builder.sext(_at(builder, address, _i8, 1), _i32)


@_operation(types.int64, types.int64)
def integer(builder: Any, address: Any) -> Any:
    """Eight bytes as one integer."""
    return _at(builder, address, _i64, 8)


@_operation(types.int32, types.int64)
def word(builder: Any, address: Any) -> Any:
    """Four bytes as one integer."""
    return _at(builder, address, _i32, 1)


@_operation(types.none, types.int64, types.float32)
def store_float(builder: Any, address: Any, number: Any) -> Any:
    builder.store(number, builder.inttoptr(address, _f32.as_pointer()), align=4)
    return cgutils.get_null_value(_i8.as_pointer())


# Arithmetic


@_operation(Integers, Integers, types.int32)
def bits_and(builder: Any, lanes: Any, mask: Any) -> Any:
    return builder.and_(lanes, _spread(builder, mask))


@_operation(Integers, Integers, Integers)
def bits_or(builder: Any, a: Any, b: Any) -> Any:
    return builder.or_(a, b)


@_operation(Integers, Integers, types.int32)
def shifted_right(builder: Any, lanes: Any, bits: Any) -> Any:
    return builder.lshr(lanes, _spread(builder, bits))


@_operation(Integers, Integers, types.int32)
def shifted_left(builder: Any, lanes: Any, bits: Any) -> Any:
    return builder.shl(lanes, _spread(builder, bits))


@_operation(Integers, types.int32)
def bits_of(builder: Any, number: Any) -> Any:
    """Lane i holds bit i of `number`."""
    shifts = ir.Constant(_vector(_i32), list(range(LANES)))
    return builder.and_(builder.lshr(_spread(builder, number), shifts), ir.Constant(_vector(_i32), [1] * LANES))


@_operation(Integers, Integers, types.int32)
def less(builder: Any, lanes: Any, number: Any) -> Any:
    return builder.sub(lanes, _spread(builder, number))


@_operation(Floats, Integers)
def as_floats(builder: Any, lanes: Any) -> Any:
    return builder.sitofp(lanes, _vector(_f32))


@_operation(Floats)
def no_floats(builder: Any) -> Any:
    """Sixteen zeros."""
    return ir.Constant(_vector(_f32), [0.0] * LANES)


@_operation(Floats, types.float32, Floats)
def scaled(builder: Any, factor: Any, lanes: Any) -> Any:
    return builder.fmul(_spread(builder, factor), lanes)


@_operation(Floats, Floats, types.float32)
def offset(builder: Any, lanes: Any, number: Any) -> Any:
    return builder.fadd(lanes, _spread(builder, number))


@_operation(Floats, Floats, Floats, Floats)
def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once where the processor has an instruction for it."""
    name, kind = f"llvm.fmuladd.v{LANES}f32", _vector(_f32)
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(function, [a, b, c])


@_operation(types.float32, Floats)
def total(builder: Any, lanes: Any) -> Any:
    """The sum of all lanes, taken by halves."""
    name = f"llvm.vector.reduce.fadd.v{LANES}f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_f32, [_f32, _vector(_f32)]), name)
    return builder.call(function, [ir.Constant(_f32, -0.0), lanes], fastmath=("reassoc",))


# Memory shared between threads: 64-bit integers, read and written in one order that all threads agree on


@_operation(types.int64, types.int64, types.int64)
def fetch_and_add(builder: Any, address: Any, number: Any) -> Any:
    """Add `number` to the integer at `address`; what it was before."""
    return builder.atomic_rmw("add", _integer_at(builder, address), number, "seq_cst")


@_operation(types.int64, types.int64, types.int64)
def exchange(builder: Any, address: Any, number: Any) -> Any:
    """Store `number` at `address`; what was there before."""
    return builder.atomic_rmw("xchg", _integer_at(builder, address), number, "seq_cst")


@_operation(types.int64, types.int64)
def fetch(builder: Any, address: Any) -> Any:
    """The integer at `address`."""
    return builder.load_atomic(_integer_at(builder, address), "seq_cst", 8)


@_operation(types.none)
def pause(builder: Any) -> Any:
    """Tell the processor that this is a loop that waits."""
    if builder.module.triple.startswith(("aarch64", "arm64")):
        name, operands = "llvm.aarch64.hint", [ir.Constant(_i32, 1)]
    else:
        name, operands = "llvm.x86.sse2.pause", []
    kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)
    return cgutils.get_null_value(_i8.as_pointer())


@_operation(types.none, types.int64, types.int64)
def call(builder: Any, function: Any, argument: Any) -> Any:
    """Call the compiled function at the address `function`, which takes an integer."""
    # numba's own convention: where to put the result and an error come first, and a status comes back. There is no
    # result, and compiled functions of this package raise nothing.
    slot = _i8.as_pointer()
    kind = ir.FunctionType(_i32, [slot.as_pointer(), slot.as_pointer(), _i64])
    unused = cgutils.alloca_once(builder, slot)
    builder.call(builder.inttoptr(function, kind.as_pointer()), [unused, unused, argument])
    return cgutils.get_null_value(slot)


def _integer_at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _i64.as_pointer())
