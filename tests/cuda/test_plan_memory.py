"""The plan's bytes are those that the device then holds: to the byte, whatever fits and whatever does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from frink_numba import registry
from frink_numba.backend import Edges, Step
from frink_numba.cuda.backend import CudaBackend
from frink_numba.dispatch import Dispatcher
from frink_numba.host.backend import HostBackend
from frink_numba.host.kv_cache import KVCache
from frink_numba.plan import CacheAt, Memory
from tests.cuda.fake_gpu import fake_device
from tests.cuda.fake_tensor import tensor_device
from tests.cuda.steps import small_model
from tests.cuda.tensor_stacks import hidden_rows, random_rows, unlike_layers
from tests.kernels.packed_weights import random_matrix

LAYERS = unlike_layers()
WIDTH = LAYERS[0].hidden_dim


def edges() -> Edges:
    rng = np.random.default_rng(5)
    embedding, output = (random_matrix("Q8_0", 64, WIDTH, rng) for _ in "eo")
    return Edges(embedding, 1.0, np.ones(WIDTH, np.float32), 1e-5, output)


class Engine:
    """A dispatcher over a fake device and the host, and the caches of its steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device, layers=LAYERS, dtype=np.float32) -> None:
        self.device, self.layers, self.edges = device, layers, edges()
        monkeypatch.setattr(registry, "_registered", {})
        registry.register_backend("gpu", lambda layers: CudaBackend(layers, device, "gpu"))
        self.walk = Dispatcher(layers, host=HostBackend, backends="gpu,host")
        self.cache = KVCache(layers, 4096, dtype=dtype, allocate=self.walk.host_bytes)

    def step(self, batch: int) -> Step:
        ids = np.arange(batch) % 64
        return Step(
            self.layers, self.cache, self.cache.positions, batch, tokens=ids, edges=self.edges,
            lookup=lambda: hidden_rows(batch), logits=1,
        )  # fmt: skip

    def planned(self, batch: int) -> Memory:
        plan = self.walk.plan(replace(self.step(batch), tokens=None, lookup=None))
        (memory,) = plan.memory
        return memory

    def run(self, batch: int) -> None:
        self.cache.push(self.walk.run(self.step(batch)).kv_rows)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):
    return lambda device, **more: Engine(monkeypatch, device, **more)


@pytest.mark.parametrize(("tier", "batch"), [("wgmma", 1), ("mma", 5), ("mma", 40), ("wgmma", 40), ("wgmma", 300)])
def test_the_device_holds_what_the_plan_said(tier: str, batch: int, on) -> None:
    """A first step of any size: everything that is allocated is in the plan, and nothing else."""
    engine = on(tensor_device(tier))
    memory = engine.planned(batch)
    assert memory.edges > 0
    assert not engine.device.runtime.held, "a plan allocates nothing"
    engine.run(batch)
    assert engine.device.runtime.held == memory.total == engine.device.held_bytes
    assert memory.budget == engine.device.memory.bytes()
    assert memory.page_locked == sum(
        2 * batch * layer.attention.n_kv_heads * layer.attention.head_dim * 4 for layer in LAYERS
    )


@pytest.mark.parametrize("logits", [1, 40])
def test_a_step_in_blocks_holds_what_the_plan_said(logits: int, on) -> None:
    """Blocks of 16 rows, the last of 8: the scratch is that of the largest, with the logits that it makes."""
    engine = on(tensor_device(block_rows=16))
    step = replace(engine.step(40), logits=logits)
    (memory,) = engine.walk.plan(replace(step, tokens=None, lookup=None)).memory
    engine.cache.push(engine.walk.run(step).kv_rows)
    assert engine.device.runtime.held == memory.total == engine.device.held_bytes
    size = engine.device.body.scratch(LAYERS)
    assert memory.scratch >= size.nbytes(40, 0, engine.edges, logits)


def test_more_logits_than_before_find_room(on) -> None:
    """A step as long as the last one, but with more rows of logits, is none like it: the scratch may have to grow."""
    engine = on(tensor_device())
    for logits in (1, 300, 1):
        engine.cache.truncate(0)
        step = replace(engine.step(300), logits=logits)
        (memory,) = engine.walk.plan(replace(step, tokens=None, lookup=None)).memory
        run = engine.walk.run(step)
        assert run.logits.shape == (logits, 64)
        engine.cache.push(run.kv_rows)
        assert engine.device.runtime.held == memory.total


def test_no_step_makes_more_scratch_than_a_whole_chunk(on) -> None:
    """Scratch is made a little larger than a step needs, never larger than the largest chunk does."""
    engine = on(tensor_device())
    body, chunk = engine.device.body, engine.device.body.chunk_size
    most = body.scratch(LAYERS).nbytes(chunk, 0)
    assert engine.planned(chunk).scratch == most
    assert engine.planned(chunk - 100).scratch == most
    small = body.scratch(LAYERS).nbytes(300, 0)
    assert small <= engine.planned(300).scratch <= small + small // 4


def test_later_steps_and_their_plans(on) -> None:
    """Step after step, chunk and single tokens: what is there already is counted once."""
    engine = on(tensor_device())
    for batch in (40, 1, 260, 12):
        memory = engine.planned(batch)
        engine.run(batch)
        assert engine.device.held_bytes == memory.total, batch


@pytest.mark.parametrize("batch", [1, 40, 300])
def test_edges_that_do_not_fit_are_not_in_the_plan(batch: int, on) -> None:
    """A byte less than a first step with them needs, then just that, then more: spare scratch takes what they leave."""
    engine = on(tensor_device())
    whole = engine.planned(batch)
    exact = engine.device.body.scratch(LAYERS).nbytes(batch, 0, engine.edges, 1)
    spare = whole.scratch - exact
    assert spare > 0
    engine.walk.close()
    for left in (-1, 0, spare // 2, spare):
        engine = on(tensor_device())
        engine.device.memory.lower(whole.total - spare + left)
        memory = engine.planned(batch)
        assert (memory.edges > 0) is (left >= 0)
        assert memory.scratch == exact + max(0, left)
        assert memory.budget == whole.total - spare + left
        run = engine.walk.run(engine.step(batch))
        assert (run.logits is not None) is (left >= 0), "the host makes the logits of a step that could have had them"
        assert engine.device.runtime.held == memory.total <= memory.budget


def test_layers_that_do_not_fit_run_on_the_host(on) -> None:
    """The budget holds to the byte, for some of the layers as for all."""
    engine = on(tensor_device())
    whole = engine.planned(40)
    engine.walk.close()
    engine = on(tensor_device())
    scratch = engine.device.body.scratch(LAYERS).nbytes(40, 0)
    engine.device.memory.lower(whole.weights + whole.kv_rows + scratch - 1)
    memory = engine.planned(40)
    assert 0 < memory.weights < whole.weights
    engine.run(40)
    assert engine.device.runtime.held == memory.total <= memory.budget


@pytest.mark.parametrize("batch", [30, 40, 60])
def test_rows_of_layers_that_are_left_to_the_host_make_room(batch: int, on, caplog: pytest.LogCaptureFixture) -> None:
    """R21: all layers fit beside a short step, not beside a longer one; those that are promised to it then run.

    The K/V rows of all layers lie in one block, of which the device cannot give back a part.
    """
    engine = on(tensor_device())
    most = engine.planned(5).total + (16 << 10)
    engine.walk.close()
    engine = on(tensor_device())
    engine.device.memory.lower(most)
    engine.run(5)
    step = replace(engine.step(batch), hidden=hidden_rows(batch), tokens=None, edges=None, logits=0)
    begin = engine.walk.plan(step).rows[0]
    assert begin.backend == "gpu"
    assert begin.last < len(LAYERS) - 1
    run = engine.walk.run(step)
    assert not [record for record in caplog.records if "failed" in record.getMessage()]
    assert engine.device.runtime.held <= most == engine.device.memory.bytes()
    want = HostBackend(LAYERS).run(0, len(LAYERS), step).hidden
    assert np.linalg.norm(run.hidden - want) < 2e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("start_pos", [0, 7, 300])
def test_a_plan_for_a_length_is_that_of_a_cache_at_it(start_pos: int, on) -> None:
    """`CacheAt` stands for a cache that was filled so far, on a device that has not seen it."""
    engine = on(tensor_device())
    stand_ins = [CacheAt(x.attention.n_kv_heads, *[x.attention.head_dim] * 2, start_pos) for x in LAYERS]
    ahead = engine.walk.plan(Step(LAYERS, stand_ins, start_pos, 40, edges=engine.edges, logits=1))
    if start_pos:
        engine.cache.push(random_rows(LAYERS, start_pos))
    assert ahead.memory == (engine.planned(40),)
    assert ahead.rows == engine.walk.plan(engine.step(40)).rows
    engine.run(40)
    assert engine.device.runtime.held == ahead.memory[0].total


def test_another_model_on_the_device_is_counted_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    device = tensor_device()
    first = Engine(monkeypatch, device)
    first.run(40)
    held = device.held_bytes
    second = Engine(monkeypatch, device, layers=unlike_layers())
    memory = second.planned(40)
    assert memory.others == held - device.arena_bytes
    second.run(40)
    assert device.held_bytes == memory.total


def test_the_simt_tier_says_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix rows lie in its scratch: there are no K/V rows beside it, and no edges."""
    device, layers = fake_device(), small_model(0, 3)
    monkeypatch.setattr(registry, "_registered", {})
    registry.register_backend("gpu", lambda layers: CudaBackend(layers, device, "gpu"))
    walk = Dispatcher(layers, host=HostBackend, backends="gpu,host")
    cache = KVCache(layers, 64)
    step = Step(layers, cache, 0, 8)
    (memory,) = walk.plan(step).memory
    assert (memory.edges, memory.kv_rows, memory.others) == (0, 0, 0)
    width = layers[0].hidden_dim
    walk.run(replace(step, hidden=np.random.default_rng(0).standard_normal((8, width)).astype(np.float32)))
    assert device.runtime.held == memory.total
