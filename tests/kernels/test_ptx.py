"""The layer over numba-cuda's extension API: declared instructions and emitted functions become the PTX they should."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from frink_numba.kernels.ptx import Emitter, Register, emitted, global_address, instruction, numba_type, shared_address

load = instruction("ld.global.u32 $0, [$1];", "u32", "u64")
store = instruction("st.global.u32 [$0], $1;", None, "u64", "u32")
add_half2 = instruction("add.rn.f16x2 $0, $1, $2;", "u32", "u32", "u32", pure=True)


@emitted("u32x2", "u32", "u32")
def swapped_if(e: Emitter, word: Register, flag: Register) -> list[Register]:
    with e.when(flag):
        e.asm("membar.cta;", None, [])
    high, low = word >> 16, word & 0xFFFF
    return [low | (high << 8), (low ^ high) + 3]


def _ptx(kernel: Any, *arguments: str) -> str:
    from numba import cuda, types

    signature = types.void(*(numba_type(a) for a in arguments))
    text, _ = cuda.compile(kernel, signature, cc=(8, 0), device=False, abi="numba", output="ptx")
    return str(text)


def test_instructions_appear_as_written() -> None:
    def kernel(source, target):  # type: ignore[no-untyped-def]
        word = load(source)
        pair = swapped_if(word, word)
        store(target, add_half2(pair[0], pair[1]))

    text = _ptx(kernel, "u64", "u64")
    for expected in ("ld.global.u32", "st.global.u32", "add.rn.f16x2", "membar.cta", "setp"):
        assert expected in text


def test_pure_instructions_may_be_dropped_and_others_may_not() -> None:
    def kernel(source, target):  # type: ignore[no-untyped-def]
        add_half2(load(source), load(source))
        store(target, 1)

    text = _ptx(kernel, "u64", "u64")
    assert "add.rn.f16x2" not in text
    assert text.count("ld.global.u32") == 2


def test_addresses_of_arrays() -> None:
    from numba import cuda, types

    def kernel(array):  # type: ignore[no-untyped-def]
        shared = cuda.shared.array(64, types.uint32)
        shared[0] = 1
        store(global_address(array), shared_address(shared))

    signature = types.void(types.Array(types.uint32, 1, "C"))
    text, _ = cuda.compile(kernel, signature, cc=(8, 0), device=False, abi="numba", output="ptx")
    assert "cvta" in text or "st.shared" in text
    assert "st.global.u32" in text


def test_faults_are_named() -> None:
    with pytest.raises(ValueError, match="unknown register type 'i7'"):
        numba_type("i7")

    @emitted("u32x3", "u32")
    def wrong(e: Emitter, word: Register) -> list[Register]:
        return [word, word]

    def kernel(target):  # type: ignore[no-untyped-def]
        store(target, wrong(1)[0])

    with pytest.raises(Exception, match="2 registers, its type is u32x3"):
        _ptx(kernel, "u64")


def test_in_the_simulator_an_op_is_its_plain_body() -> None:
    """A process of its own: the simulator is chosen when numba.cuda is imported."""
    program = (
        "import os; os.environ['NUMBA_ENABLE_CUDASIM'] = '1'\n"
        "from frink_numba.kernels.ptx import instruction\n"
        "double = instruction('add.u32 $0, $1, $1;', 'u32', 'u32', simulator=lambda x: x + x)\n"
        "bare = instruction('brev.b32 $0, $1;', 'u32', 'u32')\n"
        "print(double(21))\n"
        "try:\n    bare(1)\nexcept NotImplementedError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["42", "brev_b32 has no body for the CUDA simulator"]
