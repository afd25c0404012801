"""The one place that knows numba-cuda's extension API: device code with inline PTX, declared in one line or emitted.

Three ways in, from short to free:

    add_half2 = instruction("add.f16x2 $0, $1, $2;", "u32", "u32", "u32", pure=True)

declares one PTX instruction as a function that kernels call. `$0` is the result (when there is one), then come the
arguments. `pure` marks an instruction without side effects, which the compiler may move, merge or drop.

    @emitted("u32x4", "u32")
    def masked(e, word):
        return [word & 0xF, (word >> 4) & 0xF, (word >> 8) & 0xF, word >> 12]

declares a function whose body runs once, while the kernel is compiled, and emits its instructions through an `Emitter`:
plain Python decides what is unrolled, and values are `Register`s with the usual operators.

`shared_address(array)` and `global_address(array)` turn arrays into addresses.

Types: u16, u32, u64, f32, f64 (loads and stores), and tuples of them such as "u32x4". In the CUDA simulator an op is
its `simulator` body, a
plain Python function; without one it says so when called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.cuda import config, types

SIMULATED = bool(config.ENABLE_CUDASIM)

if not SIMULATED:
    from numba.cuda.extending import intrinsic

_NUMBA = {"u16": types.uint16, "u32": types.uint32, "u64": types.uint64, "f32": types.float32, "f64": types.float64}
_LLVM = {
    "u16": ir.IntType(16),
    "u32": ir.IntType(32),
    "u64": ir.IntType(64),
    "f32": ir.FloatType(),
    "f64": ir.DoubleType(),
}
_CONSTRAINT = {"u16": "h", "u32": "r", "u64": "l", "f32": "f", "f64": "d"}


def _split(spec: str) -> tuple[str, int]:
    """("u32", 4) of "u32x4"; a scalar counts 0."""
    base, _, count = spec.partition("x")
    if base not in _NUMBA:
        raise ValueError(f"unknown register type {spec!r}: expected one of {', '.join(_NUMBA)}, or such a type and xN")
    return base, int(count or 0)


def numba_type(spec: str | tuple[str, ...] | None) -> Any:
    """The numba type of a specification such as "u32x4", or of several as a tuple; None is no value."""
    if spec is None:
        return types.void
    if isinstance(spec, tuple):
        return types.Tuple([numba_type(part) for part in spec])
    base, count = _split(spec)
    return types.UniTuple(_NUMBA[base], count) if count else _NUMBA[base]


class Register:
    """A value of the code being emitted: wraps an LLVM value, has the operators of unsigned integers or of float32."""

    __slots__ = ("emitter", "kind", "value")

    def __init__(self, emitter: Emitter, kind: str, value: Any) -> None:
        self.emitter, self.kind, self.value = emitter, kind, value

    def _other(self, other: Any) -> Any:
        return self.emitter.constant(self.kind, other).value if not isinstance(other, Register) else other.value

    def _binary(self, name: str, other: Any) -> Register:
        build = getattr(self.emitter.builder, ("f" if self.kind == "f32" else "") + name)
        return Register(self.emitter, self.kind, build(self.value, self._other(other)))

    def _bits(self, name: str, other: Any) -> Register:
        return Register(self.emitter, self.kind, getattr(self.emitter.builder, name)(self.value, self._other(other)))

    def __add__(self, other: Any) -> Register:
        return self._binary("add", other)

    def __sub__(self, other: Any) -> Register:
        return self._binary("sub", other)

    def __mul__(self, other: Any) -> Register:
        return self._binary("mul", other)

    def __and__(self, other: Any) -> Register:
        return self._bits("and_", other)

    def __or__(self, other: Any) -> Register:
        return self._bits("or_", other)

    def __xor__(self, other: Any) -> Register:
        return self._bits("xor", other)

    def __lshift__(self, other: Any) -> Register:
        return self._bits("shl", other)

    def __rshift__(self, other: Any) -> Register:
        return self._bits("lshr", other)


class Emitter:
    """Emits instructions where an op is called."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context, self.builder = context, builder

    def constant(self, kind: str, value: float) -> Register:
        return Register(self, kind, ir.Constant(_LLVM[kind], float(value) if kind == "f32" else int(value)))

    def widen(self, value: Register) -> Register:
        """u32 to u64."""
        return Register(self, "u64", self.builder.zext(value.value, _LLVM["u64"]))

    def narrow(self, value: Register) -> Register:
        """u64 to u32."""
        return Register(self, "u32", self.builder.trunc(value.value, _LLVM["u32"]))

    def float_bits(self, value: Register) -> Register:
        """The bits of a float32 as u32."""
        return Register(self, "u32", self.builder.bitcast(value.value, _LLVM["u32"]))

    def asm(
        self,
        template: str,
        result: str | None,
        arguments: Sequence[Register],
        *,
        tied: Sequence[Register] = (),
        pure: bool = False,
        memory: bool = True,
    ) -> Any:
        """Emit PTX; returns a Register, a list of them (a tuple type), or None.

        `$0..` are the results, then `arguments`; `tied` are further inputs that enter in the results' own registers.
        """
        base, count = _split(result) if result else ("", 0)
        outputs = max(count, 1) if result else 0
        constraints = [f"={_CONSTRAINT[base]}"] * outputs if result else []
        constraints += [_CONSTRAINT[a.kind] for a in arguments]
        constraints += [str(i) for i in range(len(tied))]
        if memory and not pure:
            constraints.append("~{memory}")
        if not result:
            returns: Any = ir.VoidType()
        else:
            returns = ir.LiteralStructType([_LLVM[base]] * count) if count else _LLVM[base]
        inputs = [*arguments, *tied]
        function = ir.FunctionType(returns, [_LLVM[r.kind] for r in inputs])
        call = self.builder.call(
            ir.InlineAsm(function, template, ",".join(constraints), side_effect=not pure), [r.value for r in inputs]
        )
        if not result:
            return None
        if not count:
            return Register(self, base, call)
        return [Register(self, base, self.builder.extract_value(call, i)) for i in range(count)]

    def when(self, flag: Register) -> Any:
        """Context manager: what is emitted inside runs only where `flag` is not 0."""
        return self.builder.if_then(self.builder.icmp_unsigned("!=", flag.value, ir.Constant(flag.value.type, 0)))

    def load(self, spec: str, value: Any) -> Any:
        """An argument of the op as a Register or a list of them."""
        base, count = _split(spec)
        if not count:
            return Register(self, base, value)
        return [Register(self, base, self.builder.extract_value(value, i)) for i in range(count)]

    def store(self, spec: str | tuple[str, ...], value: Any) -> Any:
        """The LLVM value of a Register, of a list of them as a tuple, or of several such."""
        if isinstance(spec, tuple):
            out = ir.Constant(self.context.get_value_type(numba_type(spec)), ir.Undefined)
            for i, (part, item) in enumerate(zip(spec, value, strict=True)):
                out = self.builder.insert_value(out, self.store(part, item), i)
            return out
        _, count = _split(spec)
        if not count:
            return value.value
        if len(value) != count:
            raise ValueError(f"the op's body gives {len(value)} registers, its type is {spec}")
        out = ir.Constant(self.context.get_value_type(numba_type(spec)), ir.Undefined)
        for i, item in enumerate(value):
            out = self.builder.insert_value(out, item.value, i)
        return out


def _missing(name: str) -> Callable[..., Any]:
    def op(*_: Any) -> Any:
        raise NotImplementedError(f"{name} has no body for the CUDA simulator")

    return op


def emitted(
    result: str | tuple[str, ...] | None, *arguments: str, simulator: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Decorate `body(e, *registers)`, which emits instructions and gives Register(s), into a device function."""

    def decorate(body: Callable[..., Any]) -> Any:
        if SIMULATED:
            return simulator or _missing(body.__name__)
        signature = numba_type(result)(*(numba_type(a) for a in arguments))

        def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
            emitter = Emitter(context, builder)
            loaded = [emitter.load(spec, value) for spec, value in zip(arguments, values, strict=True)]
            out = body(emitter, *loaded)
            return emitter.store(result, out) if result else context.get_dummy_value()

        def op(*_: Any) -> Any:
            return signature, generate

        names = ["typing_context", *(f"a{i}" for i in range(len(arguments)))]
        op.__name__ = op.__qualname__ = body.__name__
        op.__doc__ = body.__doc__
        op.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
        )
        return intrinsic(op)

    return decorate


def instruction(
    template: str,
    result: str | None,
    *arguments: str,
    pure: bool = False,
    simulator: Callable[..., Any] | None = None,
) -> Any:
    """One PTX instruction (or a few) as a device function. See the module's text."""

    def body(e: Emitter, *registers: Register) -> Any:
        return e.asm(template, result, registers, pure=pure)

    body.__name__ = template.split()[0].strip("{").replace(".", "_") or "ptx"
    return emitted(result, *arguments, simulator=simulator)(body)


if SIMULATED:
    shared_address = _missing("shared_address")
    global_address = _missing("global_address")
else:

    @intrinsic
    def shared_address(typing_context: Any, array: Any) -> Any:
        """The 32-bit address of a shared array, as PTX's .shared instructions take it."""

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, values[0]).data
            pointer = data.type
            target = ir.PointerType(addrspace=3) if pointer.is_opaque else pointer.pointee.as_pointer(3)
            return builder.ptrtoint(builder.addrspacecast(data, target), _LLVM["u32"])

        return types.uint32(array), generate

    @intrinsic
    def global_address(typing_context: Any, array: Any) -> Any:
        """The 64-bit address of a device array's first element."""

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, values[0]).data
            return builder.ptrtoint(data, _LLVM["u64"])

        return types.uint64(array), generate
