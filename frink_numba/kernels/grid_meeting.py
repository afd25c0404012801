"""All blocks of a grid that fits the device at once meet at a count in global memory, which is zero again at the end.

`parties` threads arrive, and the `waiters` among all blocks leave when they have seen the count at `parties` or above.
Both add one, and from parties + waiters - 1 the count wraps to zero. Nobody may wait again before the launch ends.
"""

from __future__ import annotations

from frink_numba.kernels.ptx import instruction

# (count, parties + waiters - 1). What the block wrote before, up to its last barrier, is visible to who acquires it.
arrive = instruction("red.release.gpu.global.inc.u32 [$0], $1;", None, "u64", "u32")
leave = instruction("red.relaxed.gpu.global.inc.u32 [$0], $1;", None, "u64", "u32")
# Orders ordinary accesses to global memory and those of the copy engine. Both sides of a meeting need it: who wrote
# before its release, who has the copy engine read behind its acquire.
fence_proxy_async_global = instruction("fence.proxy.async.global;", None)
