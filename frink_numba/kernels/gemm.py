"""Quantized matrix products on tensor cores: the one interface over the `wgmma` and `mma` tiers.

    y[M, N] = epilogue(x[M, K] W[N, K]^T)

In order of use, all addresses being integers (device memory of the caller, in the caller's current context):

    packed = pack([q, k, v])                              # gemm_pack: host, once per matrix, for both tiers
    gemms = Gemms("wgmma", (9, 0), multiprocessors=132)   # per device
    weights = DeviceWeights.of(packed, data, row_scale)   # where packed.data and packed.row_scale were uploaded
    product = gemms.product(weights, m)                   # picks the tiles, compiles or loads the kernel
    maps = product.maps(x, out)                           # bytes to upload to a 128-byte aligned address; maybe none
    launch = product.bind(weights, x, out, maps=address, workspace=address)
    gemms.half_rows(x_float32, m, k, x)(stream)           # float32 rows to f16 operands
    launch(stream)                                        # 3 us of host time; graphs capture it

Maps depend on the buffers and on M, not on the weights: layers of equal shape share them. The workspace is one per
stream, `product.workspace` bytes or more, zeroed once; launches leave its flags at zero. Scales, norms and `out_scale`
are as long as M rounded up to 256. Columns of the result beyond N may be overwritten up to a multiple of 16 bytes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from frink_numba.errors import ShapeError
from frink_numba.kernels import (
    few_gemm,
    few_gemm_plan,
    few_gemm_variant,
    gemm_mma,
    gemm_norm,
    gemm_variant,
    gemm_wgmma,
    half_rows,
)
from frink_numba.kernels.cubins import Source
from frink_numba.kernels.few_gemm_plan import FewPlan, few_plan
from frink_numba.kernels.few_gemm_product import FewProduct
from frink_numba.kernels.few_gemm_variant import FewGemm
from frink_numba.kernels.gemm_epilogue import GATES, Epilogue
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS, SLAB, fragment_kind
from frink_numba.kernels.gemm_mma import MmaGemm
from frink_numba.kernels.gemm_norm import MOST_NORM_COLUMNS
from frink_numba.kernels.gemm_pack import PackedMatrix
from frink_numba.kernels.gemm_plan import TOKEN_TILES, Behind, Plan, make_plan, mma_tokens
from frink_numba.kernels.gemm_product import Product
from frink_numba.kernels.gemm_variant import MOST_NORM_TILES, TICKETS_AT, WgmmaGemm
from frink_numba.kernels.launch import KernelShelf, Launch, LoadedKernel
from frink_numba.kernels.tma import MAP_BYTES, tensor_map
from frink_numba.quant import QuantKind

if TYPE_CHECKING:
    from frink_numba.kernels.thin_gemm import NormRows

# The fewest columns of a product of few rows. With narrower ones of these kinds, one position of the real model was
# 0.0107 from its golden, which is held to 0.01 (with tiles 0.0062), though each product is as near to float64.
_FEW_COLUMNS = {"Q4_1": 2048, "Q5_1": 2048}
_TILE_OF_FEW = 32
_BOUND_MARGIN = 1.01  # f16 rounding of both operands


def why_not(kind: QuantKind, cols: int) -> str | None:
    """The reason why a matrix of this kind and width cannot be served, or None."""
    if fragment_kind(kind.name) is None:
        return f"the tensor-core kernels do not know the kind {kind}"
    if cols % 32:
        return f"the tensor-core kernels need a width that is a multiple of 32, not {cols}"
    return None


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """A PackedMatrix on the device.

    `bias`: float32 [rows filled up to 64], or 0; `bias_bound`: its largest magnitude.
    """

    kind: str
    rows: int
    cols: int
    gated: bool
    norm_bounds: tuple[float, ...]
    data: int
    row_scale: int
    bias: int = 0
    bias_bound: float = 0.0

    @classmethod
    def of(
        cls, packed: PackedMatrix, data: int, row_scale: int, bias: int = 0, bias_bound: float = 0.0
    ) -> DeviceWeights:
        """`data` and `row_scale` are where the pack's two arrays lie; `data` at a multiple of 16."""
        facts = (packed.kind.name, packed.rows, packed.cols, packed.gated, packed.norm_bounds)
        return cls(*facts, data, row_scale, bias, bias_bound)

    @property
    def outputs(self) -> int:
        return self.rows // 2 if self.gated else self.rows

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.kind,)

    @property
    def slabs(self) -> int:
        return -(-self.rows // SLAB)

    def bounds(self) -> tuple[float, float, float]:
        """(c2, c1, c0) of gemm_epilogue: no result is larger than (norm * c2 + c1) * norm + c0."""
        if self.gated:
            return (_BOUND_MARGIN * self.norm_bounds[0] * self.norm_bounds[1], 0.0, 0.0)
        return (0.0, _BOUND_MARGIN * max(self.norm_bounds), self.bias_bound)


@dataclass(frozen=True, slots=True)
class MixedWeights:
    """Matrices of two kinds as one product's (`wgmma` tier): the results of `second` follow those of `first`.

    The row scales of both are one array, and so are their biases. ShapeError names what does not fit.
    """

    first: DeviceWeights
    second: DeviceWeights

    def __post_init__(self) -> None:
        first, second = self.first, self.second
        if why := why_not_mixed(first.rows, first.cols, second.cols):
            raise ShapeError(why)
        if first.gated or second.gated:
            raise ShapeError("gate and up of two kinds are two products")
        floats = 4 * SLAB * first.slabs
        if second.row_scale != first.row_scale + floats or second.bias != (first.bias and first.bias + floats):
            raise ShapeError("row scales and biases of the second kind lie behind those of the first")

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.first.kind, self.second.kind)

    @property
    def rows(self) -> int:
        return self.first.rows + self.second.rows

    @property
    def outputs(self) -> int:
        return self.rows

    @property
    def cols(self) -> int:
        return self.first.cols

    @property
    def gated(self) -> bool:
        return False

    def bounds(self) -> tuple[float, float, float]:
        """Of all results, as DeviceWeights.bounds."""
        bounds = [part.bounds() for part in (self.first, self.second)]
        return (0.0, max(c1 for _, c1, _ in bounds), max(c0 for _, _, c0 in bounds))


@dataclass(frozen=True, slots=True)
class HalfRows:
    """f16 operands on the device: half [M, K] at a multiple of 16; scale and norm float32 [M rounded up to 256]."""

    half: int
    scale: int
    norm: int


class Gemms:
    """The tensor-core products of one device: plans, and kernels loaded once each. Thread-safe.

    invariant: no tile is cut along K, so that a row's result depends neither on the other rows nor on their number.
    """

    def __init__(
        self, tier: str, capability: tuple[int, int], multiprocessors: int, *, invariant: bool = False
    ) -> None:
        self.tier, self.multiprocessors, self.invariant = tier, multiprocessors, invariant
        self.mixes = tier == "wgmma"  # whether a product takes MixedWeights
        self._shelf = KernelShelf(capability, tier)
        self._memory = gemm_mma.shared_memory(capability)

    def product(
        self,
        weights: DeviceWeights | MixedWeights,
        m: int,
        *,
        gate: str = "",
        half: bool = False,
        norm: bool = False,
        tokens: int | None = None,
        cluster: int | None = None,
        groups: int | None = None,
        plan: Plan | FewPlan | None = None,
        room: int | None = None,
    ) -> WgmmaProduct | FewProduct | MmaProduct:
        """The product of M tokens with such weights. `gate` as in Epilogue, `half` for an f16 result.

        norm: the launch makes its operands itself, by the RMS norm of a NormRows (`wgmma` tier).
        `tokens`, `cluster` and `groups` force the tile, `plan` all of the cut (benchmarks and tests). `room`: bytes of
        workspace that there are; a product that would take more is not cut along K, and takes none.
        """
        if m < 1:
            raise ShapeError(f"a product needs at least one token, got {m}")
        if gate not in GATES or bool(gate) != weights.gated:
            raise ShapeError(f"the pack is {'' if weights.gated else 'not '}gated, the gate asked for is {gate!r}")
        if norm and (why := why_no_norm(self.tier, weights.cols)):
            raise ShapeError(why)
        known = gemm_mma.TOKEN_TILES if self.tier == "mma" else TOKEN_TILES
        if tokens is not None and tokens not in known:
            raise ShapeError(f"the tier {self.tier} has tiles of {known} tokens, not {tokens}")
        epilogue = Epilogue(gate, half)
        first, second = (*weights.kinds, "")[:2]
        if self.tier == "mma":
            if second:
                raise ShapeError("products of the tier mma are of one kind each")
            tile = tokens or mma_tokens(m, weights.rows, self.multiprocessors)
            warps = MmaGemm(first, tile, epilogue, self._memory)
            return MmaProduct(m, weights.outputs, weights.cols, self._kernel(warps), warps)
        few = None
        if plan is None and not (second or norm or tokens or cluster or groups):
            few = self._few_plan(first, m, weights.rows, weights.cols, room)
        elif isinstance(plan, FewPlan):
            few, plan = plan, None
        if few is not None:
            small = FewGemm(first, few.tokens, epilogue, few.groups, few.parts > 1)
            return FewProduct(m, weights.outputs, weights.cols, self._kernel(small), small, few)
        if plan is None:
            behind = _behind(second, weights.second.rows) if isinstance(weights, MixedWeights) else None
            forced: dict[str, Any] = {"tokens": tokens, "cluster": cluster, "groups": groups}
            shape = first, m, weights.rows, weights.cols, behind
            plan = self._tiles(*shape, **forced)
            if room is not None and plan_workspace(first, plan) > room:
                plan = self._tiles(*shape, whole=True, **forced)
        columns = gemm_norm.norm_columns(weights.cols) if norm else 0
        variant = WgmmaGemm(first, plan.tokens, epilogue, plan.cluster, plan.groups, columns, second)
        if norm:
            # Blocks without a tile of their own norm rows, where there are more rows than groups.
            places = self.multiprocessors * variant.resident // plan.cluster * plan.cluster
            wanted = -(-m // plan.groups // plan.cluster) * plan.cluster
            plan = replace(plan, blocks=max(plan.blocks, min(places, wanted)))
            if plan.token_tiles > MOST_NORM_TILES:
                raise ShapeError(f"a fused norm takes at most {MOST_NORM_TILES} tiles of rows, got {plan.token_tiles}")
        return WgmmaProduct(m, weights.outputs, weights.cols, self._kernel(variant), variant, plan)

    def plan(self, kind: str, m: int, rows: int, cols: int) -> Plan | FewPlan:
        """The cut of M tokens with `rows` packed rows of `cols` (`wgmma` tier)."""
        return self._few_plan(kind, m, rows, cols) or self._tiles(kind, m, rows, cols)

    def _few_plan(self, kind: str, m: int, rows: int, cols: int, room: int | None = None) -> FewPlan | None:
        """The cut of a product of few rows that has a kernel of its own; None where it has none, or that is slower."""
        if self.invariant or cols < _FEW_COLUMNS.get(kind, 0) or few_gemm_plan.why_not(kind, m, cols) is not None:
            return None
        shape = rows, cols, self.multiprocessors
        plan, tiles = few_plan(kind, m, *shape), self._tiles(kind, m, rows, cols)
        if room is not None and plan.workspace > room:
            plan = few_plan(kind, m, *shape, parts=1)
        if room is not None and plan_workspace(kind, tiles) > room:
            tiles = self._tiles(kind, m, rows, cols, whole=True)
        return plan if plan.nanoseconds <= tiles.nanoseconds else None

    def _tiles(
        self, kind: str, m: int, rows: int, cols: int, behind: Behind | None = None, whole: bool = False, **forced: Any
    ) -> Plan:
        """The cut into tiles; two tiles of 16 tokens are slower than one of 32 whatever their estimates."""
        if not any(forced.values()) and _TILE_OF_FEW // 2 < m <= _TILE_OF_FEW:
            forced["tokens"] = _TILE_OF_FEW
        how: dict[str, Any] = {"whole": self.invariant or whole, "behind": behind, **forced}
        return make_plan(m, rows, cols, FRAGMENT_KINDS[kind], self.multiprocessors, **how)

    def workspace(self, kind: str, rows: int, cols: int, m: int, second: str = "", second_rows: int = 0) -> int:
        """Bytes of workspace that the product of M tokens with `rows` packed rows of `cols` wants, if there is room.

        The last `second_rows` are of the kind `second`, where there is one.
        """
        if self.tier == "mma":
            return 0
        few = None if second else self._few_plan(kind, m, rows, cols)
        if few is not None:
            return few.workspace
        return plan_workspace(kind, self._tiles(kind, m, rows, cols, _behind(second, second_rows)))

    def half_rows(self, x: int, m: int, cols: int, out: HalfRows) -> Launch:
        """The launch that turns float32 [M, cols] at `x` into operands."""
        if cols % 32:
            raise ShapeError(f"operands have a multiple of 32 columns, got {cols}")
        return self._kernel(None).bind(m, x, out.half, out.scale, out.norm, cols)

    def _kernel(self, variant: WgmmaGemm | FewGemm | MmaGemm | None) -> LoadedKernel:
        """The loaded kernel of a variant; None is the conversion of rows."""
        shelf = self._shelf
        source = source_of(variant, overlap=shelf.overlap)
        if variant is None:
            return shelf.kernel(source, half_rows.ARGUMENTS, overlap=shelf.overlap)
        if isinstance(variant, MmaGemm):
            return shelf.kernel(source, gemm_mma.ARGUMENTS, variant.shared)
        if isinstance(variant, FewGemm):
            return shelf.kernel(source, few_gemm_variant.ARGUMENTS, variant.shared, overlap=True)
        return shelf.kernel(source, gemm_variant.ARGUMENTS, variant.shared, cluster=variant.cluster, overlap=True)

    def settle(self) -> None:
        """Load the kernels that were asked for so far; what the compiler or the driver raises."""
        self._shelf.settle()

    def close(self) -> None:
        """Unload the kernels; their launches must not run any more."""
        self._shelf.close()


def why_not_mixed(rows: int, cols: int, second_cols: int) -> str | None:
    """The reason why matrices of `rows` x `cols` and others of another kind cannot be one product's, or None."""
    if cols != second_cols:
        return f"matrices of one product have one width: {cols} against {second_cols}"
    if rows % SLAB:
        return f"rows of the first kind must fill slabs of {SLAB}, got {rows}"
    return None


def _behind(kind: str, rows: int) -> Behind | None:
    return Behind(FRAGMENT_KINDS[kind], rows) if kind else None


def why_no_norm(tier: str, cols: int) -> str | None:
    """The reason why a product of this tier and width cannot norm its rows itself, or None."""
    if tier != "wgmma":
        return f"products of the tier {tier} do not norm their rows: normalize first"
    if cols > MOST_NORM_COLUMNS:
        return f"a fused norm takes rows of at most {MOST_NORM_COLUMNS} columns, got {cols}: normalize first"
    return None


def plan_workspace(kind: str, plan: Plan) -> int:
    """Bytes of workspace that a plan takes: flags, and the sums of each cluster where tiles are split."""
    variant = WgmmaGemm(kind, plan.tokens, cluster=plan.cluster, groups=plan.groups)
    return variant.workspace(plan.workers) if plan.split_tiles else 0


def source_of(variant: WgmmaGemm | FewGemm | MmaGemm | None, *, overlap: bool) -> Source:
    """What to compile for a variant; None is the conversion of rows."""
    if variant is None:
        return half_rows.source(overlap)
    if isinstance(variant, MmaGemm):
        return Source(f"gemm_mma {variant!r}", functools.partial(gemm_mma.build, variant), gemm_mma.THREADS, 2)
    if isinstance(variant, FewGemm):
        build = functools.partial(few_gemm.build, variant)
        return Source(f"few_gemm {variant!r}", build, variant.threads, variant.resident)
    build = functools.partial((gemm_norm if variant.norm else gemm_wgmma).build, variant)
    return Source(f"gemm_wgmma {variant!r}", build, variant.threads, variant.resident)


@dataclass(frozen=True, slots=True)
class WgmmaProduct(Product):
    variant: WgmmaGemm
    plan: Plan

    @property
    def workspace(self) -> int:
        """Bytes of the workspace: flags, and the sums of each cluster where tiles are split."""
        return self.variant.workspace(self.plan.workers if self.plan.split_tiles else 0)

    def maps(self, x: HalfRows, out: int, pitch: int | None = None) -> bytes:
        """Tensor maps of the operands and the result.

        `pitch`: bytes from row to row, a multiple of 16 (None: dense).
        """
        epilogue, plan = self.variant.epilogue, self.plan
        pitch = self._pitch(pitch, epilogue.item)
        tokens = tensor_map(x.half, self.m, self.cols, self.cols * 2, plan.tokens // plan.cluster, 64, 2, 128)
        box = (epilogue.chunk_tokens(plan.tokens), epilogue.box_columns)
        return tokens + tensor_map(out, self.m, self.outputs, pitch, *box, epilogue.item, epilogue.swizzle)

    def bind(
        self,
        weights: DeviceWeights | MixedWeights,
        x: HalfRows,
        out: int,
        pitch: int | None = None,
        *,
        maps: int,
        workspace: int,
        add: bool = False,
        out_scale: int = 0,
        norm: NormRows | None = None,
        tickets: int = 0,
    ) -> Launch:
        """A launch with these buffers; `x`, `out` and `pitch` as they were given to `maps()`.

        add: add to the result (plain float32). out_scale: float32, the powers of two of an f16 result. norm: the rows
        from which a product with a norm makes `x`. tickets: four bytes of zeros that no kernels touch but products with
        a norm, of this stream; needed where others use the workspace too.
        """
        plan = self.plan
        if (norm is not None) != bool(self.variant.norm):
            raise ShapeError(f"the product {'norms its rows' if self.variant.norm else 'takes operands'}, got {norm!r}")
        kinds = tuple(kind.name for kind in self.variant.kinds)
        self._check(kinds, self.variant.epilogue, weights, add, out_scale)
        first, behind = (weights.first, weights.second.data) if isinstance(weights, MixedWeights) else (weights, 0)
        addresses = (first.data, behind, first.row_scale, x.scale, first.bias, x.norm, out_scale, workspace)
        tiles = (plan.token_tiles, plan.slabs, first.slabs, plan.steps)
        shape = (self.m, *tiles, plan.swath, plan.split_tiles, plan.workers)
        rows: tuple[float, ...] = (0,) * 8 + (0.0,)
        if norm is not None:
            turns = gemm_norm.turns_of(self.m, plan.tokens, plan.blocks * plan.groups)
            tickets = tickets or workspace + TICKETS_AT
            rows = (norm.hidden, norm.weight, x.half, tickets, self.cols, *turns, norm.eps)
        tensors = maps, maps + MAP_BYTES
        return self.kernel.bind(plan.blocks, *tensors, *addresses, *weights.bounds(), *shape, int(add), *rows)


@dataclass(frozen=True, slots=True)
class MmaProduct(Product):
    variant: MmaGemm

    @property
    def workspace(self) -> int:
        """Bytes of the workspace: none."""
        return 0

    def maps(self, x: HalfRows, out: int, pitch: int | None = None) -> bytes:
        """Nothing: this tier reads and writes through plain addresses."""
        return b""

    def bind(
        self,
        weights: DeviceWeights,
        x: HalfRows,
        out: int,
        pitch: int | None = None,
        *,
        maps: int = 0,
        workspace: int = 0,
        add: bool = False,
        out_scale: int = 0,
    ) -> Launch:
        """As WgmmaProduct.bind; `maps` and `workspace` are not used."""
        epilogue = self.variant.epilogue
        self._check((self.variant.kind,), epilogue, weights, add, out_scale)
        token_tiles = -(-self.m // self.variant.tokens)
        addresses = (x.half, out, weights.data, weights.row_scale, x.scale, weights.bias, x.norm, out_scale)
        shape = (self.m, self.outputs, self._pitch(pitch, epilogue.item), self.cols, weights.slabs, token_tiles)
        blocks = token_tiles * -(-weights.slabs // 2)
        return self.kernel.bind(blocks, *addresses, *weights.bounds(), *shape, int(add))
