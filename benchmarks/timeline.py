"""Where the time of a prefill step goes: each kind of launch alone, the copies, and the whole step.

    python -m benchmarks.timeline --shapes 3b --tokens 512

A launch's time is the median over replays of the step's own launches, one at a time between two events, which adds
about 2 us to each; `all launches` is the same launches in a row without any copy. The difference between that and the
step is copies that are not hidden, and the host.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from benchmarks.bench_prefill import SHAPES, random_layers
from frink_numba.backend import Step
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.device import open_device
from frink_numba.host.kv_cache import KVCache


def gpu_microseconds(stream: int, work: Callable[[], None], runs: int) -> float:
    """Median time of `work` on the device, in microseconds."""
    from cuda.bindings import driver

    events = [driver.cuEventCreate(0)[1] for _ in range(2)]
    taken = []
    for _ in range(runs):
        driver.cuEventRecord(events[0], stream)
        work()
        driver.cuEventRecord(events[1], stream)
        driver.cuEventSynchronize(events[1])
        taken.append(1000 * driver.cuEventElapsedTime(*events)[1])
    return float(np.median(taken))


def report(name: str, tokens: int, runs: int) -> None:
    shape = SHAPES[name]
    layers = random_layers(shape)
    device = open_device(0)
    backend = CudaBackend(layers, device)
    cache = KVCache(layers, tokens, allocate=backend.host_bytes)
    cache.reserve(tokens)
    hidden = np.random.default_rng(1).standard_normal((tokens, shape.hidden), dtype=np.float32)
    start = time.perf_counter()
    step = Step(layers, cache, 0, tokens, hidden)
    assert backend.run(0, len(layers), step) is not None
    print(f"{shape.name} pp{tokens}: first step {time.perf_counter() - start:.1f} s")
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        run = backend.run(0, len(layers), step)
        assert run is not None
        taken.append(time.perf_counter() - start)
    whole = 1e6 * float(np.median(taken))
    print(f"step {whole:.0f} us, {tokens / whole * 1e6:.0f} tok/s")
    with device.working():
        program = next(reversed(device.body._programs.values()))  # type: ignore[attr-defined]
        stream = device.runtime.handle(device.workspace.compute)
        launches = [launch for segment in program.segments for launch in segment.launches]

        def everything() -> None:
            for launch in launches:
                launch(stream)

        together = gpu_microseconds(stream, everything, runs)
        start = time.perf_counter()
        everything()
        host = 1e6 * (time.perf_counter() - start)
        device.runtime.synchronize(device.workspace.compute)

        def replayed() -> None:
            for segment in program.segments:
                segment.replay()

        graphs = gpu_microseconds(stream, replayed, runs)
        print(f"{len(program.segments)} graphs of {len(launches)} launches: {graphs:.0f} us")
        print(f"all {len(launches)} launches in a row {together:.0f} us; the host needs {host:.0f} us to make them")
        sums: dict[str, list[float]] = defaultdict(list)
        for place, launch in enumerate(launches):
            if len(layers) > 4 and place > 4 * len(launches) // len(layers):
                break  # four layers tell
            kernel = launch._kernel
            label = re.sub(r"^_ZN?\d*|B2v1.*$", "", kernel.name)[-40:]
            sums[f"{label} on {launch._config.gridDimX} blocks"].append(
                gpu_microseconds(stream, lambda launch=launch: launch(stream), 9)
            )
        for kernel_name, times in sums.items():
            print(f"  {np.mean(times):8.1f} us x {len(times):3d}  {kernel_name}")
    backend.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="3b")
    parser.add_argument("--tokens", default="512")
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args()
    for name in arguments.shapes.split(","):
        for tokens in arguments.tokens.split(","):
            report(name, int(tokens), arguments.runs)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
