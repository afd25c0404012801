"""Where the time of a prefill step goes: its kernels alone, the gaps between them, the copies, and the host.

    python -m benchmarks.timeline --receipt benchmarks/receipts/timeline-h200.json
    python -m benchmarks.timeline --shapes 3b --tokens 512

A step is that of `bench_prefill.py`, over random weights of a named shape: from token ids to the last logits, K/V rows
pushed into the host's cache. Its parts, all in microseconds:

    kernels alone     each operation (norm, qkv, ...) by itself: its launches of all layers, one after the other in a
                      graph without anything else, so that weights come from memory as they do in a step
    all launches      the step's own graphs, without copies and without waiting for the host
    without rows      the step while its K/V rows stay where they are
    step              by the host's clock, median; the others are the device's, between two events
    host              the part of the step in which the calling thread does not wait for the device: until the last
                      launch is queued, and from the answer on

Gaps are `all launches` less `kernels alone`; what begins and ends a step is `without rows` less `all launches`; copies
that nothing hides are `step` less `without rows`. A part may come out below zero, within what repeats differ by.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_prefill import SHAPES, layers_step, opened, seconds, share_packs
from benchmarks.command import exit_with
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.device import CudaDevice
from frink_numba.cuda.tensor import run
from frink_numba.driver import query_driver
from frink_numba.receipt import Row, receipt, write_receipt

_LAUNCHES = 24  # of an operation in a graph, at least: so many hide what a graph itself costs

Timer = Callable[[CudaDevice, Callable[[], None]], float]
"""Microseconds that the device takes for what a function queues in the device's stream."""


@dataclass
class Timeline:
    """Samples in microseconds; `operations` by name, of all launches of an operation together, with their number."""

    step: list[float]
    host: list[float]
    without_rows: list[float]
    launches: list[float]
    megabytes_down: float  # K/V rows and logits of a step
    operations: dict[str, tuple[int, list[float]]] = field(default_factory=dict)

    @property
    def alone(self) -> float:
        """The sum of the kernels' times alone."""
        return sum(float(np.median(samples)) for _, samples in self.operations.values())

    def rows(self, case: str, backend: str, tier: str | None) -> list[Row]:
        """The receipt's rows: parts in microseconds, then the two ratios that matter."""
        alone = self.alone
        parts = {"step": self.step, "all launches": self.launches, "without rows": self.without_rows, "host": self.host}
        out = [Row.from_samples(f"{case}: {part}", "us", taken, backend, tier=tier) for part, taken in parts.items()]
        out.append(Row(f"{case}: kernels alone", "us", alone, alone, alone, len(self.step), backend, tier=tier))
        down = self.megabytes_down
        out.append(Row(f"{case}: copied down", "MB", down, down, down, 1, backend, tier=tier))
        for name, (count, samples) in self.operations.items():
            out.append(Row.from_samples(f"{case}: {name} x {count}", "us", samples, backend, tier=tier))
        ratios = [taken / alone for taken in self.step]
        out.append(Row.from_samples(f"{case}: step / kernels alone", "ratio", ratios, backend, tier=tier))
        shares = [100 * host / step for host, step in zip(self.host, self.step, strict=True)]
        out.append(Row.from_samples(f"{case}: host share", "%", shares, backend, tier=tier))
        return out


def event_timer(device: CudaDevice, work: Callable[[], None]) -> float:
    """Between two events, the first behind a round of the same work, so that the device never waits for the host."""
    from cuda.bindings import driver

    stream = device.runtime.handle(device.workspace.compute)
    events = [driver.cuEventCreate(0)[1] for _ in range(2)]
    work()
    driver.cuEventRecord(events[0], stream)
    work()
    driver.cuEventRecord(events[1], stream)
    driver.cuEventSynchronize(events[1])
    taken = 1000 * driver.cuEventElapsedTime(*events)[1]
    for event in events:
        driver.cuEventDestroy(event)
    return float(taken)


def take(step: Callable[[], None], backend: CudaBackend, timer: Timer, runs: int) -> Timeline:
    """The timeline of `step`, one run of `backend`, with the launches of all programs that its blocks ran."""
    device = backend.device
    step()
    before = backend.stats
    step()
    after = backend.stats
    down = after.kv_down + after.logits_down - before.kv_down - before.logits_down
    waits: list[float] = []
    with _waits_noted(device, waits):
        walls = [1e6 * s for s in seconds(step, runs)]
    waited = [1e6 * s for s in waits[-runs:]]
    with _rows_left(device):
        without = [1e6 * s for s in seconds(step, runs)]
    with _blocks_noted(device) as blocks:
        step()  # all rows down again
    with device.working():
        parts = [part for program, _ in blocks for part in (*program.segments, *program.heads)]

        def everything() -> None:
            for program, send in blocks:
                send()
                for part in (*program.segments, *program.heads):
                    part.replay()

        launches = [timer(device, everything) for _ in range(runs)]
        host = [wall - wait for wall, wait in zip(walls, waited, strict=True)]
        made = Timeline(walls, host, without, launches, down / 1e6)
        named: dict[str, list[Any]] = defaultdict(list)
        for part in parts:
            for op in part.launches:
                named[op.name].append(op)
        for name, ops in named.items():
            times = -(-_LAUNCHES // len(ops))
            graph = device.runtime.graph(device.workspace.compute, ops * times)
            made.operations[name] = len(ops), [timer(device, graph) / times for _ in range(runs)]
        device.runtime.synchronize(device.workspace.compute)
    return made


@contextmanager
def _blocks_noted(device: CudaDevice) -> Iterator[list[tuple[Any, Callable[[], None]]]]:
    """The programs of the blocks that run, each with what must go up before it runs again."""
    noted: list[tuple[Any, Callable[[], None]]] = []
    real = run.fill_image

    def fill_image(program: Any, start_pos: int, tokens: Any, work: Any, number: int = 0) -> np.ndarray:
        image = real(program, start_pos, tokens, work, number)
        sent = work.pinned.lend(image.nbytes)
        np.copyto(sent, image)
        noted.append((program, lambda: device.runtime.send(program.step_address, sent, work.compute)))
        return image

    run.fill_image = fill_image
    try:
        yield noted
    finally:
        run.fill_image = real


@contextmanager
def _waits_noted(device: CudaDevice, waits: list[float]) -> Iterator[None]:
    """Note how long each run waits for the device at its end."""
    runtime: Any = device.runtime
    real = runtime.synchronize

    def synchronize(stream: Any) -> None:
        start = time.perf_counter()
        real(stream)
        waits.append(time.perf_counter() - start)

    runtime.synchronize = synchronize
    try:
        yield
    finally:
        runtime.synchronize = real


@contextmanager
def _rows_left(device: CudaDevice) -> Iterator[None]:
    """Leave new K/V rows on the device: in graphs of whole runs too, which are made anew here, and again behind it."""
    runtime: Any = device.runtime
    downloads = device.workspace.downloads
    fetch, strided = runtime.fetch, runtime.fetch_strided
    with device.working():
        device.body.dropped()
    runtime.fetch = lambda target, address, stream: None if stream is downloads else fetch(target, address, stream)
    runtime.fetch_strided = lambda *arguments: None
    try:
        yield
    finally:
        runtime.fetch, runtime.fetch_strided = fetch, strided
        with device.working():
            device.body.dropped()


def report(name: str, tokens: int, runs: int) -> list[Row]:
    """Measure one case on the first device and print it."""
    shape = SHAPES[name]
    step, served = layers_step(shape, tokens, "cuda")
    (engine,) = opened(shape, "cuda")[2].backends
    assert isinstance(engine, CudaBackend)
    made = take(step, engine, event_timer, runs)
    case = f"{shape.drawn} pp{tokens}"
    backend, _, note = served.partition(", ")
    rows = made.rows(case, backend, note.rpartition(", ")[2].removesuffix(" tier") or None)
    for row in rows:
        print(f"{row.case}: {row.value:.4g} {row.metric} ({row.p20:.4g} to {row.p80:.4g})", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="smollm2,3b,8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--tokens", default="512,2048")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--receipt", type=Path)
    arguments = parser.parse_args()
    share_packs()
    rows = [
        row
        for name in arguments.shapes.split(",")
        for tokens in arguments.tokens.split(",")
        for row in report(name, int(tokens), arguments.runs)
    ]
    if arguments.receipt:
        driver = query_driver()
        command = "python -m benchmarks.timeline " + " ".join(
            f"--{name} {getattr(arguments, name)}" for name in ("shapes", "tokens", "runs")
        )
        document = receipt("timeline", command, rows, machine=driver.devices[0].name, driver=driver.version)
        write_receipt(arguments.receipt, document)
    return 0


if __name__ == "__main__":
    exit_with(main)
