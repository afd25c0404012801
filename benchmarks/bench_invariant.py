"""What FRINK_INVARIANT costs: prefill and generation with it, beside the same without it.

    python -m benchmarks.bench_invariant --receipt benchmarks/receipts/invariant-h200.json
    python -m benchmarks.bench_invariant --backend host --shapes smollm2 \\
        --receipt benchmarks/receipts/invariant-host.json

The mode is a device's for the life of a process, so each is measured in a process of its own, by the functions of
`bench_prefill` and `bench_decode`. A row's baseline is the same case without the setting.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from json import dumps, loads
from pathlib import Path

from benchmarks import bench_decode, bench_prefill
from benchmarks.command import exit_with
from frink_numba.driver import query_driver
from frink_numba.receipt import Row, cpu_name, receipt, write_receipt

_WITHOUT = "without FRINK_INVARIANT"
_PROMPT = 512  # before what is generated


def measured(given: argparse.Namespace) -> list[Row]:
    """All cases in this process's mode, shape by shape."""
    bench_prefill.share_packs()
    rows = []
    for name in given.shapes.split(","):
        for tokens in given.tokens.split(","):
            rows.append(bench_prefill.measure(name, int(tokens), given.backend, given.runs, False))
        rows += bench_decode.measure(name, _PROMPT, given.backend, given.new_tokens, given.runs)
    return rows


def in_a_process(arguments: list[str], invariant: bool) -> list[Row]:
    """What `measured` gives in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.bench_invariant", *arguments, "--rows", str(path)]
        subprocess.run(command, check=True, env=os.environ | {"FRINK_INVARIANT": str(int(invariant))})
        return [Row(**row) for row in loads(path.read_text("utf-8"))]


def compared(usual: list[Row], invariant: list[Row]) -> list[Row]:
    """The second rows, each beside the first one of the same case."""
    values = {row.case: row.value for row in usual}
    return [
        replace(
            row, case=f"{row.case}, FRINK_INVARIANT=1", baseline=_WITHOUT, baseline_value=round(values[row.case], 1)
        )
        for row in invariant
    ]


def main() -> int:
    """Measure and print; write the receipt when asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="smollm2,3b", help=f"of {', '.join(bench_prefill.SHAPES)}")
    parser.add_argument("--tokens", default="512,2048", help="of the prompts")
    parser.add_argument("--new-tokens", type=int, default=64, help=f"that are generated after {_PROMPT}")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--receipt", type=Path)
    parser.add_argument("--rows", type=Path, help="measure the environment's mode alone, and write its rows here")
    given = parser.parse_args()
    if given.rows:
        given.rows.write_text(dumps([asdict(row) for row in measured(given)]), "utf-8")
        return 0
    names = ("shapes", "tokens", "new_tokens", "backend", "runs")
    arguments = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(given, name)))]
    usual, invariant = (in_a_process(arguments, mode) for mode in (False, True))
    rows = compared(usual, invariant)
    for row in rows:
        print(f"{row.case}: {row.value:.0f} tok/s, {row.ratio:.2f} of {row.baseline_value:.0f} {_WITHOUT}")
    if given.receipt:
        driver = query_driver()
        machine = driver.devices[0].name if driver.devices and given.backend != "host" else cpu_name()
        command = "python -m benchmarks.bench_invariant " + " ".join(arguments)
        write_receipt(given.receipt, receipt("invariant", command, rows, machine=machine, driver=driver.version))
    return 0


if __name__ == "__main__":
    exit_with(main)
