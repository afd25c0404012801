"""How much memory this machine, or the container around this process, has."""

from __future__ import annotations

import os
from pathlib import Path

# Where Linux control groups (version 2, then 1) put the limit; a file that is absent or says "max" sets none.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_UNKNOWN = 8 << 30  # assumed where the system does not tell


def machine_memory(limits: tuple[Path, ...] = _LIMITS) -> int:
    """Bytes of memory: the machine's, or the control group's limit where that is smaller."""
    try:
        sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, ValueError, OSError):  # no sysconf, or not these names
        sizes = [_UNKNOWN]
    for path in limits:
        try:
            sizes.append(int(path.read_text()))
        except (OSError, ValueError):
            continue
    return min(size for size in sizes if size > 0)
