"""Reductions among the lanes of a warp, with a stand-in for the simulator, which has no shuffles.

Every lane of the warp must take part. The order of the additions is fixed, so results repeat bitwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import config

_ALL = 0xFFFFFFFF


_meeting = threading.Lock()


def _exchange(value: Any) -> tuple[list[Any], int]:
    """Simulator: the values that the lanes of this thread's warp brought, and the lane's number."""
    thread: Any = threading.current_thread()
    block = thread._manager
    warp, lane = divmod(thread.thread_id, 32)
    with _meeting:
        warps = block.__dict__.setdefault("warps", {})
        if warp not in warps:
            lanes = min(32, int(np.prod(block._block_dim)) - 32 * warp)
            warps[warp] = threading.Barrier(lanes), [None] * lanes
    barrier, slots = warps[warp]
    slots[lane] = value
    barrier.wait()
    seen = list(slots)
    barrier.wait()
    return seen, lane


def _butterfly(value: Any, lanes: int, combine: Callable[[Any, Any], Any]) -> Any:
    """Simulator: reduce over aligned groups of `lanes` in the order of the device's exchanges."""
    seen, lane = _exchange(np.asarray(value, np.float32))
    distance = lanes // 2
    while distance:
        seen = [combine(seen[i], seen[i ^ distance]) for i in range(len(seen))]
        distance //= 2
    return seen[lane]


def _sum_32_simulated(value: Any) -> Any:
    return _butterfly(value, 32, np.add)[()]


def _sum_8_simulated(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_butterfly(values, 8, np.add))


def _max_8_simulated(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_butterfly(values, 8, np.maximum))


def _device_function(simulated: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    def choose(function: Callable[..., Any]) -> Any:
        return simulated if config.ENABLE_CUDASIM else cuda.jit(device=True)(function)

    return choose


@_device_function(_sum_32_simulated)
def sum_32(value: Any) -> Any:
    """The sum of `value` over the warp, in every lane."""
    for distance in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(_ALL, value, distance)
    return value


@_device_function(_sum_8_simulated)
def sum_8(values: Any) -> Any:
    """Sums over each eight neighbouring lanes of four values, in every lane."""
    a, b, c, d = values
    for distance in (4, 2, 1):
        a += cuda.shfl_xor_sync(_ALL, a, distance)
        b += cuda.shfl_xor_sync(_ALL, b, distance)
        c += cuda.shfl_xor_sync(_ALL, c, distance)
        d += cuda.shfl_xor_sync(_ALL, d, distance)
    return a, b, c, d


@_device_function(_max_8_simulated)
def max_8(values: Any) -> Any:
    """Maxima over each eight neighbouring lanes of four values, in every lane."""
    a, b, c, d = values
    for distance in (4, 2, 1):
        a = max(a, cuda.shfl_xor_sync(_ALL, a, distance))
        b = max(b, cuda.shfl_xor_sync(_ALL, b, distance))
        c = max(c, cuda.shfl_xor_sync(_ALL, c, distance))
        d = max(d, cuda.shfl_xor_sync(_ALL, d, distance))
    return a, b, c, d
