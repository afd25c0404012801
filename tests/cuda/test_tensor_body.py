"""The tensor-core body over a fake device: every served option, every order of the streams, every byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from frink_numba.backend import Decline, Serve
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.stack import launch_prefill_dense_stack, load_layers
from frink_numba.cuda.tensor import scratch
from frink_numba.cuda.tensor.program import Program
from frink_numba.cuda.tensor.weights import _scales
from frink_numba.cuda.traffic import Traffic
from frink_numba.errors import BackendError
from frink_numba.host.kv_cache import KVCache
from frink_numba.kernels.gemm_pack import pack
from frink_numba.layer import Layer, RopeLayout
from frink_numba.quant import QuantMatrix
from tests import reference
from tests.cuda.fake_tensor import tensor_device
from tests.cuda.tensor_stacks import (
    HIDDEN,
    LIMIT,
    OPTIONS,
    assert_equal,
    hidden_rows,
    random_rows,
    step_over,
    taken,
    unlike_layers,
    worst_error,
)
from tests.random_layers import LayerOptions, random_layer

LAYERS = unlike_layers()
TIERS = ("wgmma", "mma")


def backend_on(device, layers=LAYERS) -> CudaBackend:
    return CudaBackend(layers, device)


def cache_of(layers, start_pos: int, dtype=np.float32, allocate=None) -> KVCache:
    cache = KVCache(layers, 2048, dtype=dtype, allocate=allocate)
    if start_pos:
        cache.push(random_rows(layers, start_pos, dtype=dtype))
    return cache


def run_of(backend: CudaBackend, step) -> list[np.ndarray]:
    return taken(backend.run(0, len(step.layers), step))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    ("batch", "start_pos", "dtype"),
    [(1, 0, np.float32), (1, 9, np.float16), (4, 300, np.float32), (8, 2, np.float32), (9, 7, np.float16),
     (40, 0, np.float32), (40, 5, np.float16)],
)  # fmt: skip
def test_a_stack_equals_single_layers_and_each_of_those_the_truth(tier: str, batch: int, start_pos: int, dtype):
    """R9, R11, R14, R17 to R19, R24: all that is served, mixed kinds too, after prefixes of both types."""
    backend = backend_on(tensor_device(tier))
    cache = cache_of(LAYERS, start_pos, dtype, backend.host_bytes)
    step = step_over(LAYERS, cache, hidden_rows(batch))
    assert [type(backend.can_serve(l, step)) for l in range(len(LAYERS))] == [Serve] * len(LAYERS)  # noqa: E741
    whole, x = run_of(backend, step), step.hidden
    for number, layer in enumerate(LAYERS):
        single = taken(backend.run(number, 1, replace(step, hidden=x)))
        assert_equal(single[1:], whole[1 + 2 * number : 3 + 2 * number])
        alone = replace(step, layers=[layer], caches=[cache[number]], hidden=x)
        assert worst_error([layer], alone, single) < LIMIT, number
        x = single[0]
    np.testing.assert_array_equal(x, whole[0])


@pytest.mark.parametrize("tier", TIERS)
def test_many_rows_in_several_segments(tier: str, segments: None):
    """300 rows fill more than a tile of tokens, two blocks of scales, and every place of K/V rows twice."""
    layers = LAYERS[1:4]
    backend = backend_on(tensor_device(tier), layers)
    step = step_over(layers, cache_of(layers, 2, allocate=backend.host_bytes), hidden_rows(300))
    assert worst_error(layers, step, run_of(backend, step)) < LIMIT


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("schedule", ["lazy", "reversed", "random"])
def test_no_order_of_the_streams_changes_a_bit(tier: str, schedule: str, segments: None):
    """Events alone order the streams: rows are not written over before they are down."""
    for pinned in (False, True):
        for batch in (3, 12):
            want = None
            for seed in range(-1, 4 if schedule == "random" else 1):
                device = tensor_device(tier, schedule="issue" if seed < 0 else schedule, seed=seed)
                backend = backend_on(device)
                cache = cache_of(LAYERS, 5, allocate=backend.host_bytes if pinned else None)
                step = step_over(LAYERS, cache, hidden_rows(batch))
                first, again = run_of(backend, step), run_of(backend, step)
                want = first if want is None else want
                assert_equal(first, want)
                assert_equal(again, want)


@pytest.mark.parametrize("event", ["rows_ready", "rows_down"])
def test_every_event_is_needed(event: str, segments: None):
    """Without the waits for one kind of event some schedule gives another answer: the test above can fail."""
    want, changed = None, False
    for schedule, seed in [("issue", 0), ("lazy", 0), ("reversed", 0), *(("random", seed) for seed in range(6))]:
        device = tensor_device(schedule=schedule, seed=seed)
        backend = backend_on(device)
        step = step_over(LAYERS, cache_of(LAYERS, 5), hidden_rows(6))
        if want is not None:
            with device.working():
                ignored, wait = getattr(device.workspace, event), device.runtime.wait
            device.runtime.wait = lambda which, stream, wait=wait, ignored=ignored: (
                None if which in ignored else wait(which, stream)
            )
        got = run_of(backend, step)
        want = got if want is None else want
        changed = changed or not all(map(np.array_equal, got, want))
    assert changed


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("cuts", [(40,), (25, 15), (9, 30, 1), (1,) * 5 + (35,)])
def test_chunks_equal_one_shot(tier: str, cuts: tuple[int, ...]):
    """R11, R24: however a prompt is cut, every chunk is within the bound of what one step over all of it gives."""
    layers = unlike_layers(3, OPTIONS[:3])
    hidden = hidden_rows(40)

    def outcome(sizes: tuple[int, ...]) -> list[np.ndarray]:
        backend = backend_on(tensor_device(tier), layers)
        cache, at, parts = cache_of(layers, 0, allocate=backend.host_bytes), 0, []
        for size in sizes:
            run = backend.run(0, len(layers), step_over(layers, cache, hidden[at : at + size]))
            parts.append(taken(run))
            cache.push(run.kv_rows)
            at += size
        assert backend.stats.prefix_up == 0
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    for got, want in zip(outcome(cuts), outcome((40,)), strict=True):
        assert reference.relative_error(got, want) < LIMIT


def test_bytes_over_the_bus_are_those_of_the_rule():
    """R8: hidden up and down once, each layer's rows down once, prefix rows up once, weights once; one wait."""
    device = tensor_device()
    backend = backend_on(device)
    held = cache_of(LAYERS, 5, np.float16)
    step = step_over(LAYERS, held, hidden_rows(6))
    answer = run_of(backend, step)
    first = backend.stats
    assert (first.hidden_up, first.hidden_down) == (step.hidden.nbytes, step.hidden.nbytes)
    assert first.kv_down == sum(part.nbytes for part in answer[1:])
    assert first.prefix_up == sum(2 * part.nbytes for layer in held for part in layer.prefix())
    assert first.weights_up > sum(device.body.layer_bytes(layer) for layer in LAYERS) * 0.9
    assert (first.synchronizations, first.runs, device.runtime.waits) == (1, 1, 1)
    image = next(iter(device.body._programs.values())).image.nbytes
    assert device.runtime.up == first.weights_up + first.hidden_up + first.prefix_up + image
    assert device.runtime.down == first.hidden_down + first.kv_down
    run_of(backend, step)
    again = backend.stats
    assert (again.weights_up, again.prefix_up) == (first.weights_up, first.prefix_up)
    assert (again.hidden_up, again.hidden_down) == (2 * first.hidden_up, 2 * first.hidden_down)
    assert again.kv_down == 2 * first.kv_down


@pytest.mark.parametrize("batch", [1, 12])
def test_a_step_like_the_last_one_allocates_and_launches_nothing_anew(batch: int):
    """A captured graph a segment: the second step is copies, one replay, records and waits."""
    device = tensor_device()
    backend = backend_on(device)
    cache = cache_of(LAYERS, 3, allocate=backend.host_bytes)
    cache.reserve(50)
    for _ in range(2):
        cache.push(backend.run(0, len(LAYERS), step_over(LAYERS, cache, hidden_rows(batch))).kv_rows)
    device.runtime.calls.clear()
    cache.push(backend.run(0, len(LAYERS), step_over(LAYERS, cache, hidden_rows(batch))).kv_rows)
    allowed = {"send", "replay", "fetch", "fetch_strided", "record", "wait", "synchronize"}
    assert set(device.runtime.calls) <= allowed
    assert device.runtime.calls.count("replay") == 1
    assert device.runtime.calls.count("synchronize") == 1


def test_rows_go_straight_into_page_locked_caches():
    """The answer's rows are the cache's own tail; the push that follows copies nothing."""
    backend = backend_on(tensor_device())
    cache = cache_of(LAYERS, 0, allocate=backend.host_bytes)
    run = backend.run(0, len(LAYERS), step_over(LAYERS, cache, hidden_rows(5)))
    rows = taken(run)[1:]
    cache.push(run.kv_rows)
    for number, layer in enumerate(cache):
        for mine, held, want in zip(run.kv_rows[number], layer.prefix(), rows[2 * number :], strict=False):
            assert np.shares_memory(mine, held)
            np.testing.assert_array_equal(held, want)


def test_the_hidden_batch_is_not_written_to_and_answers_are_the_callers():
    backend = backend_on(tensor_device())
    step = step_over(LAYERS, cache_of(LAYERS, 0), hidden_rows(4))
    before = step.hidden.copy()
    run = backend.run(0, len(LAYERS), step)
    kept = taken(run)
    run_of(backend, replace(step, hidden=step.hidden + 1))
    np.testing.assert_array_equal(step.hidden, before)
    assert_equal(taken(run), kept)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("batch", [2, 12])
@pytest.mark.parametrize("size", [1e-12, 1e6, 1e15])
def test_activations_of_any_size(tier: str, batch: int, size: float):
    """Numerics: f16 operands never overflow, neither large streams nor channels that stick out."""
    for layer in unlike_layers(5)[:4]:
        hidden = (hidden_rows(batch) * size).astype(np.float32)
        hidden[:, 7] *= 1000
        hidden[0] *= 1e-6
        step = step_over([layer], cache_of([layer], 3), hidden)
        assert worst_error([layer], step, run_of(backend_on(tensor_device(tier), [layer]), step)) < LIMIT


def plain(width: int, **options) -> Layer:
    return random_layer(np.random.default_rng(0), LayerOptions(**{"hidden": width, "ffn": 64, **options}))


def enlarge(layer: Layer, factor: float) -> Layer:
    """A layer of float32 matrices with larger values, of which the output projection gives as much as before."""
    spec = layer.attention
    v = QuantMatrix.from_float32((spec.v.data.view(np.float32) * factor).astype(np.float32))
    o = QuantMatrix.from_float32((spec.o.data.view(np.float32) / factor).astype(np.float32))
    bias = None if spec.v_bias is None else (spec.v_bias * factor).astype(np.float32)
    return replace(layer, attention=replace(spec, v=v, o=o, v_bias=bias))


UNNORMED = [
    *(layer for layer in LAYERS if layer.attn_norm is None),
    enlarge(plain(HIDDEN, pre_norms=False, post_norms=True, qk_norm="head", head_dim=32), 1e3),
]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("batch", [2, 12])
@pytest.mark.parametrize("size", [1e-3, 1.0, 256.0])
@pytest.mark.parametrize("norms", [True, False])
def test_streams_that_no_norm_bounds(tier: str, batch: int, size: float, norms: bool):
    """Numerics: products of the stream itself, over the whole range that is promised for q, K and V."""
    for layer in UNNORMED:
        if not norms:
            layer = _with(layer, q_norm=None, k_norm=None, scale=0.1 * size**-2)
        hidden = (hidden_rows(batch) * size).astype(np.float32)
        hidden[0] *= 1e-6
        cache = cache_of([layer], 0)
        cache.push([(k if norms else k * np.float32(size), v * np.float32(size)) for k, v in random_rows([layer], 3)])
        step = step_over([layer], cache, hidden)
        assert worst_error([layer], step, run_of(backend_on(tensor_device(tier), [layer]), step)) < LIMIT


@pytest.mark.parametrize("batch", [2, 12])
def test_a_stream_beyond_all_bounds_is_never_wrong(batch: int):
    """Numerics: where f16 cannot hold a row of V, the rows that see it are not-a-numbers; the others are right."""
    for layer in UNNORMED:
        hidden = hidden_rows(batch)
        hidden[1] *= 1e12
        step = step_over([layer], cache_of([layer], 0), hidden)
        got, keys, values = run_of(backend_on(tensor_device(), [layer]), step)
        want, want_k, want_v = reference.layer(layer, hidden)
        assert np.isnan(got[1]).any()
        assert reference.relative_error(got[:1], want[:1]) < LIMIT
        assert all(np.isnan(row).any() for row in got[1 : layer.attention.window or None])
        for mine, true in ((keys, want_k), (values, want_v)):
            assert reference.relative_error(mine[1:2], true[1:2]) < LIMIT


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("batch", [2, 300])
def test_rows_of_k_and_v_beyond_f16(tier: str, batch: int):
    """Numerics: biases of 1e6 and values of 1e7; each layer has powers of two of its own."""

    kinds = [(LayerOptions(head_dim=32, ffn=64, bias=True), ["F32"])] * 4
    layers = [enlarge(layer, 10.0**p) for layer, p in zip(unlike_layers(6, kinds), (7, 6, 5, 0), strict=True)]
    assert len({layer_scale(layer) for layer in layers}) == 4
    cache = cache_of(layers, 0)
    cache.push([(k, v * np.float32(10.0**p)) for (k, v), p in zip(random_rows(layers, 3), (7, 6, 5, 0), strict=True)])
    step = step_over(layers, cache, hidden_rows(batch))
    assert worst_error(layers, step, run_of(backend_on(tensor_device(tier), layers), step)) < 2 * LIMIT


def layer_scale(layer: Layer) -> float:
    spec = layer.attention
    return _scales(layer, pack([spec.q, spec.k, spec.v]).norm_bounds)[2]


def _with(layer: Layer, **attention) -> Layer:
    return replace(layer, attention=replace(layer.attention, **attention))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (plain(40), "the q projection: the tensor-core kernels need a width that is a multiple of 32, not 40"),
        (
            plain(64, ffn=56),
            "the down projection: the tensor-core kernels need a width that is a multiple",
        ),
        (plain(64, heads=2, head_dim=24, kv_heads=1), "the o projection: the tensor-core kernels need a"),
        (plain(64, heads=32, head_dim=5, kv_heads=2, layout=None), "heads of an even number of channels"),
        (_with(plain(64, qk_norm="head"), k_norm=None), "a QK norm of q and another or none of k"),
        (
            _with(plain(64, qk_norm="head"), k_norm=np.ones(32, np.float32)),
            "a QK norm of q and another or none of k",
        ),
    ],
)
def test_what_the_tier_cannot_run_is_declined_by_name(layer: Layer, reason: str):
    """R19, R4: before any device work, with the first thing that does not fit."""
    device = tensor_device()
    answer = backend_on(device, [layer]).can_serve(0, step_over([layer], cache_of([layer], 0), hidden_rows(5)))
    assert isinstance(answer, Decline)
    assert answer.reason.startswith(reason)
    assert device.runtime.calls == []
    with pytest.raises(BackendError, match="layer 0 cannot run on the device"):
        load_layers([layer], device=device)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("start_pos", [0, 6])
def test_the_stack_without_a_cache(tier: str, start_pos: int):
    """The low-level function: prefix rows in, rows out, twice; nothing is remembered between calls."""
    with load_layers(LAYERS, device=tensor_device(tier)) as resident:
        for seed in (1, 2):
            hidden = hidden_rows(5, seed)
            prefix = random_rows(LAYERS, start_pos, seed) if start_pos else None
            got, rows = launch_prefill_dense_stack(hidden, resident, prefix=prefix)
            cache = cache_of(LAYERS, 0)
            if prefix:
                cache.push(prefix)
            step = step_over(LAYERS, cache, hidden)
            want = run_of(backend_on(tensor_device(tier)), step)
            assert_equal([got, *(part for pair in rows for part in pair)], want)


def test_layers_that_differ_in_all_ways_fit_into_one_step():
    """The description of a step has room for twelve forms of layers, in batches that need a tensor map for each."""
    shapes = [
        LayerOptions(heads=heads, kv_heads=kv, head_dim=dim, ffn=ffn, layout=RopeLayout.NEOX, bias=bool(ffn % 3))
        for heads, kv, dim, ffn in zip(
            (2, 4, 8, 2, 4, 8, 4, 2, 1, 6, 3, 4), (1, 2, 4, 2, 4, 2, 1, 2, 1, 3, 3, 2),
            (32, 16, 20, 48, 24, 28, 40, 80, 96, 16, 32, 64), range(32, 32 * 13, 32), strict=True,
        )
    ]  # fmt: skip
    mixed = [(shape, ["Q4_0", "Q8_0", "F16", "Q4_1", "Q5_0"]) for shape in shapes]
    layers = unlike_layers(8, mixed)
    backend = backend_on(tensor_device(), layers)
    step = step_over(layers, cache_of(layers, 1), hidden_rows(9))
    x = run_of(backend, step)
    assert np.isfinite(x[0]).all()
    assert x[0].shape == (9, HIDDEN)


@pytest.mark.parametrize("tier", TIERS)
def test_a_long_step_describes_a_scale_a_layer(tier: str):
    """Eight layers with eight scales of V, 2048 rows: the constants of rows fit beside maps, positions and tokens."""
    kinds = [(LayerOptions(head_dim=32, ffn=64, bias=True), ["F32"])] * 8
    layers = [
        _with(layer, v_bias=(layer.attention.v_bias * np.float32(4.0**power)).astype(np.float32))
        for power, layer in enumerate(unlike_layers(6, kinds), start=9)
    ]
    device, traffic = tensor_device(tier), Traffic()
    body = device.body
    with device.working():
        stream = device.workspace.compute
        uploaded = [body.upload(layer, stream, traffic) for layer in layers]
        caches = cache_of(layers, 0)
        mirrors = body._mirrors.take([x.shape for x in uploaded], list(caches), 2048, stream)
    assert len({x.scales[2] for x in uploaded}) == 8
    program = Program(body.kernels, body.scratch(layers), uploaded, mirrors, 2048, 1 << 20)
    assert program.image.nbytes <= scratch.step_bytes(2048, 8)
