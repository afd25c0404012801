"""examples/third_party_engine.py as it stands: another engine on the backend, public names only."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from frink_numba.driver import query_driver

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "third_party_engine.py"


def run(**environment: str) -> list[str]:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def check_difference(line: str) -> None:
    text = "relative difference to the NumPy backend: "
    assert line.startswith(text)
    assert float(line.removeprefix(text)) < 1e-5


def test_it_uses_public_names_only():
    """No name with an underscore, and nothing of the tests."""
    tree = ast.parse(EXAMPLE.read_text())
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    attributes = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert not [name for name in imported + attributes if name.startswith("_")]
    assert all("tests" not in (node.module or "") for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))


@pytest.mark.skipif(query_driver().problem is None, reason="this machine has a GPU")
def test_without_a_gpu_it_says_why_and_goes_on():
    """B3: the reason is said, and the next in the order serves."""
    lines = run(NUMBA_ENABLE_CUDASIM="0")
    assert lines[0].startswith("accelerator is unavailable: ")
    assert lines[1:5] == ["served by host (2 layers)"] * 4
    check_difference(lines[5])


@pytest.mark.simulator
def test_in_the_simulator_both_chunks_run_on_the_backend():
    """The second chunk starts at position 4, over this engine's own cache (R11)."""
    lines = run(NUMBA_ENABLE_CUDASIM="1")
    assert lines[:4] == ["served by accelerator (2 layers)"] * 2 + ["served by host (2 layers)"] * 2
    check_difference(lines[4])


@pytest.mark.gpu
def test_on_a_gpu_both_chunks_run_on_the_backend():
    """With the kernels that serve layers as narrow as these."""
    lines = run(FRINK_CUDA_TIER="simt")
    assert lines[:4] == ["served by accelerator (2 layers)"] * 2 + ["served by host (2 layers)"] * 2
    check_difference(lines[4])
