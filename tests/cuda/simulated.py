"""Run by test_simulator.py in a process of its own: two-layer stacks through the real kernels, in numba's simulator.

Prints one JSON line a case: the relative errors against the float64 truth.
"""

from __future__ import annotations

import json

import numpy as np

from frink_numba.backend import Serve
from frink_numba.cuda import create, launch_prefill_dense_stack, load_layers
from frink_numba.cuda.runtime import simulated
from frink_numba.layer import Layer, RopeLayout
from tests import reference
from tests.cuda.quantized_layers import quantized_layer
from tests.cuda.steps import make_step
from tests.random_layers import LayerOptions

NORM, NEOX = RopeLayout.NORM, RopeLayout.NEOX

SMALL = {"hidden": 20, "heads": 2, "kv_heads": 1, "head_dim": 12, "ffn": 28}

# (name, batch, start_pos, kinds, the two layers)
CASES = (
    (
        "bias, head norms, window; partial NEOX, factors, soft cap, post-norms",
        5,
        3,
        ("F32",),
        (
            LayerOptions(**SMALL, layout=NORM, bias=True, qk_norm="head", window=5),
            LayerOptions(
                **SMALL,
                layout=NEOX,
                partial=True,
                factors=True,
                magnitude=1.1386,
                softcap=3.0,
                post_norms=True,
                qk_norm="whole",
            ),
        ),
    ),
    (
        "quantized, one K/V head, not rotated; two K/V heads of another width",
        4,
        1,
        ("Q4_0", "Q5_1", "Q8_0", "Q4_1", "Q5_0", "IQ4_NL", "F16"),
        (
            LayerOptions(hidden=32, heads=1, kv_heads=1, head_dim=32, ffn=32, layout=None, bias=True),
            LayerOptions(hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=32, layout=NEOX, theta=500.0),
        ),
    ),
)


def errors(layers: list[Layer], hidden: np.ndarray, prefixes, got: np.ndarray, rows) -> list[float]:
    x, found = hidden.astype(np.float64), []
    for layer, (keys, values), (k, v) in zip(layers, prefixes, rows, strict=True):
        x, want_k, want_v = reference.layer(layer, x, keys, values)
        found += [reference.relative_error(k, want_k), reference.relative_error(v, want_v)]
    return [*found, reference.relative_error(got, x)]


def main() -> None:
    assert simulated()
    for number, (name, batch, start_pos, kinds, options) in enumerate(CASES):
        rng = np.random.default_rng(number)
        layers = [quantized_layer(rng, chosen, kinds) for chosen in options]
        step = make_step(layers, batch, start_pos)
        assert step.hidden is not None
        prefixes = [cache.prefix() for cache in step.caches]
        backend = create(layers)
        answers = [backend.can_serve(l, step) for l in range(2)]  # noqa: E741
        assert answers == [Serve("CUDA simulator, simt tier")] * 2, answers
        run = backend.run(0, 2, step)
        assert run is not None
        stats = backend.stats
        backend.close()
        line = {
            "case": name,
            "errors": errors(layers, step.hidden, prefixes, run.hidden, run.kv_rows),
            "bytes": [stats.hidden_up, stats.hidden_down, stats.kv_down, stats.prefix_up],
            "want_bytes": [
                step.hidden.nbytes,
                step.hidden.nbytes,
                sum(part.nbytes for pair in run.kv_rows for part in pair),
                sum(part.nbytes for pair in prefixes for part in pair),
            ],
            "waits": stats.synchronizations,
        }
        print(json.dumps(line), flush=True)
    # A single layer of the last stack through the public function: the same bits as in the stack.
    with load_layers(layers[:1]) as resident:
        _, rows = launch_prefill_dense_stack(step.hidden, resident, prefix=prefixes[:1])
    same = all(np.array_equal(a, b) for a, b in zip(rows[0], run.kv_rows[0], strict=True))
    print(json.dumps({"case": "single layer equals the stack bitwise", "same": same}), flush=True)


if __name__ == "__main__":
    main()
