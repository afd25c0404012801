"""The weight store: budget, order of eviction, fused sets once in memory, sets beyond the budget, threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from frink_numba.errors import SettingError, ShapeError
from frink_numba.host import weights as module
from frink_numba.host.dequantize import dequantize
from frink_numba.host.memory import machine_memory
from frink_numba.host.weights import WeightStore
from frink_numba.quant import KINDS, QuantMatrix


def f16(rows: int, cols: int, seed: int = 0) -> QuantMatrix:
    """A matrix that must be expanded: its float32 weights take 4 * rows * cols bytes."""
    half = np.random.default_rng(seed).normal(size=(rows, cols)).astype(np.float16)
    return QuantMatrix(KINDS["F16"], half.view(np.uint8), rows, cols)


def float32(*matrices: QuantMatrix) -> np.ndarray:
    return np.concatenate([m.data.view(np.float16).astype(np.float32) for m in matrices])


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[QuantMatrix, int, int]]:
    """Every call of dequantize: (matrix, first row, rows)."""
    calls: list[tuple[QuantMatrix, int, int]] = []

    def counting(
        matrix: QuantMatrix, start: int = 0, stop: int | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        result = dequantize(matrix, start, stop, out)
        calls.append((matrix, start, result.shape[0]))
        return result

    monkeypatch.setattr(module, "dequantize", counting)
    return calls


def test_a_set_is_stacked_and_kept(expanded: list) -> None:  # type: ignore[type-arg]
    a, b = f16(3, 8, 1), f16(5, 8, 2)
    store = WeightStore(1 << 20)
    got = store.get(a, b)
    np.testing.assert_array_equal(got, float32(a, b))
    assert store.get(a, b) is got
    assert len(expanded) == 2
    assert store.used_bytes == 4 * 8 * 8
    with pytest.raises(ValueError, match="read-only"):
        got[0, 0] = 1


def test_a_matrix_is_in_memory_once(expanded: list) -> None:  # type: ignore[type-arg]
    """Asked for alone it is a slice of its set; a new set takes the place of the sets that hold its members."""
    a, b, c = f16(3, 8, 1), f16(5, 8, 2), f16(2, 8, 3)
    store = WeightStore(1 << 20)
    stacked = store.get(a, b, c)
    for part, rows in (((b,), slice(3, 8)), ((b, c), slice(3, 10)), ((a,), slice(0, 3))):
        got = store.get(*part)
        assert np.shares_memory(got, stacked)
        np.testing.assert_array_equal(got, stacked[rows])
    assert len(expanded) == 3
    np.testing.assert_array_equal(store.get(c, a), float32(c, a))  # not consecutive: a set of its own
    assert store.used_bytes == 4 * 8 * 5
    np.testing.assert_array_equal(store.get(a, b), float32(a, b))
    assert store.used_bytes == 4 * 8 * 8


def test_the_same_matrix_twice_in_a_set() -> None:
    a = f16(3, 8)
    store = WeightStore(1 << 20)
    np.testing.assert_array_equal(store.get(a, a), float32(a, a))
    np.testing.assert_array_equal(store.get(a), float32(a))
    b = f16(1 << 15, 8)
    store.budget_bytes = 4 * 8 << 15
    store.get(b)  # puts the double set out
    assert store.used_bytes == b.rows * b.cols * 4


def test_least_recently_used_goes_first(expanded: list) -> None:  # type: ignore[type-arg]
    a, b, c = f16(4, 8, 1), f16(4, 8, 2), f16(4, 8, 3)
    store = WeightStore(2 * 4 * 4 * 8)  # room for two
    store.get(a)
    store.get(b)
    store.get(a)
    store.get(c)  # puts b out
    assert store.used_bytes == store.budget_bytes
    expanded.clear()
    store.get(a)
    store.get(c)
    assert expanded == []
    store.get(b)
    assert [call[0] for call in expanded] == [b]


def test_a_slice_counts_as_use_of_its_set(expanded: list) -> None:  # type: ignore[type-arg]
    a, b, c, d = (f16(2, 8, seed) for seed in range(4))
    store = WeightStore(6 * 8 * 4)  # room for a set of two and one more
    store.get(a, b)
    store.get(c)
    store.get(b)  # a slice of the set, which is now used later than c
    store.get(d)
    expanded.clear()
    store.get(a, b)
    assert expanded == []


def test_the_budget_is_never_passed() -> None:
    rng = np.random.default_rng(0)
    matrices = [f16(int(rng.integers(1, 9)), 8, seed) for seed in range(12)]
    store = WeightStore(700)
    for index in rng.integers(0, 12, 200):
        np.testing.assert_array_equal(store.get(matrices[index]), float32(matrices[index]))
        assert 0 <= store.used_bytes <= 700


def test_float32_matrices_are_views() -> None:
    weights = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    store = WeightStore(0)
    got = store.get(QuantMatrix.from_float32(weights))
    assert np.shares_memory(got, weights)
    np.testing.assert_array_equal(got, weights)
    assert store.used_bytes == 0


def test_a_misaligned_float32_matrix_is_copied() -> None:
    buffer = np.zeros(4 * 4 * 8 + 1, np.uint8)
    data = buffer[1:].reshape(4, 32)
    data[...] = np.arange(32, dtype=np.float32).reshape(4, 8).view(np.uint8)
    got = WeightStore(1 << 20).get(QuantMatrix(KINDS["F32"], data, 4, 8))
    assert got.flags.aligned
    np.testing.assert_array_equal(got, np.arange(32).reshape(4, 8))


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("budget", [0, 100, 1 << 20])
def test_beyond_the_budget_gives_the_same_products(
    n: int,
    budget: int,
    monkeypatch: pytest.MonkeyPatch,
    expanded: list,  # type: ignore[type-arg]
) -> None:
    """Row blocks, here of 3 rows, one buffer: blocks never straddle two matrices."""
    monkeypatch.setattr(module, "_BLOCK_BYTES", 3 * 8 * 4)
    a, b = f16(7, 8, 1), f16(5, 8, 2)
    store = WeightStore(budget)
    x = np.random.default_rng(n).normal(size=(8, n)).astype(np.float32)
    out = np.full((12, n), np.nan, np.float32)
    want = float32(a, b).astype(np.float64) @ x
    assert store.product(x, a, b, out=out) is out
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    rows = store.matmul(np.ascontiguousarray(x.T), a, b)
    assert rows.shape == (n, 12)
    np.testing.assert_allclose(rows, want.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(store.get(a, b), float32(a, b))
    assert store.used_bytes <= budget
    if budget < 4 * 12 * 8:
        assert max(call[2] for call in expanded[:5]) <= 3
        assert store.used_bytes == 0


def test_matmul_fills_what_it_is_given() -> None:
    a = f16(4, 8)
    store = WeightStore(1 << 20)
    for n in (1, 3):
        out = np.full((n, 4), np.nan, np.float32)
        x = np.ones((n, 8), np.float32)
        assert store.matmul(x, a, out=out) is out
        np.testing.assert_allclose(out, x @ float32(a).T, rtol=1e-5)


def test_shapes_that_do_not_fit_are_named() -> None:
    """R20"""
    store = WeightStore(1 << 20)
    with pytest.raises(ShapeError, match="3 x 8, 2 x 16"):
        store.get(f16(3, 8), f16(2, 16))
    with pytest.raises(ShapeError, match="no weights"):
        store.get()
    with pytest.raises(ShapeError, match=r"\[2, 9\] do not fit weights of 3 x 8"):
        store.matmul(np.zeros((2, 9), np.float32), f16(3, 8))
    assert store.used_bytes == 0


def test_close_lets_go() -> None:
    a = f16(4, 8)
    store = WeightStore(1 << 20)
    store.get(a)
    store.close()
    store.close()
    assert store.used_bytes == 0
    np.testing.assert_array_equal(store.get(a), float32(a))


def test_a_failed_expansion_leaves_the_store_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = f16(4, 8, 1), f16(4, 8, 2)
    store = WeightStore(1 << 20)
    store.get(a)

    def fails(*arguments: object, **named: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(module, "dequantize", fails)
        with pytest.raises(MemoryError):
            store.get(b)
    assert store.used_bytes == 4 * 4 * 8
    np.testing.assert_array_equal(store.get(b), float32(b))
    np.testing.assert_array_equal(store.get(a), float32(a))


def test_the_budget_comes_from_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRINK_HOST_WEIGHTS", "3M")
    assert WeightStore().budget_bytes == 3 << 20
    monkeypatch.setenv("FRINK_HOST_WEIGHTS", "0")
    assert WeightStore().budget_bytes == 0
    monkeypatch.delenv("FRINK_HOST_WEIGHTS")
    assert WeightStore().budget_bytes == machine_memory() // 2
    monkeypatch.setenv("FRINK_HOST_WEIGHTS", "much")
    with pytest.raises(SettingError, match="FRINK_HOST_WEIGHTS"):
        WeightStore()


def test_threads_share_a_store(expanded: list) -> None:  # type: ignore[type-arg]
    """8 threads that all start with the same sets expand each once; with a budget for two, answers stay right."""
    matrices = [f16(16, 8, seed) for seed in range(5)]
    gate = threading.Barrier(8)
    store = WeightStore(1 << 20)

    def first_use(_: int) -> bool:
        gate.wait()
        return all((store.get(m) == float32(m)).all() for m in matrices)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(first_use, range(8)))
        assert len(expanded) == 5
        store = WeightStore(2 * 16 * 8 * 4)

        def much_use(seed: int) -> bool:
            order = np.random.default_rng(seed).integers(0, 5, 200)
            return all((store.get(matrices[i]) == float32(matrices[i])).all() for i in order)

        assert all(pool.map(much_use, range(8)))
    assert store.used_bytes <= store.budget_bytes
