"""K/V rows that stay on the device: whatever becomes of the host's cache, a step answers what it would without them."""

from __future__ import annotations

import functools
import gc

import numpy as np
import pytest

from frink_numba.backend import Serve, Step
from frink_numba.cuda.backend import CudaBackend
from frink_numba.host.kv_cache import KVCache
from frink_numba.layer import Layer
from tests.cuda.fake_tensor import tensor_device
from tests.cuda.tensor_stacks import (
    LIMIT,
    OPTIONS,
    advance,
    assert_equal,
    hidden_rows,
    random_rows,
    step_over,
    taken,
    unlike_layers,
    worst_error,
)

LAYERS = unlike_layers(4, [OPTIONS[0], OPTIONS[1], OPTIONS[5]])
WINDOWED = unlike_layers(4, [OPTIONS[1], OPTIONS[4], OPTIONS[5]])
CONTEXT = 2048


class Silent:
    """A layer's cache that tells nothing of what becomes of its rows."""

    def __init__(self, layer: Layer, rows) -> None:
        spec = layer.attention
        self.n_kv_heads, self.key_dim, self.value_dim = spec.n_kv_heads, spec.head_dim, spec.head_dim
        self.held = rows

    @property
    def positions(self) -> int:
        return len(self.held[0])

    rows = positions

    def prefix(self):
        return self.held


def without_mirrors(layers, step: Step) -> list[np.ndarray]:
    """What a device that never saw these caches answers, from the same rows."""
    caches = [
        Silent(layer, tuple(p.copy() for p in cache.prefix())) for layer, cache in zip(layers, step.caches, strict=True)
    ]
    fresh = Step(layers, caches, step.start_pos, step.batch, step.hidden)
    return taken(_plain_backend(tuple(layers)).run(0, len(layers), fresh))


@functools.cache
def _plain_backend(layers) -> CudaBackend:
    device = tensor_device()
    device.memory.bytes = lambda: 1 << 34  # whatever a test allows others
    return CudaBackend(layers, device)


def row_bytes(layers) -> int:
    """K and V rows of a position, float32, all layers."""
    return sum(8 * layer.attention.n_kv_heads * layer.attention.head_dim for layer in layers)


def new_cache(backend: CudaBackend, layers=LAYERS, pinned: bool = True, dtype=np.float32) -> KVCache:
    return KVCache(layers, CONTEXT, dtype=dtype, allocate=backend.host_bytes if pinned else None)


def checked_step(backend: CudaBackend, layers, cache: KVCache, batch: int, seed: int) -> tuple[list[np.ndarray], int]:
    """One step, held against a device without mirrors; its rows are pushed. Also the prefix bytes that went up."""
    step = step_over(layers, cache, hidden_rows(batch, seed))
    want, before = without_mirrors(layers, step), backend.stats.prefix_up
    run = backend.run(0, len(layers), step)
    answer = taken(run)
    assert_equal(answer, want, f"the step at {step.start_pos}")
    cache.push(run.kv_rows)
    return answer, backend.stats.prefix_up - before


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_nothing_goes_up_twice(pinned: bool, dtype):
    """R8: a prompt in chunks, then generation. Rows that the device made, and whose push is known, stay there.

    Only a lease says that pushed rows are the device's own; where memory is not page-locked float32 none is held, and
    the rows before the batch go up again as far as they are new.
    """
    backend = CudaBackend(LAYERS, tensor_device())
    cache, up = new_cache(backend, pinned=pinned, dtype=dtype), []
    for number, batch in enumerate((40, 12, 1, 1, 3, 1)):
        up.append(checked_step(backend, LAYERS, cache, batch, number)[1])
    row = row_bytes(LAYERS)
    if pinned and dtype is np.float32:
        assert up == [0] * 6
    else:  # each row once, with the step after the one that made it
        assert up == [0, 40 * row, 12 * row, row, row, 3 * row]


def test_rows_of_others_go_up_once():
    """A prefix that the host computed goes up with the first step and not with the second."""
    backend = CudaBackend(LAYERS, tensor_device())
    cache = new_cache(backend)
    cache.push(random_rows(LAYERS, 600))
    row = row_bytes(LAYERS)
    assert [checked_step(backend, LAYERS, cache, 5, seed)[1] for seed in range(3)] == [600 * row, 0, 0]
    cache.push(random_rows(LAYERS, 7, seed=9))
    assert [checked_step(backend, LAYERS, cache, 1, seed)[1] for seed in range(3)] == [7 * row, 0, 0]


def test_a_truncated_cache_brings_up_what_changed():
    """Rows up to the cut stay; what was pushed behind it by others goes up, even when the length is what it was."""
    backend = CudaBackend(LAYERS, tensor_device())
    cache, row = new_cache(backend), row_bytes(LAYERS)
    checked_step(backend, LAYERS, cache, 30, 0)
    cache.truncate(20)
    assert checked_step(backend, LAYERS, cache, 4, 1)[1] == 0  # rewound, and rows of the device over it
    cache.truncate(12)
    cache.push(random_rows(LAYERS, 12, seed=5))
    assert checked_step(backend, LAYERS, cache, 2, 2)[1] == 12 * row
    cache.truncate(0)
    cache.push(random_rows(LAYERS, 26, seed=6))
    assert checked_step(backend, LAYERS, cache, 2, 3)[1] == 26 * row


def test_rows_that_were_not_pushed_do_not_count():
    """A step whose rows nobody took, or whose place others took, leaves nothing behind."""
    backend = CudaBackend(LAYERS, tensor_device())
    cache, row = new_cache(backend), row_bytes(LAYERS)
    checked_step(backend, LAYERS, cache, 10, 0)
    run = backend.run(0, len(LAYERS), step_over(LAYERS, cache, hidden_rows(5, 1)))
    copies = [(k.copy(), v.copy()) for k, v in run.kv_rows]
    cache.push(random_rows(LAYERS, 5, seed=8))  # other rows than the step's
    assert checked_step(backend, LAYERS, cache, 3, 2)[1] == 5 * row
    run = backend.run(0, len(LAYERS), step_over(LAYERS, cache, hidden_rows(5, 3)))
    copies = [(k.copy(), v.copy()) for k, v in run.kv_rows]
    cache.push(copies)  # the step's, but nobody can know
    assert checked_step(backend, LAYERS, cache, 3, 4)[1] == 5 * row
    backend.run(0, len(LAYERS), step_over(LAYERS, cache, hidden_rows(5, 5)))  # dropped: a search went elsewhere
    assert checked_step(backend, LAYERS, cache, 4, 6)[1] == 0


def test_the_same_rows_pushed_twice_count_once():
    """A run's rows are pushed, cut off, and pushed again: the second time they are anybody's."""
    backend = CudaBackend(LAYERS, tensor_device())
    cache = new_cache(backend)
    checked_step(backend, LAYERS, cache, 10, 0)
    run = backend.run(0, len(LAYERS), step_over(LAYERS, cache, hidden_rows(6, 1)))
    cache.push(run.kv_rows)
    cache.truncate(10)
    cache.push([(2 * k, 3 * v) for k, v in run.kv_rows])
    checked_step(backend, LAYERS, cache, 3, 2)
    cache.truncate(12)
    checked_step(backend, LAYERS, cache, 3, 3)


def test_two_runs_before_one_push():
    """Two steps from the same place; the rows of the first are pushed though the second wrote the mirror last."""
    backend = CudaBackend(LAYERS, tensor_device())
    cache = new_cache(backend)
    checked_step(backend, LAYERS, cache, 10, 0)
    first = backend.run(0, len(LAYERS), step_over(LAYERS, cache, hidden_rows(4, 1)))
    kept = [(k.copy(), v.copy()) for k, v in first.kv_rows]
    backend.run(0, len(LAYERS), step_over(LAYERS, cache, hidden_rows(4, 2)))
    cache.push(kept)
    checked_step(backend, LAYERS, cache, 2, 3)
    # The first run's own arrays now hold the second run's rows; pushing them must not vouch for the mirror wrongly.
    first = backend.run(0, len(LAYERS), step_over(LAYERS, cache, hidden_rows(4, 4)))
    backend.run(0, len(LAYERS), step_over(LAYERS, cache, hidden_rows(4, 5)))
    cache.push(first.kv_rows)
    checked_step(backend, LAYERS, cache, 2, 6)


def test_layers_of_one_step_served_by_others():
    """Some layers run elsewhere: their rows are not on the device, and go up when it serves them again."""
    backend = CudaBackend(LAYERS, tensor_device())
    cache = new_cache(backend)
    checked_step(backend, LAYERS, cache, 8, 0)
    step = step_over(LAYERS, cache, hidden_rows(4, 1))
    part = backend.run(0, 2, step)
    foreign = random_rows(LAYERS[2:], 4, seed=3)
    cache.push([*part.kv_rows, *foreign])
    before = backend.stats.prefix_up
    assert checked_step(backend, LAYERS, cache, 2, 2)[1] == backend.stats.prefix_up - before
    assert backend.stats.prefix_up - before == 4 * row_bytes(LAYERS[2:])


def test_an_evicted_cache_is_never_read_as_if_it_were_whole():
    """R12: evicted rows decline; after a truncation to nothing the cache starts over, and old rows are forgotten."""
    backend = CudaBackend(WINDOWED, tensor_device())
    cache = new_cache(backend, WINDOWED)
    checked_step(backend, WINDOWED, cache, 30, 0)
    assert cache.evict() > 0
    assert not isinstance(backend.can_serve(0, step_over(WINDOWED, cache, hidden_rows(4))), Serve)
    cache.truncate(0)
    cache.push(random_rows(WINDOWED, 25, seed=4))
    assert isinstance(backend.can_serve(0, step_over(WINDOWED, cache, hidden_rows(4))), Serve)
    assert checked_step(backend, WINDOWED, cache, 4, 1)[1] == 25 * row_bytes(WINDOWED)


def test_a_fresh_cache_at_the_same_address():
    """A cache that is gone takes its rows with it, whoever lives at its address next."""
    device = tensor_device()
    backend = CudaBackend(LAYERS, device)
    seen, met = set(), False
    for seed in range(100):
        cache = new_cache(backend, pinned=False)
        cache.push(random_rows(LAYERS, 9, seed=seed))
        met = met or any(id(layer) in seen for layer in cache)
        seen |= {id(layer) for layer in cache}
        assert checked_step(backend, LAYERS, cache, 3, seed)[1] == 9 * row_bytes(LAYERS)
        del cache
        device.body.forget_unused()
        assert device.body.mirrored_bytes == 0
        if met and seed > 3:
            break
    assert met, "no address was used twice: the test shows nothing"


def test_a_cache_that_tells_nothing():
    """All its rows go up with each step, changed or not."""
    backend = CudaBackend(LAYERS, tensor_device())
    rows = random_rows(LAYERS, 11)
    caches = [Silent(layer, pair) for layer, pair in zip(LAYERS, rows, strict=True)]
    for seed in range(3):
        for k, v in rows:
            k += 0.25
            v[3] *= -1
        step = Step(LAYERS, caches, 11, 4, hidden_rows(4, seed))
        before = backend.stats.prefix_up
        assert_equal(taken(backend.run(0, len(LAYERS), step)), without_mirrors(LAYERS, step))
        assert backend.stats.prefix_up - before == 11 * row_bytes(LAYERS)


def test_several_caches_by_turns():
    """Conversations that take turns do not disturb each other, and their rows stay."""
    backend = CudaBackend(LAYERS, tensor_device())
    caches = [new_cache(backend) for _ in range(3)]
    for turn in range(4):
        for number, cache in enumerate(caches):
            assert checked_step(backend, LAYERS, cache, 2 + 7 * number + turn, 10 * turn + number)[1] == 0


def test_a_mirror_grows_and_keeps_its_rows():
    """More positions than there is room for: a longer mirror, the old rows moved on the device, none sent again."""
    device = tensor_device()
    backend = CudaBackend(LAYERS, device)
    cache, sizes, row = new_cache(backend), [], row_bytes(LAYERS)
    for number, foreign in enumerate((245, 0, 0, 250, 0)):
        cache.push(random_rows(LAYERS, foreign, seed=number))
        assert checked_step(backend, LAYERS, cache, 10, number)[1] == foreign * row
        sizes.append(device.body.mirrored_bytes)
    assert sizes[0] < sizes[1] == sizes[2] < sizes[3] == sizes[4]
    assert device.runtime.calls.count("move") == 2 * 2 * len(LAYERS)
    assert device.held_bytes == device.runtime.allocated()


@pytest.mark.parametrize("held", [0, 250])
def test_room_that_could_not_be_made_ready_is_not_counted(held: int):
    """R21: a failure between the allocation and its first use, of a new mirror and of one that grows."""
    for call in range(8):
        device = tensor_device()
        backend, runtime, mirrors = CudaBackend(LAYERS, device), device.runtime, device.body._mirrors
        other, cache = new_cache(backend), new_cache(backend)
        advance(backend, LAYERS, cache if held else other, hidden_rows(held or 20))
        runtime.fail_at = len(runtime.calls) + call
        backend.run(0, len(LAYERS), step_over(LAYERS, cache, hidden_rows(20)))
        blocks = {id(mirror.block): mirror.block for mirror in mirrors._held.values()}.values()
        assert mirrors.nbytes == sum(block.nbytes for block in [*blocks, *mirrors._kept]), runtime.calls[-1]


def test_a_random_life_of_a_cache():
    """Every kind of change in every order: a step always answers what a device without mirrors answers."""
    rng = np.random.default_rng(11)
    backend = CudaBackend(LAYERS, tensor_device(schedule="random", seed=3))
    cache = new_cache(backend)
    for number in range(40):
        what = rng.integers(6)
        if what == 0:
            cache.truncate(int(rng.integers(cache.positions + 1)))
        elif what == 1:
            cache.push(random_rows(LAYERS, int(rng.integers(1, 9)), seed=100 + number))
        elif what == 2:  # rows that nobody takes
            backend.run(0, len(LAYERS), step_over(LAYERS, cache, hidden_rows(int(rng.integers(1, 12)), number)))
        elif what == 3:  # the host writes its rows into the same tail
            n = int(rng.integers(1, 6))
            backend.run(0, len(LAYERS), step_over(LAYERS, cache, hidden_rows(n, number)))
            tails = [layer.tail(n) for layer in cache]
            for (k, v), (new_k, new_v) in zip(tails, random_rows(LAYERS, n, seed=200 + number), strict=True):
                k[...], v[...] = new_k, new_v
            cache.push(tails)
        elif what == 4 and number % 2:
            cache = new_cache(backend, pinned=bool(rng.integers(2)))
        checked_step(backend, LAYERS, cache, int(rng.choice([1, 2, 5, 11])), number)


def test_decode_after_prefill_equals_the_truth():
    """Eight tokens one by one behind a prompt, against float64 over the rows that the cache holds."""
    backend = CudaBackend(LAYERS, tensor_device())
    cache = new_cache(backend)
    advance(backend, LAYERS, cache, hidden_rows(21))
    for seed in range(8):
        step = step_over(LAYERS, cache, hidden_rows(1, seed))
        run = backend.run(0, len(LAYERS), step)
        assert worst_error(LAYERS, step, taken(run)) < 2 * LIMIT  # three layers, one after the other
        cache.push(run.kv_rows)


# --- memory ---


def needs(device, batch: int, positions: int) -> tuple[int, int, int]:
    """(weights, scratch, K/V memory of one cache) in bytes."""
    weights = sum(device.body.layer_bytes(layer) for layer in LAYERS)
    scratch = device.body.scratch(LAYERS).nbytes(batch, 0)
    rows = sum(device.body.mirror_bytes(layer, object(), positions) for layer in LAYERS)
    return weights, scratch, rows


def test_rows_of_other_caches_make_room(monkeypatch: pytest.MonkeyPatch):
    """A budget with room for one and a half caches: the idle one's rows are dropped, and go up when it comes back."""
    device = tensor_device()
    weights, scratch, rows = needs(device, 8, 256)
    monkeypatch.setenv("FRINK_CUDA_MEMORY", str(weights + scratch + rows + rows // 2))
    backend = CudaBackend(LAYERS, device)
    caches = [new_cache(backend), new_cache(backend)]
    up = []
    for seed, cache in enumerate((*caches, *caches)):
        step = step_over(LAYERS, cache, hidden_rows(8, seed))
        assert all(isinstance(backend.can_serve(l, step), Serve) for l in range(len(LAYERS)))  # noqa: E741
        up.append(checked_step(backend, LAYERS, cache, 8, seed)[1])
        assert device.held_bytes <= device.memory.bytes()
        gc.collect()
        assert device.runtime.allocated() <= device.memory.bytes()
    assert up[:2] == [0, 0]
    assert up[2] > 0
    assert up[3] > 0


def test_a_cache_that_outgrows_the_budget_is_declined(monkeypatch: pytest.MonkeyPatch):
    """B1, R7: before any device work, by the size of the K/V rows; what fits still runs."""
    device = tensor_device()
    weights, scratch, rows = needs(device, 8, 256)
    monkeypatch.setenv("FRINK_CUDA_MEMORY", str(weights + scratch + rows))
    backend = CudaBackend(LAYERS, device)
    cache = new_cache(backend)
    for seed in range(3):
        checked_step(backend, LAYERS, cache, 8, seed)
    cache.push(random_rows(LAYERS, 240))
    step = step_over(LAYERS, cache, hidden_rows(8))
    answers = [backend.can_serve(l, step) for l in range(len(LAYERS))]  # noqa: E741
    assert not all(isinstance(answer, Serve) for answer in answers)
    assert device.held_bytes <= device.memory.bytes()
    cache.truncate(100)
    checked_step(backend, LAYERS, cache, 8, 5)


def test_growing_scratch_is_never_there_twice(monkeypatch: pytest.MonkeyPatch):
    """What a step like the last one needs is remembered without keeping its memory: the old block goes first."""
    device = tensor_device()
    batches = (1, 1, 8, 8, 32, 64, 1)
    weights, scratch, rows = (
        max(sizes) for sizes in zip(*(needs(device, batch, 256) for batch in batches), strict=True)
    )
    monkeypatch.setenv("FRINK_CUDA_MEMORY", str(weights + scratch + rows))
    backend, most, allocate = CudaBackend(LAYERS, device), [], device.runtime.device_bytes

    def watched(nbytes: int):
        most.append(device.runtime.allocated() + nbytes)
        return allocate(nbytes)

    device.runtime.device_bytes = watched
    cache = new_cache(backend)
    for seed, batch in enumerate(batches):
        cache.truncate(0)
        checked_step(backend, LAYERS, cache, batch, seed)
    assert max(most) <= device.memory.bytes()


def test_closing_gives_all_memory_back():
    device = tensor_device()
    backend = CudaBackend(LAYERS, device)
    cache = new_cache(backend)
    checked_step(backend, LAYERS, cache, 9, 0)
    backend.close()
    gc.collect()
    assert device.held_bytes == device.runtime.allocated() == 0
    checked_step(backend, LAYERS, cache, 2, 1)  # and starts over
