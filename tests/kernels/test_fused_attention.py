"""The fused attention without a GPU: schedule, masks and exchanges over arrays, layouts, refusals, and machine code."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frink_numba.errors import BackendUnavailable, ShapeError
from frink_numba.kernels.cubins import Cubin, Target, compile_kernel
from frink_numba.kernels.fused_attention import (
    SEQUENCE,
    Attentions,
    HeadShape,
    sequence_table,
    source_of,
    why_not,
)
from frink_numba.kernels.fused_attention_emit import _transpose, mask
from frink_numba.kernels.fused_attention_plan import Layout, MmaLayout, make_layout, make_mma_layout
from frink_numba.kernels.fused_attention_schedule import key_bounds, locate_tile, row_limits
from frink_numba.kernels.fused_attention_wgmma import SHARED_LIMIT
from tests.kernels.array_emitter import ArrayEmitter
from tests.kernels.sass import disassemble, disassembler, operands_overwritten_in_flight


def _registers(e: ArrayEmitter, *values: Any) -> list[Any]:
    return [e.array("u32", np.asarray(v, np.int64).astype(np.uint32)) for v in values]


@pytest.mark.parametrize("seed", range(8))
def test_every_tile_comes_once_heaviest_first(seed: int) -> None:
    """Each pair of a K/V head and a tile of rows has one number; within a section of heads the rows descend."""
    rng = np.random.default_rng(seed)
    tiles, heads = int(rng.integers(1, 40)), int(rng.integers(1, 20))
    positions, resident = int(rng.integers(1, 5000)), int(rng.integers(1, 30000))
    e = ArrayEmitter()
    numbers = np.arange(tiles * heads)
    head, row = locate_tile(e, 128, *_registers(e, numbers, tiles, heads, positions, resident))  # type: ignore[arg-type]
    pairs = list(zip(head.value.tolist(), row.value.tolist(), strict=True))
    assert sorted(pairs) == [(h, 128 * t) for h in range(heads) for t in range(tiles)]
    section = max(1, min(heads, resident // positions))
    sections = head.value // section
    assert (np.diff(sections.astype(int)) >= 0).all(), "a section is finished before the next one starts"
    for part in np.unique(sections):
        assert (np.diff(row.value[sections == part].astype(int)) <= 0).all()


@pytest.mark.parametrize("windowed", [False, True])
def test_blocks_of_keys_against_brute_force(windowed: bool) -> None:
    """The blocks with a visible key, no more and no less; those without a mask are seen whole by every row (R18)."""
    rng = np.random.default_rng(5)
    e = ArrayEmitter()
    for _ in range(400):
        rows, keys = int(rng.choice([64, 128, 192])), int(rng.choice([64, 80, 128]))
        group, tokens = int(rng.integers(1, 9)), int(rng.integers(1, 400))
        start = int(rng.choice([0, 1, 63, 127, 128, 500]))
        all_rows = tokens * group
        first_row = rows * int(rng.integers(0, -(-all_rows // rows)))
        window = int(rng.integers(1, 600)) if windowed else 0
        arguments = _registers(e, first_row, all_rows, start, group)
        bound = _registers(e, window)[0] if windowed else None
        out = key_bounds(e, rows, keys, *arguments, bound)  # type: ignore[arg-type]
        end, free_end, free_begin, begin = (int(r.value) for r in out)
        packed = np.arange(first_row, min(first_row + rows, all_rows))
        position = start + packed // group
        key = np.arange(-(-(start + tokens) // keys) * keys)
        seen = key[None] <= position[:, None]
        if windowed:
            seen &= key[None] > position[:, None] - window
        blocks = seen.reshape(len(packed), -1, keys)
        some, every = blocks.any(axis=(0, 2)), blocks.all(axis=(0, 2))
        assert (begin, end) == (int(some.argmax()), len(some) - int(some[::-1].argmax()))
        assert begin <= free_begin <= free_end <= end
        assert every[free_begin:free_end].all()
        assert not every[free_end:end].any(), "what could do without a mask does"
        assert not every[begin:free_begin].any()


@pytest.mark.parametrize("window", [0, 1, 7, 200])
def test_masks_of_a_block_against_brute_force(window: int) -> None:
    """A thread's scores 4j + 2h + v belong to row g + 8h and column 8j + 2t + v: visible where the row sees the key."""
    rng = np.random.default_rng(window)
    e = ArrayEmitter()
    lanes = np.arange(32)
    for _ in range(40):
        keys, group, tokens = 128, int(rng.integers(1, 6)), int(rng.integers(1, 300))
        start, all_rows = int(rng.integers(0, 300)), tokens * group
        first_row = int(rng.integers(0, all_rows))
        block = int(rng.integers(0, (start + tokens) // keys + 1))
        thread = e.array("u32", lanes)
        inside = [e.array("u32", (lanes >> 2) + 8 * h) for h in range(2)]
        numbers = _registers(e, first_row, all_rows, start, group, block)
        limits = row_limits(e, keys, thread, inside, *numbers)  # type: ignore[arg-type]
        scores = [e.array("f32", np.full(32, float(i))) for i in range(keys // 2)]
        bound = _registers(e, window)[0] if window else None
        out = mask(e, scores, limits, bound)  # type: ignore[arg-type]
        for i, got in enumerate(out):
            row = np.minimum(first_row + (lanes >> 2) + 8 * ((i >> 1) & 1), all_rows - 1)
            key = block * keys + 8 * (i // 4) + 2 * (lanes & 3) + i % 2
            last = start + row // group
            seen = (key <= last) & ((key > last - window) if window else True)
            assert np.array_equal(np.asarray(got.value), np.where(seen, np.float32(i), -np.inf))


def test_exchange_of_a_quad() -> None:
    """Lane t of a quad ends up with word t of each of its lanes, in their order."""
    e = ArrayEmitter()
    lanes = np.arange(32)
    words = [e.array("u32", 100 * lanes + k) for k in range(4)]
    out = _transpose(e, words, (lanes & 1) != 0, (lanes & 2) != 0)  # type: ignore[arg-type]
    for k, word in enumerate(out):
        assert np.array_equal(word.value, 100 * ((lanes & ~3) + k) + (lanes & 3))


def test_table_of_sequences() -> None:
    """32 bytes a record, in the order that the kernels read."""
    table = np.frombuffer(sequence_table([(0, 5, 7, 1 << 40, 3), (5, 0, 0, 4, 5)]), SEQUENCE)
    assert table.itemsize == 32
    assert table.tolist() == [(0, 5, 7, 0, 1 << 40, 3), (5, 0, 0, 0, 4, 5)]
    with pytest.raises(ShapeError, match="sequence 1"):
        sequence_table([(0, 1, 0, 0, 0), (0, -1, 0, 0, 0)])


@pytest.mark.parametrize("head_dim", range(2, 258, 2))
def test_layouts(head_dim: int) -> None:
    """Every variant fits the multiprocessor it is for; tiles of the tensor cores are aligned."""
    assert why_not(4, 2, head_dim) is None
    layout = make_layout(head_dim, windowed=True, capped=True)
    assert layout.shared + 1024 <= SHARED_LIMIT
    assert layout.stages & (layout.stages - 1) == layout.q_stages & (layout.q_stages - 1) == 0
    assert layout.k_at % 1024 == layout.block % 1024 == layout.q_group % 1024 == 0
    assert layout.width <= 64 * layout.chunks
    for capability, limit in (((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((10, 0), 227), ((12, 0), 99)):
        small = make_mma_layout(head_dim, capability, windowed=False, capped=False)
        assert small.shared <= limit * 1024
        assert small.rows % (small.threads // 8) == small.keys % (small.threads // 8) == 0


def test_what_is_refused() -> None:
    for tier, capability in (("wgmma", (8, 0)), ("wgmma", (10, 0)), ("mma", (7, 5)), ("simt", (9, 0))):
        with pytest.raises(BackendUnavailable, match=tier):
            Attentions(tier, capability, 100)
    attentions = Attentions("mma", (8, 0), 108)
    shape = HeadShape(4, 2, 64)
    with pytest.raises(ShapeError, match="at least one row"):
        attentions.attention(shape, 0)
    with pytest.raises(ShapeError, match="norm"):
        attentions.prepare(shape, norm="rows")


WGMMA = [
    make_layout(128, windowed=False, capped=False),
    make_layout(64, windowed=True, capped=False),
    make_layout(256, windowed=False, capped=False),
    make_layout(80, windowed=True, capped=True),
]
MMA = [
    (make_mma_layout(128, (8, 0), windowed=False, capped=False), "80"),
    (make_mma_layout(64, (8, 6), windowed=True, capped=False), "86"),
    (make_mma_layout(256, (8, 9), windowed=False, capped=False), "89"),
    (make_mma_layout(256, (9, 0), windowed=False, capped=True), "90"),
    (make_mma_layout(96, (10, 0), windowed=False, capped=False), "100"),
    (make_mma_layout(80, (12, 0), windowed=True, capped=True), "120"),
]


def _sound(cubin: Cubin) -> None:
    assert cubin.spilled == 0
    assert cubin.remarks == (), "ptxas serialized something"


@functools.cache
def _wgmma(layout: Layout) -> Cubin:
    return compile_kernel(source_of(layout), Target("90a"))


@pytest.mark.parametrize("layout", WGMMA, ids=lambda v: str(v.head_dim))
def test_wgmma_kernels(layout: Layout, tmp_path: Path) -> None:
    """No spills, no lost speed, and no weights overwritten while the tensor cores read them (gemm_emit.keep)."""
    cubin = _wgmma(layout)
    # With heads of 256 channels the compute groups take what the producer spills.
    assert cubin.spilled <= (68 if layout.width > 128 else 0)
    assert cubin.remarks == (), "ptxas serialized something"
    few, many = layout.registers
    assert 128 * (few + layout.groups * many) <= cubin.registers * layout.threads, "setmaxnreg would wait for ever"
    tool = disassembler()
    if tool is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    instructions = disassemble(tool, cubin.code, tmp_path)
    assert sum("HGMMA" in line for line in instructions) >= 16
    assert operands_overwritten_in_flight(instructions) == []


@pytest.mark.parametrize(("layout", "arch"), MMA, ids=lambda v: getattr(v, "head_dim", v))
def test_mma_kernels(layout: MmaLayout, arch: str) -> None:
    _sound(compile_kernel(source_of(layout), Target(arch)))
