"""The FFN's gated activations over float32 arrays: gate becomes act(gate) * up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from frink_numba.host.scratch import Scratch
from frink_numba.layer import Activation

# (gate, up, work array, scratch): all of one shape, gate is written
ActivationFunction: TypeAlias = Callable[[np.ndarray, np.ndarray, np.ndarray, Scratch], None]

_CHUNK = 1 << 15  # elements worked on at once: five passes over them stay in the second-level cache

# exp(x^2) erfc(x) = t * polynomial(t) with t = 1 / (1 + x/2), x >= 0: lowest power first. A Chebyshev fit of degree 8
# to math.erfc over 0 <= x <= 12; erfc is then within 4e-7 in float32.
_ERFC = (
    0.282084814, 0.282399583, 0.24296236, 0.203085597, -0.0271553891, 0.278213016, -0.486777835, 0.284109026,
    -0.0589212086,
)  # fmt: skip


def activate(function: ActivationFunction, gate: np.ndarray, up: np.ndarray, scratch: Scratch) -> None:
    """gate = act(gate) * up, in place; both C-contiguous float32 of one shape, `function` one of `ACTIVATIONS`."""
    if gate.size <= _CHUNK:
        function(gate, up, scratch.array("activation", *gate.shape), scratch)
        return
    flat_gate, flat_up = gate.reshape(-1), up.reshape(-1)
    for start in range(0, flat_gate.size, _CHUNK):
        g = flat_gate[start : start + _CHUNK]
        function(g, flat_up[start : start + _CHUNK], scratch.array("activation", g.size), scratch)


def sigmoid(x: np.ndarray) -> None:
    """x = 1 / (1 + exp(-x)), in place. exp may overflow to infinity, which gives the right 0."""
    np.negative(x, out=x)
    np.exp(x, out=x)
    np.add(x, 1.0, out=x)
    np.divide(1.0, x, out=x)


def _swiglu(g: np.ndarray, u: np.ndarray, t: np.ndarray, scratch: Scratch) -> None:
    np.negative(g, out=t)
    np.exp(t, out=t)
    np.add(t, 1.0, out=t)
    np.divide(g, t, out=g)
    np.multiply(g, u, out=g)


def _geglu(g: np.ndarray, u: np.ndarray, t: np.ndarray, scratch: Scratch) -> None:
    """0.5 g (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3)))"""
    np.multiply(g, g, out=t)
    np.multiply(t, 0.044715 * math.sqrt(2 / math.pi), out=t)
    np.add(t, math.sqrt(2 / math.pi), out=t)
    np.multiply(t, g, out=t)
    np.tanh(t, out=t)
    np.add(t, 1.0, out=t)
    np.multiply(t, 0.5, out=t)
    np.multiply(g, t, out=g)
    np.multiply(g, u, out=g)


def _geglu_erf(g: np.ndarray, u: np.ndarray, t: np.ndarray, scratch: Scratch) -> None:
    """0.5 g (1 + erf(g/sqrt(2))) = g (1 - q) where g > 0, else g q, with q = erfc(abs(g)/sqrt(2)) / 2"""
    q = scratch.array("activation erfc", *g.shape)
    # NumPy has no erf. From the small side erfc keeps its digits, so gelu(g) is right for large negative g too.
    np.abs(g, out=t)
    np.multiply(t, 0.5 / math.sqrt(2), out=t)
    np.add(t, 1.0, out=t)
    np.divide(1.0, t, out=t)
    np.multiply(t, _ERFC[-1], out=q)
    for coefficient in _ERFC[-2::-1]:
        np.add(q, coefficient, out=q)
        np.multiply(q, t, out=q)
    np.multiply(g, g, out=t)
    np.multiply(t, -0.5, out=t)
    np.exp(t, out=t)
    np.multiply(q, t, out=q)
    np.multiply(q, 0.5, out=q)
    np.subtract(1.0, q, out=q, where=g > 0)
    np.multiply(g, q, out=g)
    np.multiply(g, u, out=g)


def _reglu_squared(g: np.ndarray, u: np.ndarray, t: np.ndarray, scratch: Scratch) -> None:
    np.maximum(g, 0.0, out=g)
    np.multiply(g, g, out=g)
    np.multiply(g, u, out=g)


ACTIVATIONS: Mapping[Activation, ActivationFunction] = MappingProxyType(
    {
        Activation.SWIGLU: _swiglu,
        Activation.GEGLU: _geglu,
        Activation.GEGLU_ERF: _geglu_erf,
        Activation.REGLU_SQUARED: _reglu_squared,
    }
)
