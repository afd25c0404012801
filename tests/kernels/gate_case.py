"""The true activations of gated products, and operands whose products every tier forms without rounding."""

from __future__ import annotations

import math

import numpy as np

from frink_numba.quant import KINDS, QuantMatrix


def true_activation(name: str, g: np.ndarray) -> np.ndarray:
    """act(g) of float64 `g`, for a name of `gemm_epilogue.GATES`."""
    if name == "geglu_erf":
        return g * np.vectorize(lambda x: 0.5 * math.erfc(-x / math.sqrt(2)))(g)
    if name == "geglu":
        return 0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
    return g * np.where(g > 0, 1, np.exp(np.minimum(g, 0))) / (1 + np.exp(-np.abs(g)))


def exact_operands(m: int, outputs: int, cols: int = 64) -> tuple[np.ndarray, list[QuantMatrix], np.ndarray]:
    """(x float32 [m, cols], gate and up matrices of F16, true gate and up [2, m, outputs]).

    Integers and sixteenths: nothing is rounded before the activation, so that only it and one product can be.
    """
    rng = np.random.default_rng(m + outputs)
    x = rng.integers(-2, 3, (m, cols)).astype(np.float32)
    x[:, 0] = 2  # every row has the same power of two
    weights = [(rng.integers(-4, 5, (outputs, cols)) / 16).astype(np.float16) for _ in range(2)]
    matrices = [QuantMatrix(KINDS["F16"], w.view(np.uint8), outputs, cols) for w in weights]
    return x, matrices, np.stack([x.astype(np.float64) @ w.astype(np.float64).T for w in weights])


def check_activation(name: str, got: np.ndarray, gate: np.ndarray, up: np.ndarray) -> None:
    """float32 results are within a few roundings of the true ones, and far from those of the other activations."""
    bound = 3e-6 * np.abs(gate * up) + 1e-12
    assert (np.abs(got - true_activation(name, gate) * up) <= bound).all()
    for other in {"swiglu", "geglu", "geglu_erf"} - {name}:
        assert (np.abs(got - true_activation(other, gate) * up) > 10 * bound).any()
