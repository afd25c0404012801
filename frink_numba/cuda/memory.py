"""How much device memory frink_numba may hold."""

from __future__ import annotations

from collections.abc import Callable

from frink_numba import settings

_SETTING = "FRINK_CUDA_MEMORY"
FREE_SHARE = 0.9  # of the memory that is free when first asked; the rest is for kernels, the driver and others


class MemoryLimit:
    """The budget of one device: FRINK_CUDA_MEMORY, else nine tenths of what was free when it was first asked for."""

    def __init__(self, query_free: Callable[[], int]) -> None:
        self._query_free = query_free
        self._free: int | None = None
        self._text: str | None = None  # of the setting when it was read last, and what it says
        self._limit: int | None = None
        self._ceiling: int | None = None
        self.last = 0  # what `bytes` answered last: the setting takes longer to read than a step has time for

    def bytes(self) -> int:
        """Bytes for weights and scratch together. Asks the device at most once; raises what that raises."""
        text = settings.raw(_SETTING)
        if text != self._text:
            self._limit, self._text = settings.get(_SETTING), text
        limit: float | None = self._limit
        if limit is None:
            if self._free is None:
                self._free = self._query_free()
            limit = self._free * FREE_SHARE
        self.last = int(limit if self._ceiling is None else min(limit, self._ceiling))
        return self.last

    def allows(self, nbytes: int, physical: int) -> bool:
        """Whether so many bytes may be held at all, by the setting and a device's memory; asks no device."""
        limit = settings.get(_SETTING)
        return nbytes <= (physical if limit is None else min(limit, physical))

    def lower(self, nbytes: int) -> None:
        """Memory ran out while `nbytes` were held: no more than that from now on."""
        self._ceiling = nbytes if self._ceiling is None else min(self._ceiling, nbytes)
