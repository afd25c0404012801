"""How likely tokens are under logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def log_softmax_at(logits: np.ndarray, targets: Sequence[int] | np.ndarray) -> np.ndarray:
    """log softmax(logits)[i, targets[i]] for `logits` float32 [n, vocab], float64 [n]."""
    peak = logits.max(axis=-1, keepdims=True)
    total = np.exp(logits - peak).sum(axis=-1, dtype=np.float64)
    chosen = logits[np.arange(len(logits)), np.asarray(targets)].astype(np.float64)
    return chosen - peak[:, 0].astype(np.float64) - np.log(total)
