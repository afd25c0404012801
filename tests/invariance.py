"""How a text is cut and what runs beside it, for tests of FRINK_INVARIANT: all that a decoder answers, as bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from frink_numba.host.decoder import Decoder


def random_cuts(rng: np.random.Generator, n: int, sizes: Sequence[int]) -> list[int]:
    """Lengths of chunks that make up `n` tokens, drawn from `sizes`; the last is what is left."""
    cuts: list[int] = []
    while sum(cuts) < n:
        cuts.append(min(int(rng.choice(sizes)), n - sum(cuts)))
    return cuts


def answers(
    decoder: Decoder,
    ids: np.ndarray,
    cuts: Sequence[int],
    layers: Sequence[int] = (),
    dtype: Any = np.float32,
    logits: str = "all",
) -> dict[str, np.ndarray]:
    """Logits, hidden states after `layers`, and all K/V rows, of `ids` in chunks of these lengths.

    `logits` "last": of each chunk's last token, and `positions` says which these are.
    """
    cache, first = decoder.new_cache(dtype=dtype), 0
    parts = []
    for n in cuts:
        parts.append(
            decoder.prefill(ids[first : first + n], cache, logits=logits, hidden=layers, chunk_size=n)  # type: ignore[arg-type]
        )
        first += n
    assert first == len(ids)
    found = {f"hidden {layer}": np.concatenate([part.hidden[layer] for part in parts]) for layer in layers}
    found["logits"] = np.concatenate([np.atleast_2d(part.logits) for part in parts])
    if logits == "last":
        found["positions"] = np.cumsum(cuts) - 1
    for number, rows in enumerate(cache):
        found[f"K {number}"], found[f"V {number}"] = (part.copy() for part in rows.prefix())
    return found


def differences(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> dict[str, int]:
    """How many numbers differ in their bits, of each array that differs; logits are compared where both have them."""
    found = {}
    for name in one:
        if name == "positions":
            continue
        a, b = one[name], other[name]
        if name == "logits":
            a, b = _logits_at_both(one, other)
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert np.isfinite(a).all(), f"{name} is not finite"
        unlike = int((a.view(np.uint8) != b.view(np.uint8)).reshape(*a.shape, -1).any(axis=-1).sum())
        if unlike:
            found[name] = unlike
    return found


def _logits_at_both(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    if "positions" not in one:
        return one["logits"], other["logits"]
    common, a, b = np.intersect1d(one["positions"], other["positions"], return_indices=True)
    assert common.size
    return one["logits"][a], other["logits"][b]
