"""Gated activations against float64, extremes included (R4)."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.host.activation import ACTIVATIONS, activate, sigmoid
from frink_numba.host.scratch import Scratch
from frink_numba.layer import Activation
from tests import reference

EACH = pytest.mark.parametrize("activation", list(Activation), ids=lambda activation: activation.value)


def activated(activation: Activation, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate = gate.copy()
    with np.errstate(over="ignore"):
        activate(ACTIVATIONS[activation], gate, up, Scratch())
    return gate


@EACH
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (257, 129)])
def test_matches_float64(activation: Activation, shape: tuple[int, int]) -> None:
    """The largest shape spans several of the chunks worked on at once."""
    rng = np.random.default_rng(shape[0])
    gate = rng.normal(0, 2, shape).astype(np.float32)
    up = rng.normal(0, 1, shape).astype(np.float32)
    want = reference.activate(activation, gate.astype(np.float64)) * up
    assert reference.relative_error(activated(activation, gate, up), want) < 1e-6


@EACH
def test_every_value_is_close(activation: Activation) -> None:
    """Element by element over the whole range that matters: absolute error under 1e-6 of the gate's size."""
    gate = np.linspace(-30, 30, 60001, dtype=np.float32)
    want = reference.activate(activation, gate.astype(np.float64))
    error = np.abs(activated(activation, gate, np.ones_like(gate)) - want)
    assert (error <= 1e-6 * np.maximum(1, np.abs(want))).all()


@EACH
def test_extreme_gates_are_finite_and_nans_stay(activation: Activation) -> None:
    gate = np.array([-1e4, -200, -0.0, 0.0, 200, 1e4, np.nan], np.float32)
    got = activated(activation, gate, np.ones_like(gate))
    power = 2 if activation is Activation.REGLU_SQUARED else 1
    np.testing.assert_allclose(got[:6], [0, 0, 0, 0, 200.0**power, 1e4**power], atol=1e-30)
    assert np.isnan(got[6])


def test_all_activations_are_served() -> None:
    assert set(ACTIVATIONS) == set(Activation)


def test_sigmoid() -> None:
    x = np.array([-1000, -20, -1, 0, 1, 20, 1000], np.float32)
    with np.errstate(over="ignore"):
        got = x.copy()
        sigmoid(got)
    np.testing.assert_allclose(got, 1 / (1 + np.exp(-x.astype(np.float64).clip(-700))), rtol=1e-6, atol=1e-30)
