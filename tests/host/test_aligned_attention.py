"""Attention in blocks of keys at fixed positions, against the usual one: windows, caps, sinks, padding, lost rows."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.host.aligned import WIDTH
from frink_numba.host.aligned_attention import attend_aligned
from frink_numba.host.attention import Visibility, attend
from frink_numba.host.scratch import Scratch

HEAD_DIM = 12


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (3, 0.0), (255, 2.0), (300, 0.0)])
@pytest.mark.parametrize("start", [0, 4, 252, 256, 508, 700])
def test_against_the_usual_attention(start: int, window: int, softcap: float, sinks: bool, dtype: type) -> None:
    """R11, R18: tokens in every set of neighbouring columns; rows that the window hides may be gone."""
    rng = np.random.default_rng(start + window)
    heads, kv_heads = 6, 2
    rule = Visibility(HEAD_DIM**-0.5, window, softcap, rng.normal(size=heads).astype(np.float32) if sinks else None)
    q = (3 * rng.normal(size=(heads, HEAD_DIM, WIDTH))).astype(np.float32)
    for first_column in range(WIDTH):
        for last_column in range(first_column, WIDTH):
            end = start + last_column + 1
            gone = max(0, start + first_column - window + 1) if window and first_column % 2 else 0
            keys, values = (rng.normal(size=(end, kv_heads, HEAD_DIM)).astype(dtype) for _ in "kv")
            tokens = slice(first_column, last_column + 1)
            want = np.empty((heads, HEAD_DIM, last_column + 1 - first_column), np.float32)
            own = np.ascontiguousarray(q[:, :, tokens])
            attend(own, keys[gone:], values[gone:], gone, start + first_column, rule, want, Scratch())
            got, scratch = np.full_like(q, np.nan), Scratch()
            with np.errstate(all="ignore"):
                attend_aligned(q.copy(), keys[gone:], values[gone:], gone, start, rule, got, scratch)
            np.testing.assert_allclose(got[:, :, tokens], want, rtol=2e-5, atol=2e-6)


def test_the_rows_given_are_not_changed() -> None:
    rng = np.random.default_rng(0)
    keys, values = (rng.normal(size=(300, 2, HEAD_DIM)).astype(np.float32) for _ in "kv")
    kept = keys.copy(), values.copy()
    q = rng.normal(size=(4, HEAD_DIM, WIDTH)).astype(np.float32)
    attend_aligned(q, keys, values, 0, 296, Visibility(0.3), np.empty_like(q), Scratch())
    np.testing.assert_array_equal(keys, kept[0])
    np.testing.assert_array_equal(values, kept[1])


def test_heads_are_grouped_in_order() -> None:
    """Head h reads K/V head h // group: a value that tells its K/V head comes out where it belongs."""
    values = np.zeros((8, 3, HEAD_DIM), np.float32)
    values += np.arange(3)[:, None]
    q = np.zeros((6, HEAD_DIM, WIDTH), np.float32)
    out = np.empty_like(q)
    attend_aligned(q, np.zeros_like(values), values, 0, 4, Visibility(1.0), out, Scratch())
    np.testing.assert_array_equal(out, np.broadcast_to(np.array([0, 0, 1, 1, 2, 2])[:, None, None], out.shape))
