"""Load compiled kernels and launch them with prebuilt parameters: about 3 us of host time, and capturable in a graph.

A kernel that is not on disk yet is compiled beside others (compile_apart.py) and loaded when a launch needs it, or by
`KernelShelf.settle`.

The calling thread's current CUDA context is used. Driver errors become DeviceError.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Hashable, Sequence
from typing import Any

from frink_numba.errors import BackendUnavailable, DeviceError
from frink_numba.kernels.compile_apart import QUEUE, Pending
from frink_numba.kernels.cubins import Cubin, Source, Target
from frink_numba.kernels.cubins import find as find_cubin

_ALL_SHARED = 100  # per cent of what can be shared memory
_C_TYPES: dict[str, Any] = {"u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "f32": ctypes.c_float}


def check(answer: Any, what: str) -> Any:
    """What a driver call gives beside its status; DeviceError when the status is not success."""
    status, *rest = answer
    if int(status) != 0:
        raise DeviceError(f"{what} failed: {status.name} ({int(status)})")
    return rest[0] if len(rest) == 1 else rest


class KernelShelf:
    """The kernels of one device that one object launches, compiled or read from disk, and loaded, once each.

    Those that have to be compiled are, side by side, while more of them are asked for; `settle` waits for all.

    tier: "wgmma" or "mma", None for the better one that there is. Thread-safe. BackendUnavailable where the device
    lacks the tier, or tensor cores altogether. `overlap`: whether launches may start before their predecessors end.
    """

    def __init__(self, capability: tuple[int, int], tier: str | None = None) -> None:
        own = capability == (9, 0)
        if tier is None:
            tier = "wgmma" if own else "mma"
        if tier == "wgmma" and own:
            self.target = Target("90a")
        elif tier == "mma" and capability >= (8, 0):
            self.target = Target(f"{capability[0]}{capability[1]}")
        else:
            raise BackendUnavailable(
                f"no tensor-core kernels of the tier {tier} for compute capability {capability[0]}.{capability[1]}"
            )
        self.overlap = capability >= (9, 0)
        self._kernels: dict[Hashable, LoadedKernel] = {}
        self._lock = threading.Lock()

    def kernel(
        self,
        source: Source,
        arguments: Sequence[tuple[str, str]],
        shared: int = 0,
        *,
        cluster: int = 1,
        overlap: bool = False,
    ) -> LoadedKernel:
        """The kernel of a source with the parameters `arguments` (name, type); the others as LoadedKernel has them."""
        key = (source.name, source.threads, shared, cluster, overlap)
        with self._lock:
            kernel = self._kernels.get(key)
            if kernel is None:
                types = [kind for _, kind in arguments]
                cubin = find_cubin(source, self.target) or QUEUE.begin(source, self.target)
                kernel = LoadedKernel(cubin, types, source.threads, shared, cluster=cluster, overlap=overlap)
                self._kernels[key] = kernel
            return kernel

    def settle(self) -> None:
        """Load every kernel now; what the compiler or the driver raises. A kernel that fails is not kept."""
        with self._lock:
            kernels = dict(self._kernels)
        for key, kernel in kernels.items():
            try:
                kernel.load()
            except Exception:
                with self._lock:
                    self._kernels.pop(key, None)
                raise

    def close(self) -> None:
        """Unload the kernels; their launches must not run any more."""
        with self._lock:
            kernels = list(self._kernels.values())
            self._kernels.clear()
        for kernel in kernels:
            kernel.close()


class LoadedKernel:
    """A kernel in the current context. `arguments` are its parameter types in order ("u64", "u32", "f32").

    `shared`: bytes of dynamic shared memory; `cluster`: blocks that run together, sharing their shared memory (sm_90).
    `overlap`: the kernel waits for its predecessors itself, and may start before they end (sm_90).
    """

    def __init__(
        self,
        cubin: Cubin | Pending,
        arguments: Sequence[str],
        threads: int,
        shared: int,
        *,
        cluster: int = 1,
        overlap: bool = False,
    ) -> None:
        self.arguments = tuple(arguments)
        self.threads, self.shared, self.cluster, self.overlap = threads, shared, cluster, overlap
        self.function: Any = None  # until it is loaded
        self._cubin: Cubin | Pending | None = cubin  # until then
        self._module: Any = None
        self._lock = threading.Lock()
        if isinstance(cubin, Cubin):
            self.load()

    def load(self) -> Any:
        """The function in the current context; DeviceError once it was unloaded."""
        from cuda.bindings import driver

        with self._lock:
            if self.function is not None:
                return self.function
            if self._cubin is None:
                raise DeviceError("a kernel that was unloaded cannot be launched")
            cubin = self._cubin if isinstance(self._cubin, Cubin) else self._cubin.cubin()
            module = check(driver.cuModuleLoadData(cubin.code), f"loading {cubin.entry[:60]}")
            function = check(driver.cuModuleGetFunction(module, cubin.entry.encode()), "finding the kernel")
            attributes = driver.CUfunction_attribute
            if self.shared > 48 * 1024:
                self._set(function, attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, self.shared)
            if self.overlap:
                # A multiprocessor divides its memory into cache and shared memory anew only when it is empty. A launch
                # that wants little would keep the next one, which wants much, from starting beside it.
                self._set(function, attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, _ALL_SHARED)
            self._module, self.function, self._cubin = module, function, None
            return function

    @staticmethod
    def _set(function: Any, attribute: Any, value: int) -> None:
        from cuda.bindings import driver

        check(driver.cuFuncSetAttribute(function, attribute, value), f"setting {attribute.name} to {value}")

    def bind(self, blocks: int, *values: float) -> Launch:
        """A launch of `blocks` blocks with these argument values."""
        return Launch(self, blocks, values)

    def _attributes(self) -> list[Any]:
        from cuda.bindings import driver

        kinds, attributes = driver.CUlaunchAttributeID, []
        if self.cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x = self.cluster
            attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
            attributes.append(attribute)
        if self.overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        return attributes

    def close(self) -> None:
        """Unload the code; launches made from it must not run any more."""
        from cuda.bindings import driver

        with self._lock:
            module, cubin = self._module, self._cubin
            self._module = self.function = self._cubin = None
        if isinstance(cubin, Pending):
            cubin.withdraw()
        if module is not None:
            check(driver.cuModuleUnload(module), "unloading a kernel")


class Launch:
    """A kernel with its grid and arguments:

    `launch(stream)`, as often as wanted. Arguments can be set between calls.
    """

    def __init__(self, kernel: LoadedKernel, blocks: int, values: Sequence[float]) -> None:
        from cuda.bindings import driver

        if len(values) != len(kernel.arguments):
            raise TypeError(f"the kernel takes {len(kernel.arguments)} arguments, got {len(values)}")
        if blocks % kernel.cluster:
            raise ValueError(f"{blocks} blocks do not form clusters of {kernel.cluster}")
        self._kernel = kernel  # keeps the module alive
        self._launch = driver.cuLaunchKernelEx
        self._values = [_C_TYPES[kind](value) for kind, value in zip(kernel.arguments, values, strict=True)]
        self._pointers = (ctypes.c_void_p * len(self._values))(*(ctypes.addressof(v) for v in self._values))
        self._address = ctypes.addressof(self._pointers)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
        config.sharedMemBytes = kernel.shared
        config.attrs = attributes = kernel._attributes()
        config.numAttrs = len(attributes)
        self._config = config
        self._stream: int | None = None

    def set(self, index: int, value: float) -> None:
        """Change argument `index` for the launches to come."""
        self._values[index].value = value

    def __call__(self, stream: int) -> None:
        if stream != self._stream:
            self._config.hStream = self._stream = stream
        function = self._kernel.function
        if function is None:
            function = self._kernel.load()
        (status,) = self._launch(self._config, function, self._address, 0)
        if status:
            raise DeviceError(f"a kernel launch failed: {status.name} ({int(status)})")
