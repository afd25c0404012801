"""How many processors this process may keep busy."""

from __future__ import annotations

import math
import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # Linux control groups, version 2: "quota period" in microseconds, or "max ..."


def usable_processors(quota: Path = _QUOTA) -> int:
    """The processors that the system lets this process run on, or fewer where its control group grants less time."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        count = os.cpu_count() or 1
    try:
        granted, period = quota.read_text().split()
        count = min(count, math.ceil(int(granted) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or no limit
        pass
    return max(1, count)
