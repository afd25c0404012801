"""How far logits are from a golden."""

from __future__ import annotations

import numpy as np


def worst_error(logits: np.ndarray, golden: np.ndarray) -> float:
    """The largest relative error of a position; NaN stays NaN."""
    difference = np.linalg.norm(logits.astype(np.float64) - golden, axis=1)
    return float((difference / np.linalg.norm(golden.astype(np.float64), axis=1)).max())
