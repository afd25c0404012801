"""Rows of a packed embedding, from the kernel's own PTX over NumPy arrays, without a GPU: every kind, both halves."""

from __future__ import annotations

import re

import numpy as np
import pytest

from frink_numba.kernels.cubins import Target
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS
from frink_numba.kernels.gemm_pack import pack
from frink_numba.kernels.sample_kernels import EMBED_ARGUMENTS, EMBED_THREADS, embed_source
from tests.kernels.attention_machine import MachineDevice, linked_ptx
from tests.kernels.compiling import missing_tools
from tests.kernels.gemm_device import dequantized
from tests.kernels.packed_weights import random_matrix
from tests.kernels.ptx_machine import Program
from tests.kernels.thin_machine import ThinMachine

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


@pytest.mark.parametrize("kind", [kind for kind in FRAGMENT_KINDS if kind != "half"])
def test_rows_are_those_of_the_file(kind: str) -> None:
    """Scaled weights of chosen rows, of both halves of a fragment: each product is rounded to float32, not to f16."""
    rng = np.random.default_rng(3)
    matrix = random_matrix(kind, 70, 256, rng)
    packed, ids = pack([matrix]), np.array([0, 9, 69, 7, 15, 64], np.int32)
    device = MachineDevice()
    places = {
        "ids": device.place(ids),
        "weights": device.place(packed.data),
        "row_scale": device.place(packed.row_scale),
    }
    hidden = device.place(np.full((len(ids), 256), np.nan, np.float32))
    values = {**places, "hidden": hidden, "scale": 3.0, "rows": packed.rows, "cols": packed.cols}
    text = linked_ptx(embed_source(kind, False), Target("80"))
    program = Program.parse(re.sub(r"\.reg (\.b16) l, h;", r".reg \1 l;\n.reg \1 h;", text))  # one a line
    arguments = tuple(values[name] for name, _ in EMBED_ARGUMENTS)
    kinds = [kind for _, kind in EMBED_ARGUMENTS]
    machine = ThinMachine(program, device.memory, EMBED_THREADS, len(ids), arguments, kinds, 0)
    for block in range(len(ids)):
        machine.run(block)
    want = 3.0 * dequantized([matrix])[ids]
    got = device.read(hidden)
    # Scales are f16 times a power of two, as in the pack: exact but for a super-block's, which are rounded once.
    assert (np.abs(got - want) <= 1.1e-3 * np.abs(want).max(axis=1, keepdims=True)).all()
    if matrix.kind.block == 32:
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6 * float(np.abs(want).max()))
