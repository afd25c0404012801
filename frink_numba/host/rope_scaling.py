"""How a model's rotation differs from the plain one: every scaling becomes the frequency factors of `layer.Rope`."""

from __future__ import annotations

import numpy as np


def frequency_factors(rope_dim: int, linear: float, stored: np.ndarray | None) -> np.ndarray | None:
    """float32 [rope_dim/2], what each channel pair's frequency is divided by; None when that is 1 throughout.

    `linear`: linear scaling divides every position by it, which is the same as dividing every frequency.
    `stored`: the file's own factors, float32 [rope_dim/2] (Llama 3's rule, computed when the file was made).
    """
    if stored is None:
        return None if linear == 1 else np.full(rope_dim // 2, linear, np.float32)
    return (stored.astype(np.float64) * linear).astype(np.float32)
