"""Blocks of a grid share work on rows that all of them need, by tickets: nobody waits for a block that may not run.

Rows fall into turns, in their order. Who takes a turn's ticket, the next number of a count, does the turn without
waiting for any other block, and marks it done at the count of those rows that are needed together. Nobody begins other
work before tickets have run out. So who then waits for rows waits for turns whose tickets were taken, by blocks that
run and do not wait: any number of blocks gets through, one at a time too, in any order, whatever else the device does.

Counts are zero before a launch and behind it. `take` wraps at the last of all tickets, of which each of the `parties`
takes one in vain. `leave` wraps at the last to leave, who sets the counts of turns back: all have waited for what they
wait for, and marked what they had to, before they leave.

A grid may take tickets before its predecessors have ended, where they let it begin (`launch_dependents`) only behind
their own last tickets.
"""

from __future__ import annotations

from frink_numba.kernels.ptx import instruction

# (count, its last value): the value before; the count goes up by one, and behind its last value to zero.
take = instruction("atom.relaxed.gpu.global.inc.u32 $0, [$1], $2;", "u32", "u64", "u32")
leave = instruction("atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;", "u32", "u64", "u32")
# One turn more is done. What the block wrote before, up to its last barrier, is visible to who acquires the count.
mark = instruction("red.release.gpu.global.add.u32 [$0], 1;", None, "u64")
# Orders ordinary accesses to global memory and those of the copy engine. Both sides need it: who wrote before a mark,
# who has the copy engine read behind the acquire.
fence_proxy_async_global = instruction("fence.proxy.async.global;", None)
# A number from one thread of a group to the others, through shared memory with a barrier between.
put_number = instruction("st.shared.u32 [$0], $1;", None, "u32", "u32")
get_number = instruction("ld.shared.u32 $0, [$1];", "u32", "u32")
# The thread's index, read anew at each use.
thread_index = instruction("mov.u32 $0, %tid.x;", "u32")
# The thread is done with what it had to do: one of those that the barrier waits for.
arrive = instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", None, "u32")
