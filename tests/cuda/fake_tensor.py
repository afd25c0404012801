"""The tensor-core kernels in NumPy: on a fake device's addresses, from the very arguments that the launches bind.

Plans, variants, workspaces and argument lists are the package's own; only compiling, launching and the tensor maps are
replaced. Each kernel asserts what it may rely on (counters at zero, maps that fit the sequence table, finite f16) and
leaves behind what a real one leaves: garbage in the workspace beyond its counters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from frink_numba import driver
from frink_numba.cuda.device import CudaDevice
from frink_numba.cuda.tensor.body import TensorBody
from frink_numba.cuda.tensor.kernels import TensorKernels
from frink_numba.kernels import (
    decode_attention_variant,
    few_gemm_variant,
    fused_attention_mma,
    fused_attention_wgmma,
    gemm_mma,
    gemm_variant,
    half_rows,
    qkv_prepare,
    thin_gemm_kernel,
)
from frink_numba.kernels.decode_attention import DecodeAttentions
from frink_numba.kernels.few_gemm_product import FewProduct
from frink_numba.kernels.few_gemm_variant import FewGemm
from frink_numba.kernels.fused_attention import Attention, Attentions, Mirror
from frink_numba.kernels.fused_attention_plan import MmaLayout
from frink_numba.kernels.gemm import DeviceWeights, Gemms, WgmmaProduct
from frink_numba.kernels.gemm_mma import MmaGemm
from frink_numba.kernels.qkv_prepare import QkvPrepare
from frink_numba.kernels.sample import Samplers
from frink_numba.kernels.scatter_bytes import COPY
from frink_numba.kernels.thin_gemm import ThinGemms
from frink_numba.kernels.tma import MAP_BYTES
from tests.cuda import fake_tensor_kernels as compute
from tests.cuda.fake_gpu import FakeRuntime

MULTIPROCESSORS = 4
CAPABILITIES = {"wgmma": (9, 0), "mma": (8, 6)}

Launch = Callable[[int], None]


class FakeKernel:
    """A kernel by name: `work(memory, variant, blocks, arguments)` when the stream comes to it."""

    def __init__(
        self, runtime: FakeRuntime, name: str, arguments: Sequence[tuple[str, str]], variant: Any, work: Callable
    ) -> None:
        self.runtime, self.name, self.variant, self.work = runtime, name, variant, work
        self.arguments = tuple(arguments)

    def bind(self, blocks: int, *values: float) -> Launch:
        assert blocks >= 1
        held = {name: _as_type(kind, value, name) for (name, kind), value in zip(self.arguments, values, strict=True)}
        given, runtime = SimpleNamespace(**held), self.runtime

        def work() -> None:
            with np.errstate(all="ignore"):  # rows of no sequence hold anything, and no kernel warns
                self.work(runtime.array, self.variant, blocks, given)

        def launch(handle: int) -> None:
            runtime.launch(handle, self.name, work)

        return launch


def _as_type(kind: str, value: float, name: str) -> float:
    if kind == "f32":
        return float(np.float32(value))
    assert 0 <= int(value) == value < 1 << (32 if kind == "u32" else 64), f"{name} is {value}"
    return int(value)


class FakeGemms(Gemms):
    def __init__(self, runtime: FakeRuntime, *device: Any, invariant: bool = False) -> None:
        super().__init__(*device, invariant=invariant)
        self._runtime = runtime

    def product(self, weights: DeviceWeights, m: int, **how: Any) -> Any:
        made = super().product(weights, m, **how)
        if isinstance(made, WgmmaProduct):
            return _MappedProduct(made.m, made.outputs, made.cols, made.kernel, made.variant, made.plan)
        if isinstance(made, FewProduct):
            return _MappedFewProduct(made.m, made.outputs, made.cols, made.kernel, made.variant, made.plan)
        return made

    def _kernel(self, variant: Any) -> Any:
        if variant is None:
            return FakeKernel(self._runtime, "half_rows", half_rows.ARGUMENTS, None, compute.half_rows)
        if isinstance(variant, MmaGemm):
            return FakeKernel(self._runtime, "gemm", gemm_mma.ARGUMENTS, variant, compute.gemm_mma)
        if isinstance(variant, FewGemm):
            return FakeKernel(self._runtime, "gemm", few_gemm_variant.ARGUMENTS, variant, compute.few_gemm)
        return FakeKernel(self._runtime, "gemm", gemm_variant.ARGUMENTS, variant, compute.gemm_wgmma)


def _maps(product: Any, x: Any, out: int, pitch: int | None) -> bytes:
    """Stand-ins for the tensor maps of a product's operands and its result."""
    pitch = product._pitch(pitch, product.variant.epilogue.item)
    assert x.half % 16 == out % 16 == pitch % 16 == 0, "the copy engine wants 16-byte aligned rows"
    return _map(x.half, product.m, product.cols, 2 * product.cols) + _map(out, product.m, product.outputs, pitch)


class _MappedProduct(WgmmaProduct):
    __slots__ = ()

    def maps(self, x: Any, out: int, pitch: int | None = None) -> bytes:
        return _maps(self, x, out, pitch)


class _MappedFewProduct(FewProduct):
    __slots__ = ()

    def maps(self, x: Any, out: int, pitch: int | None = None) -> bytes:
        return _maps(self, x, out, pitch)


class FakeAttentions(Attentions):
    def __init__(self, runtime: FakeRuntime, *device: Any) -> None:
        super().__init__(*device)
        self._runtime = runtime

    def attention(self, shape: Any, m: int, **how: Any) -> Any:
        made = super().attention(shape, m, **how)
        return _MappedAttention(made.shape, made.m, made.variant, made.kernel, made.multiprocessors)

    def _kernel(self, variant: Any) -> Any:
        if isinstance(variant, QkvPrepare):
            return FakeKernel(self._runtime, "qkv_prepare", qkv_prepare.ARGUMENTS, variant, compute.prepare)
        kernel = fused_attention_mma if isinstance(variant, MmaLayout) else fused_attention_wgmma
        return FakeKernel(self._runtime, "attention", kernel.ARGUMENTS, variant, compute.attention)


class _MappedAttention(Attention):
    __slots__ = ()

    def maps(self, mirrors: Sequence[Any]) -> bytes:
        if isinstance(self.variant, MmaLayout):
            return b""
        width = self.shape.n_kv_heads * self.shape.pitch
        pairs = [(mirror, address) for mirror in mirrors for address in (mirror.k, mirror.v)]
        assert not any(address % 16 for _, address in pairs)
        return b"".join(_map(address, mirror.capacity, width, 2 * width) for mirror, address in pairs)

    def maps_at(self, k: np.ndarray, v: np.ndarray, capacity: int) -> np.ndarray:
        mirrors = [Mirror(int(a), int(b), capacity) for a, b in zip(k, v, strict=True)]
        return np.frombuffer(self.maps(mirrors), np.uint64).reshape(len(k), 2, -1)


class FakeThins(ThinGemms):
    def __init__(self, runtime: FakeRuntime, *device: Any) -> None:
        super().__init__(*device)
        self._runtime = runtime

    def _kernel(self, variant: Any, shared: int, early: bool) -> Any:
        return FakeKernel(self._runtime, "thin_gemm", thin_gemm_kernel.ARGUMENTS, variant, compute.thin_gemm)


class FakeDecodes(DecodeAttentions):
    def __init__(self, runtime: FakeRuntime, *device: Any) -> None:
        super().__init__(*device)
        self._runtime = runtime
        self._made: dict[Any, FakeKernel] = {}

    def _kernel(self, variant: Any) -> Any:
        arguments = decode_attention_variant.ARGUMENTS
        made = FakeKernel(self._runtime, "decode_attention", arguments, variant, compute.decode_attention)
        return self._made.setdefault(variant, made)  # attentions are equal where their kernels are


class FakeSamplers(Samplers):
    def __init__(self, runtime: FakeRuntime, *device: Any) -> None:
        super().__init__(*device)
        self._runtime = runtime

    def embed(self, weights: DeviceWeights, ids: int, m: int, hidden: int, *, scale: float = 1.0) -> Any:
        runtime = self._runtime
        work = lambda: compute.embed(runtime.array, weights, ids, m, hidden, scale)  # noqa: E731
        return lambda handle: runtime.launch(handle, "embed", work)

    def _kernel(self, source: Any, arguments: Any) -> Any:
        return FakeKernel(self._runtime, source.name.split()[0], arguments, None, compute.argmax)


class FakeTensorKernels(TensorKernels):
    def __init__(self, runtime: FakeRuntime, tier: str, multiprocessors: int, invariant: bool = False) -> None:
        capability = CAPABILITIES[tier]
        super().__init__(tier, capability, multiprocessors, invariant=invariant)
        self._runtime = runtime
        self.gemms = FakeGemms(runtime, tier, capability, multiprocessors, invariant=invariant)
        self.thins = FakeThins(runtime, capability, multiprocessors)
        self.attentions = FakeAttentions(runtime, tier, capability, multiprocessors)
        self.decodes = FakeDecodes(runtime, capability, multiprocessors)
        self.samplers = FakeSamplers(runtime, capability)

    def scatter_bytes(self, blocks: int, table: int, count: int) -> Any:
        runtime = self._runtime

        def work() -> None:
            for record in runtime.array(table, (count,), COPY):
                nbytes = int(record["nbytes"])
                if nbytes:
                    source = runtime.array(int(record["source"]), (nbytes,))
                    runtime.down += nbytes
                    np.copyto(runtime.host(int(record["target"]), nbytes), source)

        return lambda handle: runtime.launch(handle, "scatter_bytes", work)

    def _kernel(self, source: Any, arguments: Any) -> Any:
        name, *rest = source.name.split()
        return FakeKernel(self._runtime, name, arguments, rest, getattr(compute, name))


def _map(address: int, rows: int, cols: int, pitch: int) -> bytes:
    return np.array([address, rows, cols, pitch], np.uint64).tobytes().ljust(MAP_BYTES, b"\xff")


def tensor_device(
    tier: str = "wgmma",
    memory_bytes: int = 1 << 34,
    schedule: str = "lazy",
    seed: int = 0,
    invariant: bool = False,
    block_rows: int | None = None,
) -> CudaDevice:
    """A device with tensor cores, as `open_device` would answer it."""
    runtime = FakeRuntime(memory_bytes, schedule, seed)
    info = driver.Device(0, "Fake GPU 0", memory_bytes, CAPABILITIES[tier], MULTIPROCESSORS)
    kernels = FakeTensorKernels(runtime, tier, MULTIPROCESSORS, invariant)
    return CudaDevice(info, runtime, TensorBody(runtime, kernels, block_rows=block_rows))
