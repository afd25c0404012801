"""The resident stack on NVIDIA GPUs: the `cuda` backend, and the same stack as a function for other engines.

Names are resolved on first use; numba is imported only once a device is opened.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frink_numba.cuda.backend import CudaBackend, create
    from frink_numba.cuda.device import visible_devices
    from frink_numba.cuda.stack import ResidentLayers, launch_prefill_dense_stack, load_layers

_HOMES = {
    "CudaBackend": "frink_numba.cuda.backend",
    "create": "frink_numba.cuda.backend",
    "visible_devices": "frink_numba.cuda.device",
    "ResidentLayers": "frink_numba.cuda.stack",
    "launch_prefill_dense_stack": "frink_numba.cuda.stack",
    "load_layers": "frink_numba.cuda.stack",
}

__all__ = [
    "CudaBackend",
    "ResidentLayers",
    "create",
    "launch_prefill_dense_stack",
    "load_layers",
    "visible_devices",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'frink_numba.cuda' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
