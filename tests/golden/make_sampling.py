"""Compute the sampling golden with transformers' logits processors: `python -m tests.golden.make_sampling`.

Needs the `oracle` extra (made with torch 2.13 and transformers 5.24).
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.golden.sampling import CASES, FILE, logits, seen


def distribution(number: int, case: dict[str, float]) -> np.ndarray:
    """float64 [VOCAB]: each token's probability, the processors in the order of transformers' `generate`."""
    chain = LogitsProcessorList()
    if "repetition_penalty" in case:
        chain.append(RepetitionPenaltyLogitsProcessor(case["repetition_penalty"]))
    chain.append(TemperatureLogitsWarper(float(case["temperature"])))
    if "top_k" in case:
        chain.append(TopKLogitsWarper(int(case["top_k"])))
    if "top_p" in case:
        chain.append(TopPLogitsWarper(case["top_p"]))
    if "min_p" in case:
        chain.append(MinPLogitsWarper(case["min_p"]))
    scores = torch.from_numpy(logits(number)).double()[None]
    return chain(torch.from_numpy(seen(number))[None], scores).softmax(-1)[0].numpy()


if __name__ == "__main__":
    np.save(FILE, np.stack([distribution(number, case) for number, case in enumerate(CASES)]))
