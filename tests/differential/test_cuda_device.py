"""The resident stack on a real GPU: residency, bytes and waits, failures, threads, processes.

What counts calls of numba's driver, or reaches into launchers, is about the tier `simt`; the rest is for every tier.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from frink_numba.backend import Decline, Serve
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.device import CudaDevice, make_body, make_runtime, open_device, visible_devices
from frink_numba.layer import RopeLayout
from tests import reference
from tests.cuda.quantized_layers import quantized_layer
from tests.differential.gpu import TIERS, bound_of, device_of, run_twice, step_over, take
from tests.random_layers import LayerOptions

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
WIDE = {"hidden": 256, "ffn": 512}
OPTIONS = (
    LayerOptions(heads=4, kv_heads=2, head_dim=64, bias=True, **WIDE),
    LayerOptions(heads=4, kv_heads=1, head_dim=96, layout=RopeLayout.NEOX, qk_norm="head", window=9, **WIDE),
    LayerOptions(heads=2, kv_heads=2, head_dim=128, partial=True, factors=True, magnitude=1.2, softcap=5.0, **WIDE),
    LayerOptions(heads=8, kv_heads=4, head_dim=32, layout=None, post_norms=True, qk_norm="whole", **WIDE),
    LayerOptions(heads=4, kv_heads=2, head_dim=64, theta=500000.0, **WIDE),
)
KINDS = ("F32", "F16", "F32", "F32", "F16", "F32", "F32")


def make_model(seed: int = 0, options=OPTIONS):
    rng = np.random.default_rng(seed)
    return [quantized_layer(rng, chosen, KINDS) for chosen in options]


def make_step(layers, batch: int = 33, start_pos: int = 21, seed: int = 0):
    rng = np.random.default_rng(seed)
    prefixes = [
        tuple(rng.normal(size=(2, start_pos, x.attention.n_kv_heads, x.attention.head_dim)).astype(np.float32))
        for x in layers
    ]
    return step_over(layers, rng.normal(size=(batch, layers[0].hidden_dim)).astype(np.float32), prefixes)


def own_device(tier: str = "simt") -> CudaDevice:
    """The first device with a state of its own, so that a lowered budget stays in its test."""
    info = device_of(tier).info
    runtime = make_runtime(tier, info.number)
    return CudaDevice(info, runtime, make_body(tier, info, runtime))


def test_the_device_is_described():
    """For plan and doctor."""
    info = visible_devices()[0]
    device = open_device(0)
    assert device.info == info
    assert str(device) == f"{info.name}, {device.tier} tier"
    free, total = own_device_memory()
    assert 0 < free <= total
    assert abs(total - info.memory) < 0.05 * total


def own_device_memory() -> tuple[int, int]:
    """(free, all) bytes, once numba has given back what it holds for later."""
    device = device_of("simt")
    with device.working():
        device.runtime.release()
        return device.runtime.memory()


@pytest.mark.parametrize(("batch", "start_pos"), [(4, 0), (33, 21), (130, 1), (257, 500)])
def test_a_stack_equals_the_truth_and_single_layers_bitwise(batch: int, start_pos: int):
    """R8 to R11: five unlike layers, resident; the same bits as layer after layer through the host."""
    layers = make_model()
    step = make_step(layers, batch, start_pos)
    backend = CudaBackend(layers, device_of("simt"))
    got = run_twice(backend, step)
    x = step.hidden
    truth = step.hidden.astype(np.float64)
    for number, layer in enumerate(layers):
        single = step_over([layer], x, [step.caches[number].prefix()])
        one = CudaBackend([layer], device_of("simt"))
        x, k, v = take(one.run(0, 1, single))
        one.close()
        np.testing.assert_array_equal(k, got[1 + 2 * number])
        np.testing.assert_array_equal(v, got[2 + 2 * number])
        truth, want_k, want_v = reference.layer(layer, truth, *step.caches[number].prefix())
        assert reference.relative_error(k, want_k) < 1e-5
        assert reference.relative_error(v, want_v) < 1e-5
    np.testing.assert_array_equal(x, got[0])
    assert reference.relative_error(got[0], truth) < 1e-5
    backend.close()


def test_bytes_waits_and_allocations_of_a_run_as_the_driver_sees_them(monkeypatch: pytest.MonkeyPatch):
    """R8, counted below us: hidden up and down, rows down, prefix up; one wait; nothing is allocated."""
    from numba.cuda.cudadrv import driver

    layers = make_model()
    step = make_step(layers)
    backend = CudaBackend(layers, device_of("simt"))
    take(backend.run(0, len(layers), step))  # uploads, compiles
    before, counts = backend.stats, Counter()

    def counted(name: str, size_at: int | None):
        call = getattr(driver.driver, name)

        def wrapper(*arguments):
            counts[name] += 1 if size_at is None else int(arguments[size_at])
            return call(*arguments)

        monkeypatch.setattr(driver.driver, name, wrapper)

    for name in ("cuMemcpyHtoD", "cuMemcpyHtoDAsync", "cuMemcpyDtoH", "cuMemcpyDtoHAsync"):
        counted(name, 2)
    for name in ("cuMemAlloc", "cuMemHostAlloc", "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"):
        counted(name, None)
    first = backend.run(0, len(layers), step)
    rows = sum(part.nbytes for pair in first.kv_rows for part in pair)
    prefix = sum(part.nbytes for cache in step.caches for part in cache.prefix())
    assert counts == {
        "cuMemcpyHtoDAsync": step.hidden.nbytes + prefix,
        "cuMemcpyDtoHAsync": step.hidden.nbytes + rows,
        "cuStreamSynchronize": 1,
    }
    after = backend.stats
    assert after.weights_up == before.weights_up
    assert after.hidden_up - before.hidden_up == after.hidden_down - before.hidden_down == step.hidden.nbytes
    assert after.kv_down - before.kv_down == rows
    assert after.prefix_up - before.prefix_up == prefix
    assert after.synchronizations - before.synchronizations == 1
    backend.close()


def test_closing_gives_device_memory_back():
    """The weights of a layer of 64 MiB are gone from the device's own account."""
    layers = make_model(1, [LayerOptions(heads=8, kv_heads=8, head_dim=128, hidden=1024, ffn=4096)])
    free, _ = own_device_memory()
    backend = CudaBackend(layers, own_device())
    take(backend.run(0, 1, make_step(layers)))
    assert free - own_device_memory()[0] > 32 << 20
    backend.close()
    gc.collect()
    assert abs(free - own_device_memory()[0]) < 8 << 20


@pytest.mark.parametrize("tier", TIERS)
def test_memory_that_really_runs_out(tier: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """R21: somebody else takes the memory after the budget was made. None once, a reason in the next plan, no harm."""
    monkeypatch.setattr("frink_numba.log._said", set())  # each tier may say it
    layers = make_model()
    device = own_device(tier)
    backend = CudaBackend(layers, device)
    step = make_step(layers, 4000, 0)
    assert isinstance(backend.can_serve(0, step), Serve)
    with device.working():
        free, _ = device.runtime.memory()
        hog = device.runtime.device_bytes(free - (40 << 20))
    hidden = step.hidden.copy()
    assert backend.run(0, len(layers), step) is None
    assert "out of memory" in caplog.text
    np.testing.assert_array_equal(step.hidden, hidden)
    assert isinstance(backend.can_serve(0, step), Decline)
    with device.working():
        del hog
        device.runtime.release()
    fresh = CudaBackend(layers, own_device(tier))
    small = make_step(layers)
    x = small.hidden.astype(np.float64)
    for layer, cache in zip(layers, small.caches, strict=True):
        x, _, _ = reference.layer(layer, x, *cache.prefix())
    assert reference.relative_error(run_twice(fresh, small)[0], x) < len(layers) * bound_of(tier)
    fresh.close()
    backend.close()


def test_an_upload_may_be_overwritten_at_once():
    """Field report: a copy from pageable memory that had not ended. 1 MiB, overwritten right after, 200 times."""
    device = open_device(0)
    with device.working():
        runtime, stream = device.runtime, device.runtime.stream()
        block = runtime.device_bytes(1 << 20)
        answer = runtime.pinned_bytes(1 << 20)
        source = np.empty(1 << 20, np.uint8)
        for number in range(200):
            source.fill(number % 251)
            runtime.upload(block, source, stream)
            source.fill(255)
            runtime.download(answer, block, stream)
            runtime.synchronize(stream)
            assert (answer == number % 251).all(), number


@pytest.mark.parametrize("tier", TIERS)
def test_threads_share_the_device(tier: str):
    """Four decoders, each with steps of its own: every answer is the one it gives alone, bit for bit."""
    layers = make_model()
    device = device_of(tier)
    steps = [make_step(layers, 16 + 7 * number, 5 * number, number) for number in range(4)]
    alone = CudaBackend(layers, device)
    want = [take(alone.run(0, len(layers), step)) for step in steps]
    wrong: list[int] = []

    def decode(number: int) -> None:
        backend = CudaBackend(layers, device)
        for _ in range(10):
            got = take(backend.run(0, len(layers), steps[number]))
            if not all(np.array_equal(a, b) for a, b in zip(got, want[number], strict=True)):
                wrong.append(number)
        backend.close()

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone.close()
    assert not wrong


LOST = """
import numpy as np
from numba import cuda
from dataclasses import replace
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.device import open_device
from frink_numba.host.backend import HostBackend
from frink_numba.dispatch import Dispatcher
from frink_numba.registry import register_backend
from tests.differential.test_cuda_device import make_model, make_step

@cuda.jit
def wild(x, far):
    x[far + cuda.threadIdx.x] = 1.0

layers = make_model()
step = make_step(layers)
device = open_device(0)
kernels = device.body.launchers
def residual_add(x, y, stream):
    wild[1, 32, stream](x.reshape(x.size), 1 << 40)
    kernels.residual_add(x, y, stream)
device.body.launchers = replace(kernels, residual_add=residual_add)
register_backend("broken", lambda layers: CudaBackend(layers, device))
walk = Dispatcher(layers, host=HostBackend, backends="broken,host")
result = walk.run(step)
assert [served.backend for served in result.served] == ["host"], result.served
print(device.problem)
print(walk.backends[0].can_serve(0, step).reason == device.problem)
print([served.backend for served in walk.run(step).served])
walk.close()
print("closed", flush=True)
"""


def test_a_lost_device_does_not_take_the_process_down():
    """R21: a kernel that writes far away poisons the context. The cause is said, the host serves, the exit is clean."""
    done = _python(LOST, FRINK_CUDA_TIER="simt")
    assert done.returncode == 0, done.stderr[-3000:]
    problem, same, served, closed = done.stdout.splitlines()
    assert problem.startswith("device lost: ")
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in problem
    assert (same, served, closed) == ("True", "['host']", "closed")
    assert "Traceback" not in done.stderr, done.stderr[-3000:]


FORKED = """
import os, sys
from frink_numba.cuda.backend import CudaBackend, create
from frink_numba.cuda.device import open_device
from frink_numba.errors import BackendUnavailable
from tests.differential.test_cuda_device import make_model, make_step

layers = make_model()
step = make_step(layers)
backend = create(layers)
assert backend.run(0, len(layers), step) is not None
child = os.fork()
if child == 0:
    print(backend.can_serve(0, step).reason)
    print(backend.run(0, len(layers), step))
    try:
        create(layers)
    except BackendUnavailable as error:
        print(error)
    backend.close()
    sys.stdout.flush()
    os._exit(0)
_, status = os.waitpid(child, 0)
print(status, backend.run(0, len(layers), step) is not None, flush=True)
"""


def test_a_forked_process_is_told_so():
    """Field report: fork after CUDA was used. A named error at once; the parent goes on."""
    done = _python(FORKED)
    assert done.returncode == 0, done.stderr[-3000:]
    reason, run, created, parent = done.stdout.splitlines()
    assert reason.startswith("this process was forked from process ")
    assert run == "None"
    assert created == reason
    assert parent == "0 True"


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
