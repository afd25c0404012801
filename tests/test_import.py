"""Starting is cheap: what `import frink_numba` and `frink-numba --help` load, and how long they take."""

from __future__ import annotations

import subprocess
import sys
import time
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
    """The best of three, since a busy machine can only make it slower: under 0.2 s."""
    code = "import time; start = time.perf_counter(); import frink_numba; print(time.perf_counter() - start)"
    assert min(float(_python("-c", code)) for _ in range(3)) < 0.2


def test_help_is_fast() -> None:
    """The whole process, interpreter included, the best of three: under 0.3 s."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        shown = _python("-m", "frink_numba", "--help")
        seconds.append(time.perf_counter() - start)
        assert "generate" in shown
    assert min(seconds) < 0.3


def test_public_names_resolve() -> None:
    """Every name of __all__ exists and is found on first use; another is an AttributeError."""
    assert set(frink_numba.__all__) <= set(dir(frink_numba))
    for name in frink_numba.__all__:
        assert getattr(frink_numba, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = frink_numba.no_such_name
