"""What a model does before its first layer and to the logits after its last: scales that no layer knows of."""

from __future__ import annotations

import numpy as np

from frink_numba.host.dequantize import dequantize_rows
from frink_numba.host.hyperparameters import Hyperparameters
from frink_numba.quant import QuantMatrix


def embed(embedding: QuantMatrix, ids: np.ndarray, hyper: Hyperparameters) -> np.ndarray:
    """The hidden batch of the tokens `ids`: float32 [len(ids), hidden]."""
    hidden = dequantize_rows(embedding, ids)
    if hyper.embedding_scale != 1:
        with np.errstate(over="ignore"):  # infinities show in the logits
            np.multiply(hidden, np.float32(hyper.embedding_scale), out=hidden)
    return hidden


def bend_logits(logits: np.ndarray, hyper: Hyperparameters) -> None:
    """Divide by the model's divisor and cap softly, in place; plain models are left alone. NaN and infinity pass."""
    if hyper.logit_divisor == 1 and not hyper.logit_softcap:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        if hyper.logit_divisor != 1:
            np.divide(logits, np.float32(hyper.logit_divisor), out=logits)
        if hyper.logit_softcap:
            cap = np.float32(hyper.logit_softcap)
            np.divide(logits, cap, out=logits)
            np.tanh(logits, out=logits)
            np.multiply(logits, cap, out=logits)
