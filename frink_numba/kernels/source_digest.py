"""What a kernel is made of: the module that builds it and the modules of this package that this one imports.

A cached kernel is as good as its source. The digest covers what a kernel reaches and nothing else: after an edit, only
the kernels that it touches are compiled again.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PACKAGE = "frink_numba.kernels"
_FOLDER = Path(__file__).parent
_FROM_MODULE = re.compile(rf"^\s*from {re.escape(_PACKAGE)}\.(\w+) import\b", re.MULTILINE)
_FROM_PACKAGE = re.compile(rf"^\s*from {re.escape(_PACKAGE)} import\s+(\([^)]*\)|[^\n]*)", re.MULTILINE)
_NAME = re.compile(r"(\w+)(?:\s+as\s+\w+)?\s*(?:,|\)|$)")


def source_digest(build: Callable[..., Any]) -> str:
    """A digest of the files that `build`, a function of this package or a partial of one, is made of.

    A function from elsewhere, such as a test's, counts with every file of this package.
    """
    while isinstance(build, functools.partial):
        build = build.func
    package, _, module = build.__module__.rpartition(".")
    return _digest(module if package == _PACKAGE else "")


@functools.cache
def _digest(module: str) -> str:
    names = _reached(module) if module else sorted(path.stem for path in _FOLDER.glob("*.py"))
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode() + b"\0" + _text(name).encode() + b"\0")
    return digest.hexdigest()


def _reached(module: str) -> list[str]:
    """The module and all that it imports of this package, inside functions too, by name."""
    found, open_names = {module}, [module]
    while open_names:
        new = _imports(open_names.pop()) - found
        found |= new
        open_names += new
    return sorted(found)


@functools.cache
def _imports(module: str) -> frozenset[str]:
    text = _text(module)
    names = set(_FROM_MODULE.findall(text))
    for listed in _FROM_PACKAGE.findall(text):
        names |= set(_NAME.findall(listed.split("#")[0].strip("() \n")))
    return frozenset(name for name in names if (_FOLDER / f"{name}.py").exists())


@functools.cache
def _text(module: str) -> str:
    return (_FOLDER / f"{module}.py").read_text(encoding="utf-8")
