"""What a step must be before it is run, and a run's answer before it is taken: shapes and types (R20)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from frink_numba.backend import Run, Step
from frink_numba.errors import CacheError, ShapeError
from frink_numba.layer import Layer


def check_step(step: Step) -> None:
    """ShapeError for a step without rows, or with others than it says; CacheError where layers lack a cache."""
    if step.hidden is None and (step.lookup is None or not step.layers):
        raise ShapeError("a step to run needs a hidden batch; without one it can only be planned")
    if len(step.layers) != len(step.caches):
        raise CacheError(f"{len(step.layers)} layers, but {len(step.caches)} layer caches")
    if step.hidden is not None:
        check_hidden(step.hidden, step)


def check_hidden(hidden: np.ndarray, step: Step) -> None:
    """ShapeError unless it is the step's hidden batch: float32 [batch, hidden_dim], C-contiguous."""
    if hidden.dtype != np.float32 or not hidden.flags.c_contiguous:
        raise ShapeError(f"the hidden batch must be C-contiguous float32, not {hidden.dtype}")
    width = step.layers[0].hidden_dim if step.layers else hidden.shape[-1]
    if hidden.shape != (step.batch, width):
        raise ShapeError(f"the hidden batch has shape {list(hidden.shape)}, not [{step.batch}, {width}]")


def _check_tokens(tokens: np.ndarray, step: Step) -> None:
    if tokens.ndim != 1 or tokens.dtype.kind != "i" or not 1 <= len(tokens) <= step.ahead:
        raise ShapeError(f"it answered tokens of {tokens.dtype} {list(tokens.shape)}, not up to {step.ahead}")
    if tokens.min() < -1 or tokens.max() >= step.choices:
        raise ShapeError(f"it answered tokens from {tokens.min()} to {tokens.max()}, not below {step.choices}")


def _are_wanted(logits: np.ndarray, step: Step) -> bool:
    if step.edges is None:
        return logits.shape[:1] == (step.logits,)
    return logits.shape == (step.logits, step.edges.output.rows)


def check_run(run: Run | None, layers: Sequence[Layer], l: int, length: int, step: Step) -> None:  # noqa: E741
    """A run's arrays have the promised shapes; ShapeError says which has not."""
    if run is None:
        raise ShapeError("host answered no run")
    hidden, last, want = run.hidden, l + length - 1, (step.batch, layers[l].hidden_dim)
    rows = step.batch if run.tokens is None else len(run.tokens)
    if run.tokens is not None:
        _check_tokens(run.tokens, step)
    if run.logits is not None and (last + 1 < len(layers) or not _are_wanted(run.logits, step)):
        raise ShapeError(f"it answered logits {list(run.logits.shape)} that nobody asked for")
    if run.scores is not None and (step.targets is None or run.scores.shape != (step.logits,)):
        raise ShapeError(f"it answered scores {list(run.scores.shape)} that nobody asked for")
    if hidden is None:
        made = any(answer is not None for answer in (run.logits, run.tokens, run.scores))
        wanted = last in step.hidden_after or (step.logits > 0 and not made)
        if last + 1 < len(layers) or step.tokens is None or wanted:
            raise ShapeError("it answered no hidden batch")
    elif hidden.shape != want or hidden.dtype != np.float32:
        raise ShapeError(f"it answered a hidden batch of {hidden.dtype} {list(hidden.shape)}, not {list(want)}")
    if run.experts is not None and not all(isinstance(int(e), int) for used in run.experts for e in used):
        raise ShapeError("it names experts that are no numbers")
    if getattr(run.kv_rows, "lent_by", None) is step.caches and len(run.kv_rows) == length:
        return  # the room that the cache itself has lent for this step
    if not (step.keep or run.kv_rows):
        return
    if len(run.kv_rows) != length or (run.experts is not None and len(run.experts) != length):
        raise ShapeError(f"it answered K/V rows or experts for {len(run.kv_rows)} layers, not {length}")
    for layer, (k, v) in enumerate(run.kv_rows, l):
        cache = step.caches[layer]
        want_k = (rows, cache.n_kv_heads, cache.key_dim)
        want_v = (rows, cache.n_kv_heads, cache.value_dim)
        if k.shape != want_k or v.shape != want_v:
            raise ShapeError(f"layer {layer}: K/V rows of {list(k.shape)} and {list(v.shape)}, not {list(want_k)}")
        if any(rows.dtype not in (np.float32, np.float16) for rows in (k, v)):
            raise ShapeError(f"layer {layer}: K/V rows of {k.dtype} and {v.dtype}, not float32")
