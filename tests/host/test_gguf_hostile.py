"""A thousand spoilt models, always the same: each loads or raises GgufError, in under a second and 200 MB.

Ten thousand run with `python -m tests.gguf_mutation --cases 10000`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gguf_mutation import MEMORY_LIMIT, SECONDS_LIMIT, read_everything, run_case, write_models

_ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_spoilt_models_load_or_are_refused() -> None:
    """In a process of its own, so that its memory can be limited and a crash would be seen."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gguf_mutation", "--cases", "1000"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert result["faults"] == {}
    assert done.returncode == 0
    assert result["loaded"] + result["refused"] == 1000
    assert result["slowest"] < SECONDS_LIMIT
    assert result["memory growth"] < MEMORY_LIMIT
    # The changes reach all parts of the reader: most spoil the file, some do not, and the reasons are many.
    assert result["loaded"] > 100
    assert result["refused"] > 500
    assert result["different refusals"] > 25


def test_a_case_can_be_repeated(tmp_path: Path) -> None:
    """The number of a fault is enough to find it again."""
    outcomes = []
    for run in ("a", "b"):
        sound, spoilt = tmp_path / f"sound{run}", tmp_path / f"spoilt{run}"
        sound.mkdir()
        spoilt.mkdir()
        models = write_models(sound)
        for files in models.values():
            read_everything(files[0])
        outcomes.append([run_case(number, models, spoilt).split(": ", 1)[-1] for number in range(40)])
    assert outcomes[0] == outcomes[1]
