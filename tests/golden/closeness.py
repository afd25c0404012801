"""How near a device's logits must be to the golden's (design: numerics)."""

from __future__ import annotations

import numpy as np

MOST_DIVERGENCE = 1e-3  # nats of a position, in the mean


def assert_close(got: np.ndarray, want: np.ndarray, bound: float) -> None:
    """Every position within `bound`, equal choices where the two first are apart, distributions that hardly differ."""
    assert np.isfinite(got).all()
    errors = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert errors.max() < bound, errors.max()
    first_two = np.partition(want, -2, axis=1)[:, -2:]
    clear = first_two[:, 1] - first_two[:, 0] > 2 * np.abs(got - want).max(axis=1)
    assert clear.any(), "no position tells"
    np.testing.assert_array_equal(got.argmax(axis=1)[clear], want.argmax(axis=1)[clear])
    divergence = _divergence(want, got)
    assert divergence < MOST_DIVERGENCE, divergence


def _divergence(true: np.ndarray, got: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence of two batches of logits."""
    logs = [x - x.max(axis=1, keepdims=True) for x in (true.astype(np.float64), got.astype(np.float64))]
    logs = [x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in logs]
    return float((np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=1).mean())
