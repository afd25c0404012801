"""Lets `frink_numba.cuda` be imported where numba-cuda is installed.

numba-cuda puts an import hook first in `sys.meta_path` that claims every module whose name contains "numba.cuda", which
"frink_numba.cuda" does, and then asks itself for it until the interpreter's recursion limit. This finder stands before
that hook and answers for our own modules alone, the ordinary way.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_OWN = "frink_numba.cuda"


class OwnCudaFinder:
    """A meta path finder for `frink_numba.cuda` and what lies in it."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _OWN and not name.startswith(_OWN + "."):
            return None
        return PathFinder.find_spec(name, path, target)


def install() -> None:
    """Put the finder first; once per process."""
    if OwnCudaFinder not in sys.meta_path:
        sys.meta_path.insert(0, OwnCudaFinder)
