"""Quantized matrix products on tensor cores: the one interface over the `wgmma` and `mma` tiers.

    y[M, N] = epilogue(x[M, K] W[N, K]^T)

In order of use, all addresses being integers (device memory of the caller, in the caller's current context):

    packed = pack([q, k, v])                              # gemm_pack: host, once per matrix
    gemms = Gemms("wgmma", (9, 0), multiprocessors=132)   # per device
    weights = DeviceWeights.of(packed, data, row_scale)   # where packed.data and packed.row_scale were uploaded
    product = gemms.product(weights, m)                   # picks the tiles, compiles or loads the kernel
    maps = product.maps(x, out, out_pitch)                # 256 bytes, to be uploaded to a 128-byte aligned address
    launch = product.bind(weights, x, maps_address, workspace)
    gemms.half_rows(x_float32, m, k, x)(stream)           # float32 rows to f16 operands
    launch(stream)                                        # 3 us of host time; graphs capture it

Maps depend on the buffers and on M, not on the weights: layers of equal shape share them. The workspace is one per stream,
`product.workspace` bytes or more, zeroed once; launches leave its flags at zero. `x`'s arrays and `out_scale` must be long
enough for M rounded up to 256 rows (the maps clip the rest).
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass

from frink_numba.errors import BackendUnavailable, ShapeError
from frink_numba.kernels import gemm_wgmma, half_rows
from frink_numba.kernels.compile import Source, Target
from frink_numba.kernels.compile import load as load_cubin
from frink_numba.kernels.gemm_epilogue import GATES, Epilogue
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS, fragment_kind
from frink_numba.kernels.gemm_pack import PackedMatrix
from frink_numba.kernels.gemm_plan import Plan, make_plan
from frink_numba.kernels.gemm_wgmma import WgmmaGemm
from frink_numba.kernels.launch import Launch, LoadedKernel
from frink_numba.kernels.tma import tensor_map
from frink_numba.quant import QuantKind

MAPS_BYTES = 256  # the tokens' map, then the result's
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
    """A PackedMatrix on the device. `bias`: float32 [rows filled up to 64], or 0; `bias_bound`: its largest magnitude."""

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
        return cls(
            packed.kind.name,
            packed.rows,
            packed.cols,
            packed.gated,
            packed.norm_bounds,
            data,
            row_scale,
            bias,
            bias_bound,
        )

    @property
    def outputs(self) -> int:
        return self.rows // 2 if self.gated else self.rows


@dataclass(frozen=True, slots=True)
class HalfRows:
    """f16 operands on the device: half [M, K] at a multiple of 16; scale and norm float32 [M rounded up to 256]."""

    half: int
    scale: int
    norm: int


class Gemms:
    """The tensor-core products of one device: plans, and kernels loaded once each. Thread-safe."""

    def __init__(self, tier: str, capability: tuple[int, int], multiprocessors: int) -> None:
        if tier != "wgmma" or capability[0] != 9:
            raise BackendUnavailable(f"no tensor-core kernels of the tier {tier} for compute capability {capability}")
        self.tier, self.multiprocessors = tier, multiprocessors
        self.target = Target("90a")
        self._kernels: dict[WgmmaGemm, LoadedKernel] = {}
        self._half_rows: LoadedKernel | None = None
        self._lock = threading.Lock()

    def product(
        self,
        weights: DeviceWeights,
        m: int,
        *,
        gate: str = "",
        half: bool = False,
        tokens: int | None = None,
        cluster: int | None = None,
    ) -> Product:
        """The product of M tokens with such weights. `gate` as in Epilogue, `half` for an f16 result.

        `tokens` and `cluster` force the tile (benchmarks and tests).
        """
        if m < 1:
            raise ShapeError(f"a product needs at least one token, got {m}")
        if gate not in GATES or bool(gate) != weights.gated:
            raise ShapeError(f"the pack is {'' if weights.gated else 'not '}gated, the gate asked for is {gate!r}")
        step_bytes = FRAGMENT_KINDS[weights.kind].step_size
        plan = make_plan(m, weights.rows, weights.cols, step_bytes, self.multiprocessors, tokens, cluster)
        variant = WgmmaGemm(weights.kind, plan.tokens, Epilogue(gate, half), plan.cluster)
        return Product(variant, plan, m, weights.outputs, weights.cols, self._kernel(variant))

    def half_rows(self, x: int, m: int, cols: int, out: HalfRows) -> Launch:
        """The launch that turns float32 [M, cols] at `x` into operands."""
        if cols % 32:
            raise ShapeError(f"operands have a multiple of 32 columns, got {cols}")
        with self._lock:
            if self._half_rows is None:
                types = [kind for _, kind in half_rows.ARGUMENTS]
                cubin = load_cubin(half_rows.SOURCE, self.target)
                self._half_rows = LoadedKernel(cubin, types, half_rows.THREADS, 0, overlap=True)
        return self._half_rows.bind(m, x, out.half, out.scale, out.norm, cols)

    def _kernel(self, variant: WgmmaGemm) -> LoadedKernel:
        with self._lock:
            kernel = self._kernels.get(variant)
            if kernel is None:
                cubin = load_cubin(wgmma_source(variant), self.target)
                types = [kind for _, kind in gemm_wgmma.ARGUMENTS]
                kernel = LoadedKernel(
                    cubin, types, gemm_wgmma.THREADS, variant.shared, cluster=variant.cluster, overlap=True
                )
                self._kernels[variant] = kernel
            return kernel

    def close(self) -> None:
        """Unload the kernels; their launches must not run any more."""
        with self._lock:
            kernels = [*self._kernels.values(), *([self._half_rows] if self._half_rows else [])]
            self._kernels.clear()
            self._half_rows = None
        for kernel in kernels:
            kernel.close()


def wgmma_source(variant: WgmmaGemm) -> Source:
    """What to compile for a variant."""
    return Source(
        f"gemm_wgmma {variant!r}", functools.partial(gemm_wgmma.build, variant), gemm_wgmma.THREADS, variant.resident
    )


@dataclass(frozen=True, slots=True)
class Product:
    """One product's kernel and plan: y[m, outputs] from x[m, cols]."""

    variant: WgmmaGemm
    plan: Plan
    m: int
    outputs: int
    cols: int
    kernel: LoadedKernel

    @property
    def workspace(self) -> int:
        """Bytes of the workspace: flags, and the sums of each block where tiles are split."""
        return self.variant.workspace(self.plan.blocks // self.plan.cluster if self.plan.split_tiles else 0)

    def maps(self, x: HalfRows, out: int, out_pitch: int | None = None) -> bytes:
        """Both tensor maps. `out_pitch`: bytes from row to row of the result, a multiple of 16 (None: dense)."""
        epilogue = self.variant.epilogue
        pitch = self.outputs * epilogue.item if out_pitch is None else out_pitch
        if pitch < self.outputs * epilogue.item:
            raise ShapeError(f"rows of {self.outputs} results do not fit a pitch of {pitch} bytes")
        tokens = tensor_map(x.half, self.m, self.cols, self.cols * 2, self.plan.tokens // self.plan.cluster, 64, 2, 128)
        box_rows = epilogue.chunk_tokens(self.plan.tokens)
        result = tensor_map(
            out, self.m, self.outputs, pitch, box_rows, epilogue.box_columns, epilogue.item, epilogue.swizzle
        )
        return tokens + result

    def bind(
        self,
        weights: DeviceWeights,
        x: HalfRows,
        maps: int,
        workspace: int,
        *,
        add: bool = False,
        out_scale: int = 0,
    ) -> Launch:
        """A launch with these buffers. `maps`: where `maps()` was uploaded. `add`: add to the result (plain float32).

        `out_scale`: float32 [M rounded up to 256], the powers of two of an f16 result.
        """
        epilogue, plan = self.variant.epilogue, self.plan
        if (weights.kind, weights.outputs, weights.cols) != (self.variant.kind, self.outputs, self.cols):
            raise ShapeError(
                f"the product is for {self.variant.kind} {self.outputs} x {self.cols}, "
                f"the weights are {weights.kind} {weights.outputs} x {weights.cols}"
            )
        if add and (epilogue.half or epilogue.gate):
            raise ShapeError("only a plain float32 result can be added to")
        if epilogue.half and not out_scale:
            raise ShapeError("an f16 result needs out_scale")
        if epilogue.gate:
            bounds = (_BOUND_MARGIN * weights.norm_bounds[0] * weights.norm_bounds[1], 0.0, 0.0)
        else:
            bounds = (0.0, _BOUND_MARGIN * max(weights.norm_bounds), weights.bias_bound)
        return self.kernel.bind(
            plan.blocks,
            maps,
            maps + 128,
            weights.data,
            weights.row_scale,
            x.scale,
            weights.bias,
            x.norm,
            out_scale,
            workspace,
            *bounds,
            plan.token_tiles,
            plan.slabs,
            plan.steps,
            plan.swath,
            plan.split_tiles,
            int(add),
        )
