"""The activations of gated products, as device code: silu, and GELU in its tanh form and exactly (R4).

    swiglu     g / (1 + exp(-g))
    geglu      g sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3))
    geglu_erf  g Phi(g) with Phi(g) = erfc(-g / sqrt(2)) / 2, within 3e-7 |g| of it: a few roundings of float32

Of each, |act(g)| <= |g|, which the bounds of f16 results in `gemm_epilogue.py` rest on.
"""

from __future__ import annotations

from frink_numba.kernels.ptx import Emitter, Register

# Phi(-a) exp(a^2 / 2) = t (c0 + c1 t + ...) for a >= 0 and t = 1 / (1 + 0.305 a): least relative error up to a = 14,
# 1e-7, found by reweighted least squares against float64.
_PITCH = 0.305
_TAIL = (
    0.12163973,
    0.12246681,
    0.10342090,
    0.12102155,
    -0.03797658,
    0.18571661,
    -0.15298814,
    0.03669915,
)


def activate(e: Emitter, gate: str, g: Register) -> Register:
    """act(g) for a name of `gemm_epilogue.GATES`."""
    if gate == "geglu_erf":
        return _exact_gelu(e, g)
    # 2 sqrt(2/pi) (g + 0.044715 g^3)
    z = g if gate == "swiglu" else g * 1.5957691216057308 + g * g * g * 0.07135481627260025
    return g * _reciprocal(e, _exp2(e, z * -1.4426950408889634) + 1.0)


def _exact_gelu(e: Emitter, g: Register) -> Register:
    t = _reciprocal(e, e.asm("abs.f32 $0, $1;", "f32", [g], pure=True) * _PITCH + 1.0)
    tail = e.constant("f32", _TAIL[-1])
    for coefficient in _TAIL[-2::-1]:
        tail = tail * t + coefficient
    # exp(-g^2 / 2) is 0 long before g^2 is infinite, so that no large g becomes not-a-number.
    below = tail * t * _exp2(e, g * g * -0.7213475204444817)
    negative = e.builder.fcmp_ordered("<", g.value, e.constant("f32", 0.0).value)
    above = e.constant("f32", 1.0) - below
    return g * Register(e, "f32", e.builder.select(negative, below.value, above.value))


def _exp2(e: Emitter, x: Register) -> Register:
    return e.asm("ex2.approx.ftz.f32 $0, $1;", "f32", [x], pure=True)


def _reciprocal(e: Emitter, x: Register) -> Register:
    return e.asm("rcp.approx.ftz.f32 $0, $1;", "f32", [x], pure=True)
