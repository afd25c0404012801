"""compute-sanitizer's four tools over GPU tests of every kernel and of the resident stack; the findings as a receipt.

    python -m benchmarks.sanitize --receipt benchmarks/receipts/sanitizer-h200.json [--logs FOLDER] [--timeout SECONDS]

The tests are small ones of each kind, since a tool slows a kernel down a hundred times and more. The tools run side by
side, each in a process of its own. Exit code 1 when a tool finds anything, or when a test fails under it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from frink_numba.driver import query_driver
from frink_numba.receipt import Row, receipt, write_receipt

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
TESTS = ("tests/kernels", "tests/differential/test_cuda_device.py")
CLAUSES = (
    "(test_rms_norm and (True-9-513 or False-7-80))",
    "(test_add_bias and 5-257)",
    "(test_residual_add and (7-1023 or 3-5))",
    "(test_swiglu and (7-1023 or 3-5))",
    "(test_rope and (5-3-64 or 7-5-80))",
    "(test_rope_table and 5-20-3000)",
    "(test_attention and 5-50.0-65-62-9-3 and (80 or 64))",
    "(test_every_kind_with_every_tile and (Q4_K or Q6_K or Q4_1))",
    "(test_few_rows and (Q4_K-4 or Q4_1-5))",
    "(test_ragged_k and F32 and 17)",
    "(test_a_stack_equals and (4-0 or 33-21))",
    # the tensor-core kernels of attention, of generation, and around them
    "(fused_attention_gpu and (test_ragged_batch or (test_soft_cap and 64) or (test_windows and 31-128)))",
    "(fused_attention_gpu and (test_sinks and 0.0-64))",
    "(test_qkv_prepare and test_against_float64 and 96)",
    "(decode_attention_gpu and ((test_parts_and_rows and 3-2) or test_sequences_of or (test_sinks_and_scales and 40)))",
    "(test_thin_gemm_gpu and ((test_fused_norm and 576-7) or (test_bias_and_residual and 8-14336)))",
)
# "ERROR SUMMARY: 0 errors", or racecheck's "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
_PASSED = re.compile(r"^(\d+) passed", re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    """What one tool said: its count of findings, and how many tests passed under it; None: it did not get there."""

    tool: str
    findings: int | None
    passed: int | None

    @property
    def clean(self) -> bool:
        return self.findings == 0 and bool(self.passed)


def start(tool: str, log: Path, only: str) -> subprocess.Popen[str]:
    """The tests of the clauses with the text `only`, under one tool; its own words go to `log`."""
    chosen = " or ".join(clause for clause in CLAUSES if only in clause)
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-k", chosen, *TESTS]
    # Not API errors: cuda-python asks the driver for functions of every later version, and takes "no" for an answer.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = ["compute-sanitizer", "--tool", tool, *options, "--log-file", str(log), *tests]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(tool: str, process: subprocess.Popen[str], log: Path, timeout: float) -> Finding:
    """Wait for a tool for at most `timeout` seconds, and read its summary."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    log.with_suffix(".pytest").write_text(output)
    summary = _SUMMARY.search(log.read_text() if log.exists() else "")
    passed = _PASSED.search(output)
    failed = process.returncode not in (0, None)
    return Finding(
        tool, int(summary.group(1)) if summary else None, int(passed.group(1)) if passed and not failed else None
    )


def main() -> int:
    """Run all tools, print a line each, write the receipt when every one came to its end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--receipt", type=Path)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--only", default="", help="clauses with this text alone, such as attention_gpu")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for all tools together")
    arguments = parser.parse_args()
    logs = arguments.logs or Path(tempfile.mkdtemp())
    logs.mkdir(parents=True, exist_ok=True)
    running = [(tool, start(tool, logs / f"{tool}.log", arguments.only), logs / f"{tool}.log") for tool in TOOLS]
    deadline = time.monotonic() + arguments.timeout  # of all, since they run side by side
    found = [finish(*entry, max(0.0, deadline - time.monotonic())) for entry in running]
    for finding in found:
        print(f"{finding.tool}: {finding.findings} findings, {finding.passed} tests passed", flush=True)
    if arguments.receipt and all(finding.findings is not None and finding.passed for finding in found):
        driver = query_driver()
        rows = [
            Row(
                f"{f.tool} over {f.passed} GPU tests",
                "findings",
                float(f.findings or 0),
                float(f.findings or 0),
                float(f.findings or 0),
                1,
                "cuda",
            )
            for f in found
        ]
        machine = driver.devices[0].name
        write_receipt(
            arguments.receipt,
            receipt(
                "sanitizer",
                " ".join(["python", "-m", "benchmarks.sanitize", *sys.argv[1:]]),
                rows,
                machine=machine,
                driver=driver.version,
            ),
        )
    return 0 if all(finding.clean for finding in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
