"""The whole backend over the real kernels, without a GPU: numba's CUDA simulator in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.simulated import CASES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.simulator
def test_two_layer_stacks_equal_the_truth():
    """R8 to R19 on small odd shapes: hidden batch and K/V rows under 1e-5, bytes as the rule says, one wait a run."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.cuda.simulated"],
        cwd=ROOT,
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    *cases, single = [json.loads(line) for line in done.stdout.splitlines()]
    assert [case["case"] for case in cases] == [name for name, *_ in CASES]
    for case in cases:
        assert len(case["errors"]) == 5
        assert all(error < 1e-5 for error in case["errors"]), case
        assert case["bytes"] == case["want_bytes"], case
        assert case["waits"] == 1
    assert single["same"] is True
