"""Sampling settings whose distributions `make_sampling.py` takes from transformers' logits processors."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.golden.draws import integers, normal

FILE = Path(__file__).parent / "sampling.npy"
VOCAB = 300
CASES: tuple[dict[str, float], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5, "top_k": 1},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 1.0, "top_k": 299},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.7, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.6, "min_p": 0.5},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "repetition_penalty": 0.7},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1},
    {"temperature": 3.0, "top_k": 100, "top_p": 0.6, "min_p": 0.1},
)


def logits(case: int) -> np.ndarray:
    """float32 [VOCAB], with positive and negative values."""
    return normal(f"sampling logits {case}", (VOCAB,), 3.0)


def seen(case: int) -> np.ndarray:
    """int64 [30]: tokens that the repetition penalty counts."""
    return integers(f"sampling seen {case}", (30,), VOCAB)
