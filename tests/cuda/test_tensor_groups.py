"""Several sequences in one step of the device: ragged lengths, caches of every history, failures, memory."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import numpy as np
import pytest

from frink_numba.backend import Serve, Step
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.tensor import cuts
from frink_numba.cuda.tensor.group_program import size_class
from frink_numba.host.kv_cache import KVCache
from tests import reference
from tests.cuda.fake_gpu import FakeCudaError
from tests.cuda.fake_tensor import tensor_device
from tests.cuda.tensor_stacks import LIMIT, OPTIONS, random_rows, unlike_layers
from tests.cuda.test_tensor_edges import EDGES, VOCABULARY, expected, token_step

LAYERS = unlike_layers(9, [OPTIONS[0], OPTIONS[1], OPTIONS[5]])
LAST = len(LAYERS) - 1
TIERS = ("wgmma", "mma")
ERROR = len(LAYERS) * LIMIT  # layer after layer, and the head


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many segments as a run can have, however few rows there are."""
    monkeypatch.setattr(cuts, "_SEGMENT_BYTES", 1)


def backend_on(device=None) -> CudaBackend:
    return CudaBackend(LAYERS, tensor_device() if device is None else device)


def cache_at(backend: CudaBackend | None, positions: int, seed: int = 0, dtype=np.float32) -> KVCache:
    cache = KVCache(LAYERS, 1024, dtype=dtype, allocate=backend.host_bytes if backend is not None else None)
    if positions:
        cache.push(random_rows(LAYERS, positions, seed, dtype))
    return cache


def steps_over(caches: Sequence[KVCache], sizes: Sequence[int], logits: str | int = 1, **fields) -> list[Step]:
    return [
        token_step(LAYERS, cache, n, n if logits == "all" else min(n, int(logits)), seed=100 + at, **fields)
        for at, (cache, n) in enumerate(zip(caches, sizes, strict=True))
    ]


def run_group(backend: CudaBackend, steps: Sequence[Step]):
    assert isinstance(backend.serves_group(steps), Serve)
    runs = backend.run_group(steps)
    assert runs is not None, "the group failed"
    return runs


def worst_error(step: Step, run) -> float:
    """Of logits and, where they are kept, K/V rows, to the float64 truth."""
    x = reference.weights(EDGES.embedding)[step.tokens] * EDGES.embedding_scale
    errors = [reference.relative_error(run.logits, expected(step)[1])] if step.logits else []
    for number, (layer, cache) in enumerate(zip(LAYERS, step.caches, strict=True)):
        x, k, v = reference.layer(layer, x, *(part[: step.start_pos] for part in cache.prefix()))
        if step.keep:
            errors += [
                reference.relative_error(got, want) for got, want in zip(run.kv_rows[number], (k, v), strict=True)
            ]
    return max(errors)


SIZES = {
    "one": [1],
    "ragged": [5, 1, 12, 3],
    "single tokens": [1] * 5,
    "few rows each": [2, 8, 1],
    "many": [3] * 33,
    "long": [130, 1, 70],
}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("keep", [True, False])
def test_a_group_answers_what_each_sequence_alone_would(tier: str, sizes: list[int], keep: bool):
    """R11, R24: ragged lengths behind prefixes of their own; without caches nothing of K/V comes down."""
    backend = backend_on(tensor_device(tier))
    starts = [(7 * at) % 20 if keep else 0 for at in range(len(sizes))]
    caches = [cache_at(backend if at % 3 else None, start, at) for at, start in enumerate(starts)]
    if not keep:
        caches = [cache_at(None, 0)] * len(sizes)
    steps = steps_over(caches, sizes, keep=keep)
    runs = run_group(backend, steps)
    assert max(map(worst_error, steps, runs)) < ERROR
    row = sum(8 * layer.attention.n_kv_heads * layer.attention.head_dim for layer in LAYERS)
    assert backend.stats.kv_down == (row * sum(sizes) if keep else 0)
    assert backend.stats.logits_down == 4 * VOCABULARY * len(sizes)
    assert backend.stats.synchronizations == 1


def test_all_logits_and_the_hidden_batch():
    """Rows of several heads: more logits than the device makes at a time."""
    backend = backend_on()
    steps = steps_over([cache_at(backend, 3 * at, at) for at in range(4)], [90, 2, 1, 60], "all",
                       hidden_after=frozenset({LAST}))  # fmt: skip
    for step, run in zip(steps, run_group(backend, steps), strict=True):
        hidden, logits = expected(step)
        assert reference.relative_error(run.logits, logits) < ERROR
        assert reference.relative_error(run.hidden, hidden) < ERROR


def test_no_logits_at_all():
    backend = backend_on()
    steps = steps_over([cache_at(backend, at, at) for at in range(3)], [4, 4, 9], 0)
    runs = run_group(backend, steps)
    assert [run.logits for run in runs] == [None] * 3
    assert max(map(worst_error, steps, runs)) < ERROR


def test_programs_are_used_again_for_other_lengths():
    """A group of another make-up finds the launches of its class; nothing of the last group shows."""
    backend = backend_on()
    device = backend.device
    for seed, sizes in enumerate(([30, 2, 9], [1, 37], [12, 12, 12, 1], [20, 20])):
        caches = [cache_at(backend, (seed + at) % 4, seed + at) for at in range(len(sizes))]
        steps = steps_over(caches, sizes)
        assert max(map(worst_error, steps, run_group(backend, steps))) < ERROR
    assert len(device.body._group_programs) < 4


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_life_in_groups_and_alone(dtype, pinned: bool):
    """R8: prompts, tokens one by one, steps alone in between, cuts and rows of others: nothing goes up twice."""
    backend, plain = backend_on(), backend_on()
    rng, foreign = np.random.default_rng(5), dict[int, int]()
    caches = [cache_at(backend if pinned else None, 0, dtype=dtype) for _ in range(4)]
    row = sum(8 * layer.attention.n_kv_heads * layer.attention.head_dim for layer in LAYERS)
    for turn in range(16):
        chosen = [at for at in range(4) if rng.integers(4)] or [0]
        sizes = [int(rng.choice([1, 1, 2, 11])) for _ in chosen]
        if turn == 6:
            caches[0].truncate(caches[0].positions // 2)
        if turn == 9:
            caches[1].push(random_rows(LAYERS, 5, 77))
            foreign[1] = 5 * row
        steps = steps_over([caches[at] for at in chosen], sizes)
        before = backend.stats.prefix_up
        alone = turn % 5 == 3
        runs = [backend.run(0, len(LAYERS), step) for step in steps] if alone else run_group(backend, steps)
        if pinned and dtype is np.float32:
            assert backend.stats.prefix_up - before == sum(foreign.pop(at, 0) for at in chosen)
        for step, run in zip(steps, runs, strict=True):
            fresh = Step(LAYERS, copy_of(step.caches), step.start_pos, step.batch, tokens=step.tokens, edges=EDGES,
                         lookup=step.lookup, logits=1)  # fmt: skip
            other = plain.run(0, len(LAYERS), fresh)
            assert reference.relative_error(run.logits, other.logits) < ERROR
            assert worst_error(step, run) < 2 * ERROR
        for step, run in zip(steps, runs, strict=True):
            step.caches.push(run.kv_rows)


def copy_of(cache: KVCache) -> KVCache:
    copy = KVCache(LAYERS, 1024, dtype=cache.dtype)
    if cache.positions:
        copy.push([(k.copy(), v.copy()) for k, v in (layer.prefix() for layer in cache)])
    return copy


# --- what the output matrix's rows are made into ---


@pytest.mark.parametrize("tier", TIERS)
def test_the_likeliest_tokens_come_down_alone(tier: str):
    """Greedy steps: one int a sequence in place of its logits."""
    backend = backend_on(tensor_device(tier))
    steps = steps_over([cache_at(backend, 2 + at, at) for at in range(7)], [1] * 7, ahead=1, choices=VOCABULARY)
    runs = run_group(backend, steps)
    for step, run in zip(steps, runs, strict=True):
        logits = expected(step)[1][0]
        gap = logits.max() - logits[run.tokens[0]]
        assert gap <= ERROR * np.linalg.norm(logits)
        assert run.logits is None
    assert backend.stats.logits_down == 0


def test_logits_that_are_no_numbers_choose_minus_one():
    """As a step alone: the sequence that sees a bad row has no token, its neighbours have theirs."""
    backend = backend_on()
    caches = [cache_at(backend, 3, at) for at in range(3)]
    rows = random_rows(LAYERS, 1, 9)
    rows[1][0][0, 0, 0] = np.nan
    caches[1].push(rows)
    steps = steps_over(caches, [1, 1, 1], ahead=1, choices=VOCABULARY)
    tokens = [int(run.tokens[0]) for run in run_group(backend, steps)]
    assert tokens[1] == -1
    assert min(tokens[0], tokens[2]) >= 0


def one_by_one(backend: CudaBackend, caches: Sequence[KVCache], tokens: Sequence[int], count: int) -> np.ndarray:
    """Tokens [count, sequences] that groups choose one at a time, their rows pushed."""
    chosen, now = [], list(tokens)
    for _ in range(count):
        runs = run_group(backend, greedy_steps(caches, now, 1))
        now = [int(run.tokens[0]) for run in runs]
        for cache, run in zip(caches, runs, strict=True):
            cache.push(run.kv_rows)
        chosen.append(now)
    return np.array(chosen)


def greedy_steps(caches: Sequence[KVCache], tokens: Sequence[int], ahead: int) -> list[Step]:
    steps = steps_over(caches, [1] * len(caches), ahead=ahead, choices=VOCABULARY)
    for step, token in zip(steps, tokens, strict=True):
        step.tokens = np.array([token])
    return steps


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("count", [3, 5])
def test_a_group_goes_ahead(tier: str, count: int, segments: None):
    """Tokens and rows are those of steps one after the other, to the bit, with one wait; then it goes on from there."""
    plain, ahead = backend_on(tensor_device(tier)), backend_on(tensor_device(tier))
    theirs, mine = ([cache_at(backend, 2 + 3 * at, at) for at in range(count)] for backend in (plain, ahead))
    tokens: Sequence[int] = range(count)
    for size in (7, 4):
        want = one_by_one(plain, theirs, tokens, size)
        before = ahead.stats.synchronizations
        runs = run_group(ahead, greedy_steps(mine, tokens, size))
        assert ahead.stats.synchronizations - before == 1
        np.testing.assert_array_equal(np.stack([run.tokens for run in runs], axis=1), want)
        for cache, run in zip(mine, runs, strict=True):
            cache.push(run.kv_rows)
        tokens = want[-1].tolist()
    for one, other in zip(mine, theirs, strict=True):
        for got, rows in zip(one, other, strict=True):
            for part, truth in zip(got.prefix(), rows.prefix(), strict=True):
                np.testing.assert_array_equal(part, truth)


def test_how_far_a_group_goes_ahead():
    """As far as the least of its members wants, and the body can; one token where a member has more than a row."""
    backend = backend_on()
    caches = [cache_at(backend, 4, at) for at in range(2)]
    steps = greedy_steps(caches, [1, 2], 5)
    steps[1].ahead = 3
    assert [len(run.tokens) for run in run_group(backend, steps)] == [3, 3]
    assert [len(run.tokens) for run in run_group(backend, greedy_steps(caches, [1, 2], 500))] == [32, 32]
    steps = steps_over(caches, [1, 2], ahead=5, choices=VOCABULARY)
    assert [len(run.tokens) for run in run_group(backend, steps)] == [1, 1]


def test_what_follows_from_no_numbers_is_no_token():
    backend = backend_on()
    caches = [cache_at(backend, 3, at) for at in range(2)]
    rows = random_rows(LAYERS, 1, 9)
    rows[1][0][0, 0, 0] = np.nan
    caches[1].push(rows)
    tokens = [run.tokens.tolist() for run in run_group(backend, greedy_steps(caches, [1, 2], 4))]
    assert min(tokens[0]) >= 0
    assert tokens[1] == [-1] * 4


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("keep", [True, False])
def test_scores_of_given_tokens(tier: str, keep: bool):
    """One float32 a row in place of a row of logits, over more rows than a head takes at a time."""
    backend, sizes = backend_on(tensor_device(tier)), [70, 1, 90, 5]
    rng = np.random.default_rng(3)
    caches = [cache_at(backend, 0) for _ in sizes]
    steps = steps_over(caches, sizes, "all", keep=keep)
    for step in steps:
        step.targets = rng.integers(0, VOCABULARY, step.batch)
    for step, run in zip(steps, run_group(backend, steps), strict=True):
        logits = expected(step)[1]
        top = logits.max(axis=1, keepdims=True)
        truth = (logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True)))[
            np.arange(step.batch), step.targets
        ]
        assert run.scores.shape == (step.batch,)
        assert np.abs(run.scores - truth).max() < ERROR * np.abs(logits).max()
    assert backend.stats.logits_down == 0


# --- streams, failures, memory ---


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("schedule", ["lazy", "reversed", "random"])
def test_no_order_of_the_streams_changes_a_bit(schedule: str, ahead: bool, segments: None):
    """Events alone order the streams: rows are in the caches before anybody looks, and not written over before."""
    want = None
    for seed in range(-1, 4 if schedule == "random" else 1):
        backend = backend_on(tensor_device(schedule="issue" if seed < 0 else schedule, seed=seed))
        caches = [cache_at(backend, 2 * at, at) for at in range(3)]
        steps = greedy_steps(caches, [1, 2, 3], 4) if ahead else steps_over(caches, [4, 1, 7])
        got = [part.copy() for run in run_group(backend, steps) for pair in run.kv_rows for part in pair]
        want = got if want is None else want
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_failure_at_any_call_leaves_no_trace(ahead: bool):
    """R10, R21: whichever call fails, caches stay, the failure is said, and the next group is right."""
    clean = backend_on()
    clean_caches = [cache_at(clean, 2 + at, at) for at in range(3)]
    run_group(clean, greedy_steps(clean_caches, [1, 2, 3], 3) if ahead else steps_over(clean_caches, [2, 1, 5]))
    calls = len(clean.device.runtime.calls)
    failed = 0
    for at in range(0, calls, 3):
        backend = backend_on()
        caches = [cache_at(backend, 2 + number, number) for number in range(3)]
        held = [[part.copy() for layer in cache for part in layer.prefix()] for cache in caches]
        runtime = backend.device.runtime
        runtime.fail_at = len(runtime.calls) + at
        group = greedy_steps(caches, [1, 2, 3], 3) if ahead else steps_over(caches, [2, 1, 5])
        assert backend.serves_group(group) is not None
        failed += backend.run_group(group) is None
        runtime.fail_at = None
        for cache, rows in zip(caches, held, strict=True):
            for part, was in zip((part for layer in cache for part in layer.prefix()), rows, strict=True):
                np.testing.assert_array_equal(part, was)
        if at % 7 < 2:
            group = steps_over(caches, [2, 1, 5])
            assert max(map(worst_error, group, run_group(backend, group))) < ERROR
    assert failed > calls // 6


def test_a_lost_device_declines():
    backend = backend_on()
    steps = steps_over([cache_at(backend, 1) for _ in range(2)], [1, 1])
    runtime = backend.device.runtime
    runtime.fail_at, runtime.sticky, runtime.error = len(runtime.calls) + 9, True, FakeCudaError("ILLEGAL_ADDRESS")
    assert backend.run_group(steps) is None
    assert backend.serves_group(steps) is None


def test_two_models_on_one_device_do_not_mix_their_sizes():
    """R20: each asks outside of the device's lock, maybe between any two lines of the other's question."""
    from frink_numba.cuda.group import member

    body, layers = tensor_device().body, LAYERS[:1]
    members = [member(step, 32) for step in [token_step(LAYERS, KVCache(LAYERS, 64), 3, 1)]]
    own, others = (tensor_device().body.group_bytes(asked, EDGES, members) for asked in (layers, LAYERS))
    assert own != others

    class Interrupted(type(body)):
        @property
        def _group_sizes(self):
            return self.__dict__["sizes"]

        @_group_sizes.setter
        def _group_sizes(self, value):
            self.__dict__["sizes"] = value
            if value[0] is layers:
                self.group_bytes(LAYERS, EDGES, members)

    body.__dict__["sizes"] = body.__dict__.pop("_group_sizes")
    body.__class__ = Interrupted
    assert body.group_bytes(layers, EDGES, members) == own
    assert body.group_bytes(LAYERS, EDGES, members) == others


def needs(backend: CudaBackend, steps: Sequence[Step]) -> int:
    """Bytes that a group takes at least."""
    from frink_numba.cuda.group import member

    body = backend.device.body
    rows = sum(
        body.mirror_bytes(layer, object(), step.start_pos + step.batch)
        for step in steps
        if step.keep
        for layer in LAYERS
    )
    weights = sum(body.layer_bytes(layer) for layer in LAYERS) + body.edges_bytes(EDGES)
    return weights + rows + body.group_bytes(LAYERS, EDGES, [member(step, 32) for step in steps])


@pytest.mark.parametrize("keep", [True, False])
def test_the_budget_holds_to_the_byte(keep: bool, monkeypatch: pytest.MonkeyPatch):
    """B1, R7: a group that just fits runs within the budget; with a byte less it is declined before any work."""
    device = tensor_device()
    backend = backend_on(device)
    caches = [cache_at(backend, 0) for _ in range(4)]
    steps = steps_over(caches, [20, 3, 1, 9], keep=keep)
    need = needs(backend, steps)
    monkeypatch.setenv("FRINK_CUDA_MEMORY", str(need - 1))
    assert backend.serves_group(steps) is None
    monkeypatch.setenv("FRINK_CUDA_MEMORY", str(need))
    most, allocate = [], device.runtime.device_bytes

    def watched(nbytes: int):
        most.append(device.runtime.allocated() + nbytes)
        return allocate(nbytes)

    device.runtime.device_bytes = watched
    assert max(map(worst_error, steps, run_group(backend, steps))) < ERROR
    assert max(most) <= need
    assert device.held_bytes == device.runtime.allocated()


def test_mirrors_of_other_caches_make_room(monkeypatch: pytest.MonkeyPatch):
    """Idle conversations go, and come back with their rows."""
    device = tensor_device()
    backend = backend_on(device)
    first, second = ([cache_at(backend, 4, seed + at) for at in range(3)] for seed in (0, 50))
    monkeypatch.setenv("FRINK_CUDA_MEMORY", str(needs(backend, steps_over(first, [2, 2, 2]))))
    for caches in (first, second, first):
        steps = steps_over(caches, [2, 2, 2])
        runs = run_group(backend, steps)
        assert max(map(worst_error, steps, runs)) < ERROR
        for step, run in zip(steps, runs, strict=True):
            step.caches.push(run.kv_rows)
        assert device.held_bytes <= device.memory.bytes()
        gc.collect()
        assert device.runtime.allocated() <= device.memory.bytes()


def test_caches_grow_within_the_budget(monkeypatch: pytest.MonkeyPatch):
    """Old and new memory of a cache are there together only where there is room; else its rows go up again."""
    for spare in (0, 1 << 30):
        device = tensor_device()
        backend = backend_on(device)
        caches = [cache_at(backend, 250, at) for at in range(2)]
        target = steps_over([cache_at(None, 320, at) for at in range(2)], [8, 8])
        monkeypatch.setenv("FRINK_CUDA_MEMORY", str(needs(backend, target) + spare))
        most, allocate = [], device.runtime.device_bytes
        device.runtime.device_bytes = lambda n, m=most, d=device, a=allocate: (
            m.append(d.runtime.allocated() + n),
            a(n),
        )[1]
        for _ in range(3):
            steps = steps_over(caches, [8, 8])
            runs = run_group(backend, steps)
            assert max(map(worst_error, steps, runs)) < ERROR
            for step, run in zip(steps, runs, strict=True):
                step.caches.push(run.kv_rows)
        assert max(most) <= device.memory.bytes()


def test_memory_of_caches_that_are_gone_is_used_again():
    """A new batch of prompts allocates nothing on the device once one like it has run."""
    device = tensor_device()
    backend = backend_on(device)
    made = []
    gc.disable()  # nothing waits for the collector
    try:
        for _ in range(3):
            caches = [cache_at(backend, 0) for _ in range(4)]
            steps = steps_over(caches, [9, 4, 1, 7])
            runs = run_group(backend, steps)
            assert max(map(worst_error, steps, runs)) < ERROR
            made.append(device.runtime.calls.count("device_bytes"))
            del caches, steps, runs
    finally:
        gc.enable()
    assert made[0] == made[1] == made[2]


def test_what_is_not_a_group_is_declined():
    """Mixed members, evicted or foreign caches, a hidden batch in place of tokens: one by one."""
    backend = backend_on()
    one, two = cache_at(backend, 3), cache_at(backend, 0)
    kept, lost = steps_over([one, two], [2, 2]), steps_over([two, two], [2, 2], keep=False)
    assert backend.serves_group(kept) is not None
    assert backend.serves_group([kept[0], lost[1]]) is None
    assert backend.serves_group(steps_over([one], [2], keep=False)) is None  # rows before it that nobody keeps
    hidden = Step(LAYERS, two, 0, 2, np.zeros((2, LAYERS[0].hidden_dim), np.float32))
    assert backend.serves_group([kept[0], hidden]) is None
    assert backend.serves_group(steps_over([cache_at(backend, 0) for _ in range(65)], [1] * 65)) is None


def test_size_classes_waste_little():
    """At most an eighth more rows than are needed, but for few; and few classes up to a chunk."""
    sizes = [size_class(n) for n in range(1, 4097)]
    assert all(n <= size for n, size in enumerate(sizes, 1))
    assert all(size <= 1.13 * n + 15 for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 64
