"""The layer loop over a fake device: right operations, right order, right bytes."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.cuda.body import KvSource
from frink_numba.cuda.traffic import Traffic
from frink_numba.layer import Layer, RopeLayout
from tests import reference
from tests.cuda.fake_gpu import fake_device
from tests.random_layers import LayerOptions, random_layer

OPTIONS = (
    LayerOptions(),
    LayerOptions(layout=RopeLayout.NEOX, bias=True, qk_norm="head", window=3),
    LayerOptions(partial=True, factors=True, magnitude=1.3, softcap=2.0, post_norms=True, qk_norm="whole"),
    LayerOptions(layout=None, heads=6, kv_heads=1, head_dim=12, ffn=20, bias=True, eps=1e-6),
    LayerOptions(layout=RopeLayout.NEOX, theta=500.0, heads=2, kv_heads=2, head_dim=20, ffn=72, window=1),
)


def make_layers(seed: int, *options: LayerOptions) -> list[Layer]:
    rng = np.random.default_rng(seed)
    return [random_layer(rng, chosen) for chosen in options or OPTIONS]


def make_prefixes(rng: np.random.Generator, layers: list[Layer], start_pos: int, dtype=np.float32):
    return [
        tuple(
            rng.normal(size=(start_pos, layer.attention.n_kv_heads, layer.attention.head_dim)).astype(dtype)
            for _ in "kv"
        )
        for layer in layers
    ]


def go(device, layers, hidden, prefixes, start_pos):
    """Upload, reserve, run: what the backend does."""
    traffic = Traffic()
    with device.working():
        stream = device.workspace.compute
        resident = [device.body.upload(layer, stream, traffic) for layer in layers]
        need = device.body.scratch(layers).nbytes(len(hidden), start_pos)
        block = device.workspace.arena.reserve(need, 0)
        sources = [KvSource(rows) for rows in prefixes]
        answer = device.body.run(device.workspace, resident, hidden, sources, start_pos, block, traffic)
    return answer.hidden, answer.rows, traffic


def check_against_the_truth(layers, hidden, prefixes, got, got_rows, bound=1e-5):
    x = hidden.astype(np.float64)
    for layer, (keys, values), (k, v) in zip(layers, prefixes, got_rows, strict=True):
        x, want_k, want_v = reference.layer(layer, x, keys, values)
        assert reference.relative_error(k, want_k) < bound
        assert reference.relative_error(v, want_v) < bound
    assert reference.relative_error(got, x) < bound


@pytest.mark.parametrize("start_pos", [0, 1, 7])
@pytest.mark.parametrize("batch", [1, 4, 9])
def test_a_stack_of_unlike_layers_equals_the_truth(batch: int, start_pos: int):
    """R9, R11, R14, R17, R18: every option that is served, in one run; K rows come back after the rotation."""
    rng = np.random.default_rng(batch + 10 * start_pos)
    layers = make_layers(batch)
    hidden = rng.normal(size=(batch, 40)).astype(np.float32)
    prefixes = make_prefixes(rng, layers, start_pos)
    got, rows, _ = go(fake_device(), layers, hidden, prefixes, start_pos)
    check_against_the_truth(layers, hidden, prefixes, got, rows)


@pytest.mark.parametrize("schedule", ["lazy", "reversed", "random"])
def test_no_order_of_the_streams_changes_a_bit(schedule: str):
    """Events alone order the streams: memory of a slot is not written before its last reader is done."""
    rng = np.random.default_rng(5)
    layers = make_layers(5)
    hidden = rng.normal(size=(6, 40)).astype(np.float32)
    prefixes = make_prefixes(rng, layers, 5)
    want, want_rows, _ = go(fake_device(schedule="issue"), layers, hidden, prefixes, 5)
    for seed in range(8 if schedule == "random" else 1):
        got, rows, _ = go(fake_device(schedule=schedule, seed=seed), layers, hidden, prefixes, 5)
        np.testing.assert_array_equal(got, want)
        for one, other in zip(rows, want_rows, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("event", ["rows_ready", "rows_down", "prefix_up", "attended"])
def test_every_event_is_needed(event: str):
    """Without the waits for any one kind of event some schedule gives another answer: the test above can fail."""
    rng = np.random.default_rng(6)
    layers = make_layers(6)
    hidden = rng.normal(size=(6, 40)).astype(np.float32)
    prefixes = make_prefixes(rng, layers, 5)
    want, want_rows, _ = go(fake_device(schedule="issue"), layers, hidden, prefixes, 5)
    changed = False
    for schedule, seed in [("lazy", 0), ("reversed", 0), *(("random", seed) for seed in range(12))]:
        device = fake_device(schedule=schedule, seed=seed)
        ignored = getattr(device.workspace, event)
        wait = device.runtime.wait
        device.runtime.wait = lambda which, stream, wait=wait, ignored=ignored: (
            None if which in ignored else wait(which, stream)
        )
        got, rows, _ = go(device, layers, hidden, prefixes, 5)
        same = np.array_equal(got, want) and all(
            np.array_equal(a, b)
            for one, other in zip(rows, want_rows, strict=True)
            for a, b in zip(one, other, strict=True)
        )
        changed = changed or not same
    assert changed


def test_a_stack_equals_single_layers_bitwise():
    """Residency changes nothing: layer after layer through the host gives the same bits."""
    rng = np.random.default_rng(7)
    layers = make_layers(7)
    hidden = rng.normal(size=(5, 40)).astype(np.float32)
    prefixes = make_prefixes(rng, layers, 3)
    want, want_rows, _ = go(fake_device(), layers, hidden, prefixes, 3)
    x = hidden
    for layer, prefix, rows in zip(layers, prefixes, want_rows, strict=True):
        x, (got_rows,), _ = go(fake_device(), [layer], x, [prefix], 3)
        np.testing.assert_array_equal(got_rows, rows)
    np.testing.assert_array_equal(x, want)


def test_bytes_over_the_bus_are_those_of_the_rule():
    """R8: hidden up and down once, each layer's rows down, prefix rows up, weights as uploaded; one wait."""
    rng = np.random.default_rng(8)
    layers = make_layers(8)
    hidden = rng.normal(size=(6, 40)).astype(np.float32)
    device = fake_device()
    prefixes = make_prefixes(rng, layers, 5)
    _, rows, traffic = go(device, layers, hidden, prefixes, 5)
    row_bytes = sum(part.nbytes for pair in rows for part in pair)
    assert (traffic.hidden_up, traffic.hidden_down) == (hidden.nbytes, hidden.nbytes)
    assert traffic.kv_down == row_bytes
    assert traffic.prefix_up == sum(part.nbytes for pair in prefixes for part in pair)
    assert (traffic.synchronizations, traffic.runs) == (1, 1)
    # The fake counted every byte and every wait by itself.
    assert device.runtime.up == traffic.weights_up + traffic.hidden_up + traffic.prefix_up
    assert device.runtime.down == traffic.hidden_down + traffic.kv_down
    assert device.runtime.waits == 1


def test_nothing_is_allocated_inside_the_layer_loop():
    """All memory is there before the first kernel of the run is launched."""
    rng = np.random.default_rng(9)
    layers = make_layers(9)
    device = fake_device()
    go(device, layers, rng.normal(size=(6, 40)).astype(np.float32), make_prefixes(rng, layers, 5), 5)
    calls = device.runtime.calls
    launched = calls[calls.index("rope_table") :]
    assert not {"device_bytes", "pinned_bytes", "stream", "event", "release"} & set(launched)
    assert launched.count("synchronize") == 1
    assert launched[-1] == "synchronize"


def test_layers_of_equal_frequencies_share_a_table():
    """R17: the table of cosines and sines is made once a run for each distinct rope, whatever its layout."""
    rng = np.random.default_rng(10)
    layers = [random_layer(rng, layout=layout) for layout in (RopeLayout.NORM, RopeLayout.NEOX, None, RopeLayout.NORM)]
    layers.append(random_layer(rng, theta=77.0))
    device = fake_device()
    hidden = rng.normal(size=(4, 40)).astype(np.float32)
    got, rows, _ = go(device, layers, hidden, make_prefixes(rng, layers, 0), 0)
    assert device.runtime.calls.count("rope_table") == 2
    check_against_the_truth(layers, hidden, make_prefixes(rng, layers, 0), got, rows)


def test_float16_prefix_rows_are_widened():
    """R11: a float16 cache gives the same answer as its rows in float32."""
    rng = np.random.default_rng(11)
    layers = make_layers(11)
    hidden = rng.normal(size=(4, 40)).astype(np.float32)
    halves = make_prefixes(rng, layers, 6, np.float16)
    wide = [tuple(part.astype(np.float32) for part in pair) for pair in halves]
    np.testing.assert_array_equal(
        go(fake_device(), layers, hidden, halves, 6)[0], go(fake_device(), layers, hidden, wide, 6)[0]
    )


def test_the_hidden_batch_is_not_written_to_and_answers_are_the_callers():
    """A second run leaves what the first one answered alone, although page-locked memory is used again."""
    rng = np.random.default_rng(12)
    layers = make_layers(12)
    device = fake_device()
    hidden = rng.normal(size=(4, 40)).astype(np.float32)
    before = hidden.copy()
    first, first_rows, _ = go(device, layers, hidden, make_prefixes(rng, layers, 0), 0)
    kept = first.copy(), [(k.copy(), v.copy()) for k, v in first_rows]
    go(device, layers, hidden + 1, make_prefixes(rng, layers, 0), 0)
    np.testing.assert_array_equal(hidden, before)
    np.testing.assert_array_equal(first, kept[0])
    for one, other in zip(first_rows, kept[1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_interrupt_waits_for_the_device_before_it_goes_on():
    """Memory that the device still writes to must not be handed out again."""
    rng = np.random.default_rng(13)
    layers = make_layers(13)
    device = fake_device()
    device.runtime.error = KeyboardInterrupt()
    device.runtime.fail_at = 120
    with pytest.raises(KeyboardInterrupt):
        go(device, layers, rng.normal(size=(4, 40)).astype(np.float32), make_prefixes(rng, layers, 0), 0)
    assert not any(stream.queue for stream in device.runtime.streams)
