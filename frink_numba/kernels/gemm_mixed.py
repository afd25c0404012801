"""Which slabs of a `wgmma` product are of which kind, where its weights are of one kind or of two.

Of two kinds, the slabs before `border` are of the first, those from it on of the second, which lie elsewhere. A set is
the slabs of one tile. All of a set are of one kind: the sets of each kind begin with its first slab, so that its last
set may have fewer. The flag `second` is not 0 where the second kind is meant.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from frink_numba.kernels.gemm_kinds import FragmentKind
from frink_numba.kernels.ptx import Emitter, Register, emitted


def of_kind(e: Emitter, second: Register, values: Sequence[Register]) -> Register:
    """The value of the kind that is meant, of one for each kind."""
    if len(values) == 1:
        return values[0]
    flag = e.builder.icmp_unsigned("!=", second.value, e.constant("u32", 0).value)
    return Register(e, values[0].kind, e.builder.select(flag, values[1].value, values[0].value))


@functools.cache
def slab_sets(sides: int, mixed: bool) -> tuple[Any, Any]:
    """(count(border, slabs) -> sets, find(set, border, slabs) -> (its first slab, end of its kind's slabs, second)).

    A set is `sides` slabs. `mixed`: of two kinds.
    """

    def sets(e: Emitter, slabs: Register) -> Register:
        return Register(e, "u32", e.builder.udiv((slabs + (sides - 1)).value, e.constant("u32", sides).value))

    @emitted("u32", "u32", "u32")
    def count(e: Emitter, border: Register, slabs: Register) -> Register:
        return sets(e, border) + sets(e, slabs - border) if mixed else sets(e, slabs)

    @emitted("u32x3", "u32", "u32", "u32")
    def find(e: Emitter, slab_set: Register, border: Register, slabs: Register) -> list[Register]:
        zero, one = (e.constant("u32", bit) for bit in range(2))
        if not mixed:
            return [slab_set * sides, slabs, zero]
        before = sets(e, border)
        behind = e.builder.icmp_unsigned(">=", slab_set.value, before.value)
        second = Register(e, "u32", e.builder.select(behind, one.value, zero.value))
        first_slabs = [slab_set * sides, border + (slab_set - before) * sides]
        return [of_kind(e, second, first_slabs), of_kind(e, second, [border, slabs]), second]

    return count, find


@functools.cache
def slab_source(kinds: tuple[FragmentKind, ...]) -> Any:
    """source(weights, behind, slab, border, second, steps) -> (where the slab begins, bytes of a slab).

    `behind` is where the slabs of the second kind begin.
    """

    @emitted("u64x2", "u64", "u64", "u32", "u32", "u32", "u32")
    def source(
        e: Emitter,
        weights: Register,
        behind: Register,
        slab: Register,
        border: Register,
        second: Register,
        steps: Register,
    ) -> list[Register]:
        sizes = [e.widen(steps >> (kind.group_steps >> 1)) * kind.record_size for kind in kinds]
        places = [weights + e.widen(slab) * sizes[0]]
        if len(kinds) > 1:
            places.append(behind + e.widen(slab - border) * sizes[1])
        return [of_kind(e, second, places), of_kind(e, second, sizes)]

    return source
