"""Whole layers on a GPU against the float64 truth, over a pairwise cover of what the stack serves."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from frink_numba.backend import Decline, Serve
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.classify import decline_reason
from frink_numba.cuda.shapes import check_layer
from frink_numba.host.backend import HostBackend
from tests import reference
from tests.differential.gpu import TIERS, bound_of, device_of, run_twice, step_over, take
from tests.differential.layer_cases import AT_LEAST, CHOICES, Case, cases, make_inputs, make_layer


def check(case: Case, layer, hidden, keys, values, answer, bound: float = 1e-5) -> None:
    got, k, v = answer
    want, want_k, want_v = reference.layer(layer, hidden, keys, values)
    assert reference.relative_error(got, want) < bound, case
    assert reference.relative_error(k, want_k) < bound, case
    assert reference.relative_error(v, want_v) < bound, case


# With `-n N --dist loadgroup` the kinds are dealt to the processes, so that each compiles few kernels.
@pytest.mark.gpu
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.xdist_group(case.kind), id=str(case)) for case in cases()]
)
def test_a_layer_on_the_gpu_equals_the_truth(case: Case, tier: str):
    """R14, R17 to R19, R24: under the tier's bound, K/V rows too; two runs over poisoned memory are bitwise equal."""
    device = device_of(tier)
    layer = make_layer(case)
    hidden, keys, values = make_inputs(case)
    step = step_over([layer], hidden, [(keys, values)])
    backend = CudaBackend([layer], device)
    answered = backend.can_serve(0, step)
    if tier != "simt" and case.options.heads * case.options.head_dim % 32:
        assert answered == Decline(
            f"the o projection: the tensor-core kernels need a width that is a multiple of 32, "
            f"not {case.options.heads * case.options.head_dim}"
        )
        return
    assert isinstance(answered, Serve)
    answer = run_twice(backend, step)
    backend.close()
    check(case, layer, hidden, keys, values, answer, bound_of(tier))


@pytest.mark.parametrize("case", cases()[::40], ids=str)
def test_the_host_agrees_with_the_truth_on_the_same_layers(case: Case):
    """The cases are sound: what the device is held to, the host reaches too (R24)."""
    layer = make_layer(case)
    hidden, keys, values = make_inputs(case)
    step = step_over([layer], hidden, [(keys.astype(np.float32), values.astype(np.float32))])
    check(case, layer, hidden, keys, values, take(HostBackend([layer]).run(0, 1, step)))


def test_the_cover_is_what_it_claims():
    """At least 200 layers; every two choices of any two options meet, in covers of three orders."""
    assert len(cases()) >= AT_LEAST
    kinds = Counter(case.kind for case in cases())
    assert set(kinds) == set(CHOICES["kind"])
    seen = {
        (case.kind, case.options.head_dim, case.start_pos, case.batch, case.options.heads, case.options.qk_norm)
        for case in cases()
    }
    for a, b in combinations(range(6), 2):
        met = {(entry[a], entry[b]) for entry in seen}
        sizes = [len({entry[i] for entry in seen}) for i in (a, b)]
        if {a, b} != {4, 5} and 4 not in (a, b):  # heads: 3, 4 or 6, by the K/V heads beside them
            assert len(met) == sizes[0] * sizes[1]


@pytest.mark.parametrize("case", cases()[::16], ids=str)
def test_every_case_is_served(case: Case):
    """A case that is declined would test nothing."""
    layer = make_layer(case)
    assert decline_reason(layer) is None
    check_layer(layer)
