"""Measures what a person waits for before the first token, and the memory that the real model takes.

    python -m benchmarks.startup              prints the host's figures
    python -m benchmarks.startup --receipt    and writes benchmarks/receipts/startup.json
    python -m benchmarks.startup --gpu        the same wait with the cuda backend, and where it goes

Every run is a process of its own, which finds the byte code of all modules on disk, as pip leaves it. "open" is `load`,
header and layers; "first token" adds the tokenizer and a prefill; "peak memory" is the largest resident size over a
prefill of 512 tokens and 16 steps of decoding.

With --gpu, "process start to first token" is a program of four lines, from before its process is made; kernels lie in
FRINK_CACHE_DIR and the file in the system's cache, as a process before has left them. Its parts are timed in processes
of their own that say when each part ended, and follow each other as a user meets them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import RECEIPTS
from benchmarks.command import exit_with
from frink_numba.driver import query_driver
from frink_numba.errors import BackendUnavailable
from frink_numba.receipt import Row, cpu_name, receipt, write_receipt

MODEL = "smollm2-135m"
PROMPT = "Once upon a time"

_TIMED = "import time; start = time.perf_counter()\n{}\nprint(time.perf_counter() - start)"
_IMPORT = _TIMED.format("import frink_numba")
_OPEN = f"import frink_numba.host.load\n{_TIMED.format(f'model = frink_numba.load({MODEL!r})')}"
_GENERATE = f"import frink_numba as fn\nmodel = fn.load({MODEL!r})\nnext(fn.Decoder(model).generate({PROMPT!r}))"
_FIRST_TOKEN = _TIMED.format(_GENERATE)
_PEAK = f"""
import resource, frink_numba
model = frink_numba.load({MODEL!r})
decoder = frink_numba.Decoder(model)
cache = decoder.new_cache()
decoder.prefill(list(range(512)), cache)
for token in range(16):
    decoder.decode(token, cache)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000)
"""

# The clock is the system's, so that a child's readings can be taken from the parent's.
_FROM_START = f"{_GENERATE}\nimport time; print(time.perf_counter())"

# The parts of the wait, in order, each with what the others leave over. Functions of the first step are timed from
# outside.
_PARTS = f"""
import json, time
ends = {{"interpreter": time.perf_counter()}}
import frink_numba as fn
model = fn.load({MODEL!r})
ends["import, open the file"] = time.perf_counter()
decoder = fn.Decoder(model)
ends["driver, beside imports"] = time.perf_counter()
pieces = decoder.generate({PROMPT!r})
ends["tokenizer, beside context and packs"] = time.perf_counter()
from frink_numba.cuda.tensor import body
spent = {{}}
def timed(owner, name, part):
    real = getattr(owner, name)
    def call(*args, **kwargs):
        start = time.perf_counter()
        try:
            return real(*args, **kwargs)
        finally:
            spent[part] = spent.get(part, 0) + time.perf_counter() - start
    setattr(owner, name, call)
timed(body.TensorBody, "upload", "weights waited for and sent")
timed(body.TensorBody, "upload_edges", "embedding waited for and sent")
timed(body.TensorBody, "_part", "kernels loaded and bound")
start = time.perf_counter()
next(pieces)
print(json.dumps({{"ends": ends, "spent": spent, "first": time.perf_counter() - start}}))
"""


def _printed(code: str, backend: str = "host") -> float:
    return float(_run("-c", code, backend=backend))


def _help_seconds() -> float:
    start = time.perf_counter()
    _run("-m", "frink_numba", "--help")
    return time.perf_counter() - start


def _run(*arguments: str, backend: str = "host") -> str:
    environment = {**os.environ, "FRINK_BACKEND": backend}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def measure(runs: int) -> list[Row]:
    """The median of `runs` processes of each; one before them warms the file cache."""
    cases: list[tuple[str, str, Callable[[], float]]] = [
        ("import frink_numba", "s", lambda: _printed(_IMPORT)),
        ("frink-numba --help", "s", _help_seconds),
        (f"{MODEL} open", "s", lambda: _printed(_OPEN)),
        (f"{MODEL} import, open, first token", "s", lambda: _printed(_FIRST_TOKEN)),
        (f"{MODEL} peak memory, pp512 and tg16", "MB", lambda: _printed(_PEAK)),
    ]
    rows = []
    for case, metric, once in cases:
        once()
        rows.append(_shown(Row.from_samples(case, metric, [once() for _ in range(runs)], "host")))
    return rows


def measure_gpu(runs: int) -> list[Row]:
    """From the start of a process to the first token on the GPU, and the parts of it."""

    def whole() -> float:
        start = time.perf_counter()
        return _printed(_FROM_START, "cuda") - start

    start = time.perf_counter()
    whole()
    print(f"the first process, which may compile kernels: {time.perf_counter() - start:.1f} s", flush=True)
    samples = [whole() for _ in range(runs)]
    rows = [_shown(Row.from_samples(f"{MODEL} process start to first token", "s", samples, "cuda"))]
    parts: dict[str, list[float]] = {}
    for _ in range(runs // 2 + 2):  # one to begin with
        for part, seconds in _parts().items():
            parts.setdefault(part, []).append(seconds)
    rows += [_shown(Row.from_samples(f"of that: {part}", "s", taken[1:], "cuda")) for part, taken in parts.items()]
    return rows


def _parts() -> dict[str, float]:
    start = time.perf_counter()
    told = json.loads(_run("-c", _PARTS, backend="cuda"))
    parts = {}
    for part, end in told["ends"].items():
        parts[part], start = end - start, end
    parts |= told["spent"]
    parts["first step beside that"] = told["first"] - sum(told["spent"].values())
    return parts


def _shown(row: Row) -> Row:
    print(f"{row.case}: {row.value:.3g} {row.metric} ({row.p20:.3g} to {row.p80:.3g})", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--gpu", action="store_true", help="measure the cuda backend in place of the host")
    parser.add_argument("--receipt", nargs="?", type=Path, const=Path(), help="write it, by default to receipts/")
    arguments = parser.parse_args()
    if arguments.gpu and (problem := query_driver().problem):
        raise BackendUnavailable(problem)
    command = f"python -m benchmarks.startup --runs {arguments.runs}" + " --gpu" * arguments.gpu + " --receipt"
    rows = measure_gpu(arguments.runs) if arguments.gpu else measure(arguments.runs)
    if arguments.receipt is None:
        return
    driver = query_driver()
    if arguments.gpu:
        document = receipt("startup", command, rows, machine=driver.devices[0].name, driver=driver.version)
        name = "startup-h200.json"
    else:
        document, name = receipt("startup", command, rows, machine=cpu_name()), "startup.json"
    write_receipt(arguments.receipt if arguments.receipt.name else RECEIPTS / name, document)


if __name__ == "__main__":
    exit_with(main)
