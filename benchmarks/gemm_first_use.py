"""What the first use of a model's products costs: compilation, or reading from disk, and loading."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

from frink_numba.receipt import Row

# The products of a Llama 8B Q4_K_M prefill step of 512 tokens: (kind, rows, cols, gated, f16 result).
FIRST_USE = [
    ("Q4_K", 5120, 4096, False, False),
    ("Q6_K", 1024, 4096, False, False),
    ("Q4_K", 4096, 4096, False, False),
    ("Q4_K", 28672, 4096, True, True),
    ("Q4_K", 4096, 14336, False, False),
    ("Q6_K", 4096, 14336, False, False),
]

_FIRST_USE_CHILD = """
import sys, time
from cuda.bindings import driver
driver.cuInit(0)
device = driver.cuDeviceGet(0)[1]
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(device)[1])
start = time.perf_counter()
from frink_numba.kernels.gemm import DeviceWeights, Gemms, HalfRows
gemms = Gemms("wgmma", (9, 0), 132)
gemms.half_rows(0, 1, 32, HalfRows(0, 0, 0))
for kind, rows, cols, gated, half in {cases}:
    weights = DeviceWeights(kind, rows, cols, gated, (1.0, 1.0), 0, 0)
    gemms.product(weights, 512, gate="swiglu" if gated else "", half=half)
gemms.settle()
print(time.perf_counter() - start)
"""


def first_use() -> list[Row]:
    """Seconds until all products of a model are ready, in a fresh process: nothing cached, then all of it."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "FRINK_CACHE_DIR": folder}
        for state, runs in (("cold", 1), ("warm", 3)):
            samples = []
            for _ in range(runs):
                command = [sys.executable, "-c", _FIRST_USE_CHILD.replace("{cases}", repr(FIRST_USE))]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                samples.append(float(done.stdout))
            label = f"first use of 8b Q4_K_M pp512, {state} cache"
            rows.append(Row.from_samples(label, "s", samples, "cuda", tier="wgmma"))
            print(f"{label}: {statistics.median(samples):.2f} s", flush=True)
    return rows
