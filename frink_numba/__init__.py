"""Run GGUF language models from Python: a NumPy host engine, and CUDA kernels that are Python too.

Nothing heavy happens at import: names below are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from frink_numba import finder

if TYPE_CHECKING:
    from frink_numba.host.decoder import Decoder
    from frink_numba.host.load import load
    from frink_numba.host.model import Model
    from frink_numba.registry import register_backend

finder.install()

__version__ = "0.1.0"

_HOMES = {
    "load": "frink_numba.host.load",
    "Model": "frink_numba.host.model",
    "Decoder": "frink_numba.host.decoder",
    "register_backend": "frink_numba.registry",
}

__all__ = ["Decoder", "Model", "__version__", "load", "register_backend"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'frink_numba' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
