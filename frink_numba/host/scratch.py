"""Work arrays of one run, kept from run to run so that the layer loop allocates nothing."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

_MOST_VIEWS = 512  # shapes remembered before all are forgotten


class Scratch:
    """Named float32 arrays with undefined content. One run at a time may use it."""

    def __init__(self) -> None:
        self.buffers: dict[str, np.ndarray] = {}
        self._views: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
        self.remembered: dict[Hashable, Any] = {}  # whatever holds views of these arrays; emptied when one grows

    def array(self, name: str, *shape: int) -> np.ndarray:
        """A C-contiguous float32 array; the next call of the same name gives the same memory."""
        view = self._views.get((name, shape))
        return view if view is not None else self._make(name, shape)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def _make(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        size = int(np.prod(shape, dtype=np.int64))
        buffer = self.buffers.get(name)
        if buffer is None or buffer.size < size:
            # Lone columns and rows that grow by one a step would otherwise allocate at each.
            buffer = np.empty(size + size // 4, np.float32)
            self._views = {key: view for key, view in self._views.items() if key[0] != name}
            self.buffers[name] = buffer
            self.remembered.clear()
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
            self.remembered.clear()
        view = buffer[:size].reshape(shape)
        self._views[name, shape] = view
        return view
