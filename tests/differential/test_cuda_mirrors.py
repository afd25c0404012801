"""K/V rows that stay on a real GPU: whatever becomes of the host's cache, a step answers what it would without them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from frink_numba.backend import Serve, Step
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.device import CudaDevice, make_body, make_runtime
from frink_numba.host.kv_cache import KVCache
from tests.cuda.tensor_stacks import OPTIONS, assert_equal, hidden_rows, random_rows, step_over, taken, unlike_layers
from tests.cuda.test_tensor_mirrors import Silent
from tests.differential.gpu import device_of

pytestmark = pytest.mark.gpu

LAYERS = unlike_layers(4, [OPTIONS[0], OPTIONS[1], OPTIONS[5]])
WINDOWED = unlike_layers(4, [OPTIONS[1], OPTIONS[4], OPTIONS[5]])
CONTEXT = 2048
LIVES = 60  # changes, each followed by a step


class Pair:
    """A backend with mirrors, and one on a device that never saw the caches."""

    def __init__(self, tier: str, layers) -> None:
        self.layers = layers
        self.backend = CudaBackend(layers, device_of(tier))
        info = self.backend.device.info
        runtime = make_runtime(tier, info.number)
        self.plain = CudaBackend(layers, CudaDevice(info, runtime, make_body(tier, info, runtime)))

    def close(self) -> None:
        self.backend.close()
        self.plain.close()

    def new_cache(self, pinned: bool = True, dtype=np.float32) -> KVCache:
        return KVCache(self.layers, CONTEXT, dtype=dtype, allocate=self.backend.host_bytes if pinned else None)

    def run(self, cache: KVCache, batch: int, seed: int):
        """A step whose rows nobody has taken yet."""
        return self.backend.run(0, len(self.layers), step_over(self.layers, cache, hidden_rows(batch, seed)))

    def checked_step(self, cache: KVCache, batch: int, seed: int) -> int:
        """One step, the same bits with mirrors and without; its rows are pushed. The prefix bytes that went up."""
        step, before = step_over(self.layers, cache, hidden_rows(batch, seed)), self.backend.stats.prefix_up
        caches = [
            Silent(layer, tuple(part.copy() for part in rows.prefix()))
            for layer, rows in zip(self.layers, cache, strict=True)
        ]
        fresh = Step(self.layers, caches, step.start_pos, batch, step.hidden)
        want = taken(self.plain.run(0, len(self.layers), fresh))
        run = self.backend.run(0, len(self.layers), step)
        assert_equal(taken(run), want, f"{batch} rows at {step.start_pos}")
        cache.push(run.kv_rows)
        return self.backend.stats.prefix_up - before

    def change(self, what: int, cache: KVCache, rng: np.random.Generator, seed: int) -> KVCache:
        """One of the things that can become of a cache."""
        layers = self.layers
        if what == 0:
            cache.truncate(int(rng.integers(cache.positions + 1)))
        elif what == 1:  # rows of others
            cache.push(random_rows(layers, int(rng.integers(1, 90)), seed=seed))
        elif what == 2:  # rows that nobody takes
            self.run(cache, int(rng.integers(1, 12)), seed)
        elif what == 3:  # others write into the very tail that the device was lent
            n = int(rng.integers(1, 6))
            self.run(cache, n, seed)
            tails = [layer.tail(n) for layer in cache]
            for (k, v), (new_k, new_v) in zip(tails, random_rows(layers, n, seed=seed), strict=True):
                k[...], v[...] = new_k, new_v
            cache.push(tails)
        elif what == 4:  # a step's rows, changed on their way
            rows = [(2 * k, 3 * v) for k, v in self.run(cache, 3, seed).kv_rows]
            cache.push(rows)
        elif what == 5:  # rewound, and as long as before with other rows
            n = int(rng.integers(1, 8))
            if cache.positions > n:
                cache.truncate(cache.positions - n)
                cache.push(random_rows(layers, n, seed=seed))
        elif what == 6:
            return self.new_cache(pinned=bool(rng.integers(2)), dtype=(np.float32, np.float16)[int(rng.integers(2))])
        return cache


@pytest.fixture(params=["wgmma", "mma"])
def tier(request: pytest.FixtureRequest) -> str:
    tier: str = request.param
    device_of(tier)
    return tier


@pytest.fixture
def pair(tier: str) -> Iterator[Pair]:
    made = Pair(tier, LAYERS)
    yield made
    made.close()


def test_every_change_in_random_order(pair: Pair) -> None:
    """R10, issue 5: truncations, rows of others, dropped, changed, overwritten rows, other caches, growing mirrors."""
    rng = np.random.default_rng(5)
    cache, other = pair.new_cache(), pair.new_cache()
    counts = np.zeros(7, int)
    for number in range(LIVES):
        what = int(rng.integers(7)) if number % 9 else 1
        counts[what] += 1
        cache = pair.change(what, cache, rng, 1000 + number)
        pair.checked_step(cache, int(rng.choice([1, 2, 5, 8, 11, 70])), number)
        if number % 3 == 0:  # turns of another conversation
            pair.checked_step(other, int(rng.choice([1, 4, 30])), 500 + number)
    assert counts.all(), "a kind of change did not occur"


def test_what_is_known_stays(pair: Pair) -> None:
    """R8: a prompt, then generation with a rewind: no row goes up again."""
    cache, up = pair.new_cache(), 0
    for number, batch in enumerate((300, 12, 1, 1, 3, 1)):
        up += pair.checked_step(cache, batch, number)
    cache.truncate(cache.positions - 2)
    up += pair.checked_step(cache, 5, 9)
    assert up == 0


def test_evicted_rows(tier: str) -> None:
    """R12: a cache without its first rows is declined; emptied, it starts over and old rows are forgotten."""
    pair = Pair(tier, WINDOWED)
    cache = pair.new_cache()
    pair.checked_step(cache, 30, 0)
    assert cache.evict() > 0
    assert not isinstance(pair.backend.can_serve(0, step_over(WINDOWED, cache, hidden_rows(4))), Serve)
    cache.truncate(0)
    cache.push(random_rows(WINDOWED, 25, seed=4))
    assert pair.checked_step(cache, 4, 1) > 0
    assert pair.checked_step(cache, 1, 2) == 0
    pair.close()
