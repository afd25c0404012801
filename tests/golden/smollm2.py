"""The golden of SmolLM2-135M-Instruct Q4_1 that `make_smollm2.py` made: read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "smollm2.npz"
NEW_TOKENS = 40
TOP = 8
WHOLE = ("scripts", "long")  # prompts whose last position is kept whole


@dataclass(frozen=True)
class Golden:
    """One prompt: `n` positions over `vocab` logits."""

    tokens: np.ndarray  # int32 [n]
    sketch: np.ndarray  # float32 [n, 32]
    norm: np.ndarray  # float32 [n]
    top_ids: np.ndarray  # int32 [n, 8]
    top_logits: np.ndarray  # float32 [n, 8]
    log_probabilities: np.ndarray  # float64 [n - 1]: of each token but the first, given those before it
    greedy: np.ndarray  # int32 [40]
    margins: np.ndarray  # float32 [40]: first logit less the second, at each greedy step
    last: np.ndarray | None  # float32 [vocab]


def golden(name: str) -> Golden:
    """The golden of one of `prompts.PROMPTS`."""
    with np.load(FILE) as file:
        fields = {key.partition("/")[2]: file[key] for key in file.files if key.startswith(f"{name}/")}
    return Golden(**{"last": None, **fields})
