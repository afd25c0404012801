"""Measures what a person waits for before the first token, and the memory that the real model takes, on the host.

    python benchmarks/startup.py              prints the figures
    python benchmarks/startup.py --receipt    and writes benchmarks/receipts/startup.json

Every run is a process of its own. "open" is `load`, header and layers; "first token" adds the tokenizer and a prefill;
"peak memory" is the largest resident size over a prefill of 512 tokens and 16 steps of decoding.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from frink_numba.receipt import Row, cpu_name, receipt, write_receipt

RECEIPT = Path(__file__).resolve().parent / "receipts" / "startup.json"
MODEL = "smollm2-135m"

_TIMED = "import time; start = time.perf_counter()\n{}\nprint(time.perf_counter() - start)"
_IMPORT = _TIMED.format("import frink_numba")
_OPEN = f"import frink_numba.host.load\n{_TIMED.format(f'model = frink_numba.load({MODEL!r})')}"
_FIRST_TOKEN = _TIMED.format(
    f"import frink_numba as fn\nmodel = fn.load({MODEL!r})\nnext(fn.Decoder(model).generate('Once upon a time'))"
)
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


def _printed(code: str) -> float:
    return float(_run("-c", code))


def _help_seconds() -> float:
    start = time.perf_counter()
    _run("-m", "frink_numba", "--help")
    return time.perf_counter() - start


def _run(*arguments: str) -> str:
    environment = {**os.environ, "FRINK_BACKEND": "host"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True
    ).stdout


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
        rows.append(Row.from_samples(case, metric, [once() for _ in range(runs)], "host"))
        print(f"{case}: {rows[-1].value:.3g} {metric} ({rows[-1].p20:.3g} to {rows[-1].p80:.3g})", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--receipt", action="store_true", help=f"write {RECEIPT.name}")
    arguments = parser.parse_args()
    rows = measure(arguments.runs)
    if arguments.receipt:
        command = f"python benchmarks/startup.py --runs {arguments.runs} --receipt"
        write_receipt(RECEIPT, receipt("startup", command, rows, machine=cpu_name()))


if __name__ == "__main__":
    main()
