"""Check rows of 49,152 logits against a golden file that keeps 32 numbers of each row.

The sketch of a row e is S e / sqrt(32), with S fixed random signs [32, vocab]. Its squared norm has the mean |e|^2
and a variance of 2 (|e|^4 - sum e_i^4) / 32, at most that of |e|^2 times chi-squared with 32 degrees of freedom over
32. The latter is under 1/4 with probability 5e-6. So a row whose sketched error is under half of the tolerance has a
true error under the tolerance, but for a chance of about 5e-6 a row; a fault of the engine shows in hundreds of rows
at once. (An error in a single logit is the best case: its sketch has exactly its norm.)
"""

from __future__ import annotations

import numpy as np

from tests.golden.draws import signs

WIDTH = 32
SAFETY = 2.0  # the sketched error is held to the tolerance over this


def sketch(rows: np.ndarray) -> np.ndarray:
    """float64 [n, 32] of `rows` [n, vocab]."""
    vocab = rows.shape[1]
    mixed = np.empty((rows.shape[0], WIDTH))
    directions = signs("logit sketch", (WIDTH, vocab)).astype(np.float64)
    for start in range(0, rows.shape[0], 64):
        mixed[start : start + 64] = rows[start : start + 64].astype(np.float64) @ directions.T
    return mixed / np.sqrt(WIDTH)


def sketched_errors(rows: np.ndarray, golden: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """Relative error of each of `rows` [n, vocab] as its golden sketch [n, 32] and norm [n] show it; NaN stays NaN."""
    return np.linalg.norm(sketch(rows) - golden, axis=1) / norms
