"""Quantized products of few rows (generation: M = 1 to 16) at memory bandwidth, over the packs of `gemm_pack.py`.

    y[M, N] = epilogue(f(x)[M, K] W[N, K]^T),   f: nothing (f16 operands) or an RMS norm of float32 rows

In order of use; the weights are the same device copies that the prefill products use:

    thins = ThinGemms((9, 0), multiprocessors=132)              # per device
    product = thins.product(weights, m, norm=True)              # weights: gemm.DeviceWeights; compiles or loads
    launch = product.bind(weights, NormRows(hidden, norm_weight, eps), out)
    launch(stream)                                              # graphs capture it

All arguments are frozen when bound, M included: one product per M (the code is shared by M = 2..8 and by 9..16). A
row's result does not depend, to the bit, on the other rows of a launch or on their number. On sm_90 a launch starts
while its predecessor still runs and fetches its weights ahead, so that everything launched on the stream between two
thin products must finish its writes before its own end, as kernels do.

`thin_gemm_kernel.py` is the kernel, `thin_gemm_plan.py` says how the work is cut.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from frink_numba.errors import ShapeError
from frink_numba.kernels import thin_gemm_kernel
from frink_numba.kernels.cubins import Source
from frink_numba.kernels.gemm import DeviceWeights, HalfRows
from frink_numba.kernels.gemm_epilogue import GATES, Epilogue
from frink_numba.kernels.launch import KernelShelf, Launch, LoadedKernel
from frink_numba.kernels.thin_gemm_kernel import MOST_NORM_COLUMNS, THREADS, ThinGemm
from frink_numba.kernels.thin_gemm_pair import ThinPair, pair_cut, pair_plan, why_no_pair
from frink_numba.kernels.thin_gemm_plan import MOST_ROWS, ThinDevice, ThinPlan, sums_bytes, thin_plan

NO_SECOND = (0,) * 7  # of the arguments that only a pair has
_LEAST_ALONE = 1 << 22  # weights: about what a launch that starts early gains against a block that shares its place


@dataclass(frozen=True, slots=True)
class NormRows:
    """float32 rows on the device that a product normalizes on their way in.

    hidden: float32 [M, K]; weight: float32 [K], the RMS norm's, K a multiple of 32 and at most 8192.
    """

    hidden: int
    weight: int
    eps: float


class ThinGemms:
    """The thin products of one device: kernels loaded once each. Thread-safe."""

    def __init__(self, capability: tuple[int, int], multiprocessors: int) -> None:
        self._shelf = KernelShelf(capability)
        self.device = ThinDevice(capability, multiprocessors)

    def product(
        self,
        weights: DeviceWeights,
        m: int,
        *,
        gate: str = "",
        half: bool = False,
        norm: bool = False,
        alone: bool = False,
        row_groups: int | None = None,
    ) -> ThinProduct:
        """The product of `m` rows (1..16) with such weights.

        gate: as in Epilogue, for a gated pack; half: f16 result with powers of two, else float32; norm: the operand is
        a NormRows (RMS norm fused), else a HalfRows. alone: it starts when everything before has ended (behind launches
        with another number of blocks, see `thin_gemm_plan.ThinPlan`; small products had better start early all the
        same, and do). row_groups forces the cut (tests and benchmarks).
        """
        if not 1 <= m <= MOST_ROWS:
            raise ShapeError(f"a thin product has 1 to {MOST_ROWS} rows, got {m}")
        if gate not in GATES or bool(gate) != weights.gated:
            raise ShapeError(f"the pack is {'' if weights.gated else 'not '}gated, the gate asked for is {gate!r}")
        if norm and weights.cols > MOST_NORM_COLUMNS:
            raise ShapeError(
                f"a fused norm takes rows of at most {MOST_NORM_COLUMNS} columns, got {weights.cols}: normalize first"
            )
        plan = thin_plan(weights.kind, m, weights.rows, weights.cols, self.device, row_groups)
        variant = variant_of(plan, weights.kind, weights.cols, Epilogue(gate, half), norm, self._shelf.overlap)
        early = not alone or weights.rows * weights.cols < _LEAST_ALONE
        kernel = self._kernel(variant, variant.shared(m, plan), early)
        return ThinProduct(m, weights.outputs, weights.cols, kernel, variant, plan)

    def pair(self, first: DeviceWeights, second: DeviceWeights, m: int) -> ThinPair | None:
        """The products of `m` rows (1..16), normed on their way in, with both weights in one launch.

        None where no launch serves both; those of their own have `pair_row_groups` then.
        """
        if not 1 <= m <= MOST_ROWS:
            raise ShapeError(f"two products at once have 1 to {MOST_ROWS} rows, got {m}")
        if self.pair_row_groups(first, second) is None:
            return None
        plan = pair_plan(first, second, m, self.device)
        if plan is None:
            return None
        variant = variant_of(plan.first, first.kind, first.cols, Epilogue(), True, self._shelf.overlap)
        variant = replace(variant, other=second.kind, other_slots=plan.second.slots)
        kernel = self._kernel(variant, variant.shared(m, plan.first), True)
        kinds, shapes = (first.kind, second.kind), ((first.outputs, first.cols), (second.outputs, second.cols))
        return ThinPair(m, kinds, shapes, kernel, variant, plan)

    def pair_row_groups(self, first: DeviceWeights, second: DeviceWeights) -> int | None:
        """The cut of both where rows, not too many of them, share a launch: sums of more rows are to be made alike."""
        if first.cols > MOST_NORM_COLUMNS or why_no_pair(first, second) is not None:
            return None
        return pair_cut(first, second, self.device.multiprocessors)[0]

    def _kernel(self, variant: ThinGemm, shared: int, early: bool) -> LoadedKernel:
        source, arguments = source_of(variant), thin_gemm_kernel.ARGUMENTS
        return self._shelf.kernel(source, arguments, shared, overlap=variant.overlap and early)

    def settle(self) -> None:
        """Load the kernels that were asked for so far; what the compiler or the driver raises."""
        self._shelf.settle()

    def close(self) -> None:
        """Unload the kernels; their launches must not run any more."""
        self._shelf.close()


def variant_of(plan: ThinPlan, kind: str, cols: int, epilogue: Epilogue, norm: bool, overlap: bool) -> ThinGemm:
    """What has to be compiled for a plan."""
    columns = -(-cols // 64) * 64
    vectors = -(-columns // (4 * THREADS)) if norm else 0
    pieces = 1 if norm else min(8, -(-plan.part_columns // (8 * THREADS))) if plan.tokens == 1 else 8
    cut = (plan.tokens, plan.row_groups, plan.slots)
    return ThinGemm(kind, *cut, epilogue, vectors, pieces, overlap, plan.parts > 1)


def source_of(variant: ThinGemm) -> Source:
    """What to compile for a variant: two launches share a multiprocessor."""
    return Source(f"thin_gemm {variant!r}", functools.partial(thin_gemm_kernel.build, variant), THREADS, 2)


@dataclass(frozen=True, slots=True)
class ThinProduct:
    """One product's kernel and cut: y[m, outputs] from x[m, cols]."""

    m: int
    outputs: int
    cols: int
    kernel: LoadedKernel
    variant: ThinGemm
    plan: ThinPlan

    def bind(
        self,
        weights: DeviceWeights,
        x: HalfRows | NormRows,
        out: int,
        pitch: int | None = None,
        *,
        add: bool = False,
        out_scale: int = 0,
    ) -> Launch:
        """A launch with these buffers.

        x: f16 rows [m, cols] with their scale (and norm, for an f16 result), or the NormRows that was asked for.
        out: float32 or f16 [m, outputs], `pitch` bytes from row to row (None: dense). add: add to the float32 result
        (not gated), each element once. out_scale: float32 [m], the powers of two of an f16 result.
        """
        fused, epilogue, plan = isinstance(x, NormRows), self.variant.epilogue, self.plan
        if (weights.kind, weights.outputs, weights.cols) != (self.variant.kind, self.outputs, self.cols):
            raise ShapeError(
                f"the product is for {self.variant.kind} {self.outputs} x {self.cols}, "
                f"the weights are {weights.kind} {weights.outputs} x {weights.cols}"
            )
        if fused != bool(self.variant.norm):
            raise ShapeError(f"the product {'fuses a norm' if self.variant.norm else 'takes f16 operands'}, got {x!r}")
        if add and (epilogue.half or epilogue.gate):
            raise ShapeError("only a plain float32 result can be added to")
        if epilogue.half and not out_scale:
            raise ShapeError("an f16 result needs out_scale")
        pitch = self.outputs * epilogue.item if pitch is None else pitch
        if pitch < self.outputs * epilogue.item or pitch % epilogue.item:
            raise ShapeError(
                f"rows of {self.outputs} results of {epilogue.item} bytes do not fit a pitch of {pitch} bytes"
            )
        rows = (x.hidden, x.weight, 0) if isinstance(x, NormRows) else (x.half, x.scale, x.norm)
        eps = x.eps if isinstance(x, NormRows) else 0.0
        pieces = plan.part_columns // 8
        addresses = (*rows, out, weights.data, weights.row_scale, weights.bias, out_scale)
        shape = (self.m, self.outputs, pitch, self.cols, -(-weights.rows // 16), plan.units)
        parts = (plan.parts, plan.part_items, plan.part_columns, sums_bytes(weights.kind, plan.part_columns))
        return self.kernel.bind(
            plan.blocks,
            *addresses,
            eps,
            *weights.bounds(),
            *shape,
            *parts,
            -(-(1 << 32) // pieces),
            int(add),
            *NO_SECOND,
        )
