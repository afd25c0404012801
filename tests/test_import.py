"""Starting is cheap: what `import frink_numba` and `frink-numba --help` load, and how long they take."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

import frink_numba

_ROOT = Path(__file__).resolve().parents[1]

# Top-level modules that take long to import, or that must be absent from a machine without a GPU.
_DENIED = (
    "numba",
    "numba_cuda",
    "cuda",
    "llvmlite",
    "numpy",
    "gguf",
    "tokenizers",
    "jinja2",
    "rich",
    "torch",
    "transformers",
    "huggingface_hub",
)


def _python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=_ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _children_seconds() -> float:
    """Processor time of the child processes so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    "statement",
    [
        "import frink_numba",
        "import frink_numba.cli.main",
        "import frink_numba.settings, frink_numba.errors, frink_numba.driver",
    ],
)
def test_nothing_heavy_is_imported(statement: str) -> None:
    """A fresh interpreter knows none of the denied modules afterwards (style habit 10)."""
    loaded = _python("-c", f"import sys\n{statement}\nprint(*(name.partition('.')[0] for name in sys.modules))").split()
    assert "frink_numba" in loaded
    assert sorted(set(_DENIED) & set(loaded)) == []


def test_importing_is_fast() -> None:
    """Under 0.2 s: the best of three in processor time, which a busy machine stretches least."""
    code = "import time; start = time.process_time(); import frink_numba; print(time.process_time() - start)"
    assert min(float(_python("-c", code)) for _ in range(3)) < 0.2


def test_help_is_fast() -> None:
    """Under 0.3 s: the whole process, interpreter included, the best of three in processor time."""
    seconds = []
    for _ in range(3):
        before = _children_seconds()
        assert "generate" in _python("-m", "frink_numba", "--help")
        seconds.append(_children_seconds() - before)
    assert min(seconds) < 0.3


def test_public_names_resolve() -> None:
    """Every name of __all__ exists and is found on first use; another is an AttributeError."""
    assert set(frink_numba.__all__) <= set(dir(frink_numba))
    for name in frink_numba.__all__:
        assert getattr(frink_numba, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = frink_numba.no_such_name
