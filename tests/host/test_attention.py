"""Blocked attention against float64: masks, windows, groups, caps, sinks, memory (R11, R18; faults 1, 5, 11)."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest

from frink_numba.host import attention
from frink_numba.host.attention import Visibility, attend
from frink_numba.host.scratch import Scratch
from tests import reference


def attended(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    start: int,
    first: int = 0,
    scratch: Scratch | None = None,
    **rule: object,
) -> np.ndarray:
    """Value sums [n, heads, head_dim] of rows `q` [n, heads, head_dim], through the package's columns."""
    columns = np.array(q.transpose(1, 2, 0), np.float32, order="C")
    out = np.full_like(columns, np.nan)
    visibility = Visibility(**{"scale": q.shape[2] ** -0.5, **rule})  # type: ignore[arg-type]
    attend(columns, k, v, first, start, visibility, out, scratch or Scratch())
    return out.transpose(2, 0, 1)


def draw(n: int, start: int, heads: int, kv_heads: int, head_dim: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Q, K and V rows; scores are a few units wide, so that attention is peaked."""
    rng = np.random.default_rng(seed)
    shapes = (n, heads, head_dim), (start + n, kv_heads, head_dim), (start + n, kv_heads, head_dim)
    return tuple(rng.normal(0, 1.5, shape).astype(np.float32) for shape in shapes)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("head_dim", [3, 16])
@pytest.mark.parametrize(("n", "start"), [(1, 0), (1, 1), (1, 700), (2, 0), (7, 5), (33, 0), (33, 600), (150, 1)])
def test_matches_float64(heads: int, kv_heads: int, head_dim: int, n: int, start: int) -> None:
    q, k, v = draw(n, start, heads, kv_heads, head_dim)
    want = reference.attention(q, k, v, start)
    assert reference.relative_error(attended(q, k, v, start), want) < 2e-6


@pytest.mark.parametrize("window", [1, 2, 4, 31, 33, 500, 5000])
@pytest.mark.parametrize(("n", "start"), [(1, 0), (1, 40), (6, 0), (40, 0), (40, 3), (150, 1000)])
@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, False), (2.0, False), (0.0, True), (2.0, True)])
def test_windows_caps_and_sinks(window: int, n: int, start: int, softcap: float, sinks: bool) -> None:
    q, k, v = draw(n, start, 4, 2, 8, seed=window)
    sink = np.array([-1.0, 0.5, 2.0, 30.0], np.float32) if sinks else None
    rule = {"window": window, "softcap": softcap, "sinks": sink}
    want = reference.attention(q, k, v, start, **rule)  # type: ignore[arg-type]
    assert reference.relative_error(attended(q, k, v, start, **rule), want) < 2e-6


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 queries and 8 keys, so that small shapes have many of them."""
    monkeypatch.setattr(attention, "_COLUMNS", 8)
    monkeypatch.setattr(attention, "_LEAST_QUERIES", 8)
    monkeypatch.setattr(attention, "_LEAST_KEYS", 8)
    monkeypatch.setattr(attention, "_SCORES", 1)
    monkeypatch.setattr(attention, "_ONE_QUERY_KEYS", 8)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("n", "start", "window", "sinks"),
    list(itertools.product([1, 7, 8, 9, 29], [0, 1, 8, 31], [0, 1, 7, 8, 9, 20], [False, True])),
)
def test_many_blocks_join_to_one_answer(n: int, start: int, window: int, sinks: bool) -> None:
    q, k, v = draw(n, start, 4, 2, 6, seed=n)
    sink = np.array([-1.0, 0.5, 2.0, 30.0], np.float32) if sinks else None
    want = reference.attention(q, k, v, start, window=window, sinks=sink)
    assert reference.relative_error(attended(q, k, v, start, window=window, sinks=sink), want) < 2e-6


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("window", [0, 4, 11])
def test_hidden_blocks_are_never_touched(window: int) -> None:
    """Rows that no query of a block sees are not even read: their NaNs would show."""
    q, k, v = draw(16, 32, 2, 1, 4)
    want = reference.attention(q, k, v, 32, window=window)
    visible_from = 32 - window + 1 if window else 0
    k[:visible_from] = np.nan
    v[:visible_from] = np.nan
    assert reference.relative_error(attended(q, k, v, 32, window=window), want) < 2e-6


def test_window_is_not_off_by_one() -> None:
    """Fault 5: W = 4, 6 tokens. Query 5 sees keys 2 to 5: all weight is on those, whatever key 1 holds."""
    q, k, v = draw(6, 0, 1, 1, 4)
    q[4] = q[5]
    k[1] = 100 * q[5]  # would win by far
    v[1] = 1e6
    got = attended(q, k, v, 0, window=4)
    assert np.abs(got[5]).max() < 100
    assert np.abs(got[4]).max() > 1000  # query 4 does see key 1
    want = reference.attention(q[5:], k[2:], v[2:], 3)
    assert reference.relative_error(got[5:], want) < 2e-6


@pytest.mark.parametrize("split", [(3, 3), (5, 1), (4, 2), (1, 1, 1, 1, 1, 1)])
@pytest.mark.parametrize("window", [0, 3])
def test_chunks_equal_one_shot(split: tuple[int, ...], window: int) -> None:
    """Fault 1: key j is visible iff j <= start + i, not iff j <= i."""
    q, k, v = draw(6, 0, 2, 1, 8)
    whole = attended(q, k, v, 0, window=window)
    start, parts = 0, []
    for n in split:
        end = start + n
        parts.append(attended(q[start:end], k[:end], v[:end], start, window=window))
        start = end
    assert reference.relative_error(np.concatenate(parts), whole.astype(np.float64)) < 1e-6


@pytest.mark.parametrize("n", [1, 5, 40])
def test_evicted_rows_shift_the_positions(n: int) -> None:
    """Rows that hold the positions from `first` on give the same answer when the window hides the others."""
    q, k, v = draw(n, 50, 4, 2, 8)
    whole = attended(q, k, v, 50, window=9)
    kept = attended(q, k[42:], v[42:], 50, first=42, window=9)
    assert reference.relative_error(kept, whole.astype(np.float64)) < 1e-6


@pytest.mark.parametrize("n", [1, 3, 140])
def test_float16_rows(n: int) -> None:
    """Rows stored as float16 are converted exactly, block by block."""
    q, k, v = draw(n, 600, 4, 2, 8)
    k, v = k.astype(np.float16), v.astype(np.float16)
    want = reference.attention(q, k.astype(np.float64), v.astype(np.float64), 600)
    assert reference.relative_error(attended(q, k, v, 600), want) < 2e-6


def test_soft_cap_of_a_large_score() -> None:
    """Fault 11: cap 50, score 200. 50 tanh(4) = 49.966, so the others keep a weight that is worked out here by hand."""
    q = np.full((1, 1, 4), 10, np.float32)
    k = np.array([[[0, 0, 0, 0]], [[10, 10, 10, 10]]], np.float32)  # scores 0 and 400 * 0.5 = 200
    v = np.array([[[1, 0, 0, 0]], [[0, 1, 0, 0]]], np.float32)
    weight = np.exp(-50 * np.tanh(4.0))
    got = attended(q, k, v, 1, softcap=50.0)[0, 0]
    np.testing.assert_allclose(got[:2], [weight / (1 + weight), 1 / (1 + weight)], rtol=1e-4)


def test_huge_scores_do_not_overflow() -> None:
    q, k, v = draw(9, 3, 2, 1, 4)
    q *= 1e3
    want = reference.attention(q, k, v, 3)
    assert reference.relative_error(attended(q, k, v, 3), want) < 1e-4  # scores of thousands, known to 1e-4


def test_memory_grows_with_the_block_not_with_the_square() -> None:
    """8192 queries of 2 heads: all scores would take 512 MiB; the blocks take a few."""
    q, k, v = draw(8192, 0, 2, 1, 4)
    columns = np.array(q.transpose(1, 2, 0), order="C")
    out = np.empty_like(columns)
    tracemalloc.start()
    attend(columns, k, v, 0, 0, Visibility(0.5), out, Scratch())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    rows = [0, 1, 511, 512, 4095, 8191]
    for row in rows:
        want = reference.attention(q[row : row + 1], k[: row + 1], v[: row + 1], row)
        assert reference.relative_error(out.transpose(2, 0, 1)[row : row + 1], want) < 2e-6


@pytest.mark.parametrize("n", [1, 40])
def test_poisoned_scratch_never_leaks(n: int) -> None:
    q, k, v = draw(n, 20, 4, 2, 8)
    scratch = Scratch()
    first = attended(q, k, v, 20, scratch=scratch, sinks=np.ones(4, np.float32))
    for buffer in scratch.buffers.values():
        buffer.fill(np.nan)
    second = attended(q, k, v, 20, scratch=scratch, sinks=np.ones(4, np.float32))
    np.testing.assert_array_equal(first, second)
