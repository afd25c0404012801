"""PTX instructions by name: barriers, the bulk copy engine, fences, flags. Declared with `ptx.instruction`.

Shared-memory addresses are u32 (`ptx.shared_address`), global ones u64.
"""

from __future__ import annotations

from typing import Any

from frink_numba.kernels.ptx import instruction

# ---- mbarriers ---------------------------------------------------------------------------------------------------

mbarrier_init = instruction("mbarrier.init.shared::cta.b64 [$0], $1;", None, "u32", "u32")
# Returns once the phase of this parity has completed; the hardware suspends the thread while it waits.
mbarrier_wait = instruction(
    "{\n.reg .pred done;\nWAIT_${:uid}:\nmbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n"
    "@done bra DONE_${:uid};\nbra WAIT_${:uid};\nDONE_${:uid}:\n}",
    None,
    "u32",
    "u32",
)
# The same where `$2` is not 0.
mbarrier_wait_if = instruction(
    "{\n.reg .pred done;\nsetp.eq.u32 done, $2, 0;\n@done bra DONE_${:uid};\n"
    "WAIT_${:uid}:\nmbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n"
    "@done bra DONE_${:uid};\nbra WAIT_${:uid};\nDONE_${:uid}:\n}",
    None,
    "u32",
    "u32",
    "u32",
)
# The same barrier of another block of the cluster: `$1` is the block's rank.
peer_address = instruction("mapa.shared::cluster.u32 $0, $1, $2;", "u32", "u32", "u32", pure=True)
cluster_rank = instruction("mov.u32 $0, %cluster_ctarank;", "u32")
cluster_sync = instruction("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;", None)
fence_barrier_init = instruction("fence.mbarrier_init.release.cluster;", None)
# Ordinary stores to shared memory become visible to the copy engine and the tensor cores.
fence_proxy_async = instruction("fence.proxy.async.shared::cta;", None)
# Barrier `$0` (1..15) among `$1` threads, whole warps.
named_barrier = instruction("bar.sync $0, $1;", None, "u32", "u32")

# ---- bulk copies -------------------------------------------------------------------------------------------------

# (destination, tensor map, barrier, column, row): one box of a two-dimensional tensor; zeros beyond its edges.
tma_load_2d = instruction(
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {$3, $4}], [$2];",
    None,
    "u32",
    "u64",
    "u32",
    "u32",
    "u32",
)
# The same box into every block of the cluster whose bit is set in the mask (`$5`), at the same address,
# signalling the barrier at the same address there.
tma_multicast_2d = instruction(
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
    "[$0], [$1, {$3, $4}], [$2], $5;",
    None,
    "u32",
    "u64",
    "u32",
    "u32",
    "u32",
    "u16",
)
# (tensor map, column, row): the same box into the L2 cache. It may be written at the time: the cache has it once.
tma_prefetch_2d = instruction(
    "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [$0, {$1, $2}];", None, "u64", "u32", "u32"
)
# A line of 128 bytes likewise.
prefetch_line = instruction("prefetch.global.L2 [$0];", None, "u64")
# This thread's bulk stores have read their source.
bulk_wait_read = instruction("cp.async.bulk.wait_group.read 0;", None)
# A tensor map comes into its cache ahead of the first copy that needs it.
prefetch_map = instruction("prefetch.tensormap [$0];", None, "u64")


# The block's index, read anew at each use.
block_index = instruction("mov.u32 $0, %ctaid.x;", "u32")


def copies_pending(count: int) -> Any:
    """Wait until at most `count` of this thread's committed groups of `cp.async` are in flight (sm_80)."""
    return instruction(f"cp.async.wait_group {count};", None)


# ---- overlap with the kernels before and after (sm_90, launches with `overlap`) -----------------------------------

# The next kernel's blocks may start where there is room.
launch_dependents = instruction("griddepcontrol.launch_dependents;", None)
# The kernels before this one have ended, and what they wrote is visible.
wait_for_predecessors = instruction("griddepcontrol.wait;", None)

# ---- register budgets of warp groups (sm_90a) --------------------------------------------------------------------


def set_registers(count: int, *, more: bool) -> Any:
    """`setmaxnreg` to `count`, a multiple of 8."""
    return instruction(f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {count};", None)


# ---- flags in global memory --------------------------------------------------------------------------------------

load_acquire = instruction("ld.acquire.gpu.global.u32 $0, [$1];", "u32", "u64")
store_release = instruction("st.release.gpu.global.u32 [$0], $1;", None, "u64", "u32")
load_float = instruction("ld.global.f32 $0, [$1];", "f32", "u64")
