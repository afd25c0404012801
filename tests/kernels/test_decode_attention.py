"""The decode attention and the samplers without a GPU: they compile without spills, bad requests say why."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.errors import BackendUnavailable, ShapeError
from frink_numba.kernels.cubins import Target, compile_kernel
from frink_numba.kernels.decode_attention import (
    DecodeAttentions,
    DecodeShape,
    cut_alike,
    source_of,
    variant_of,
    why_not,
)
from frink_numba.kernels.sample import Samplers
from frink_numba.kernels.sample_kernels import argmax_source, embed_source
from frink_numba.layer import RopeLayout

SHAPES = [
    (DecodeShape(32, 8, 128, rot_dim=128), 1, "90a"),
    (DecodeShape(9, 3, 64, rot_dim=64, layout=RopeLayout.NEOX), 1, "80"),
    (DecodeShape(16, 8, 256, rot_dim=256, layout=RopeLayout.NEOX, q_norm=True, k_norm=True, softcap=50.0), 8, "90a"),
    (DecodeShape(8, 8, 96, rot_dim=20), 2, "120"),
    (DecodeShape(8, 2, 64, rot_dim=32, layout=RopeLayout.NEOX, q_norm=True, k_norm=True, norm_last=True), 1, "89"),
]


@pytest.mark.parametrize(("shape", "rows", "arch"), SHAPES, ids=lambda v: str(getattr(v, "head_dim", v)))
def test_kernels_compile_without_spills(shape: DecodeShape, rows: int, arch: str) -> None:
    cubin = compile_kernel(source_of(variant_of(shape, rows, arch.startswith("90"), 227 << 10)), Target(arch))
    assert cubin.spilled == 0


@pytest.mark.parametrize("limit", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("head_dim", range(32, 257, 32))
def test_shared_memory_fits(head_dim: int, limit: int) -> None:
    """Whatever a block may have: GPUs before and beside sm_90 allow less."""
    for rows in (1, 8):
        assert variant_of(DecodeShape(16, 2, head_dim), rows, False, limit).shared <= limit


@pytest.mark.parametrize("window", [0, 100, 600])
@pytest.mark.parametrize("parts", [1, 3, 32])
def test_rows_whose_keys_are_cut_alike(window: int, parts: int) -> None:
    """Issue 7: each row's part edges, as the kernel cuts the keys it sees, are those of the first; most rows are."""

    def edges(position: int) -> list[int]:
        begin = max(0, position + 1 - window) // 128 * 128 if window else 0
        span = position + 1 - begin
        if span <= 256 or parts == 1:
            return [begin]
        length = 128
        while length * parts < span:
            length += 32
        return [*range(begin, position + 1, length), length]

    found = []
    for start in range(3000):
        alike = cut_alike(window, parts, start, 8)
        found.append(alike)
        assert all(edges(start + row) == edges(start) for row in range(alike))
        assert alike == 8 or edges(start + alike) != edges(start)
    assert np.mean(np.equal(found, 8)) > 0.8


def test_keys_are_cut_alike_for_one_row_and_for_eight() -> None:
    """The number of parts does not depend on the rows."""
    attentions = DecodeAttentions((9, 0), 132)
    attentions._kernel = lambda variant: None  # type: ignore[method-assign, assignment, return-value]
    for heads, kv_heads, head_dim in ((9, 3, 64), (32, 8, 128), (40, 2, 128), (8, 1, 256), (32, 32, 128)):
        shape = DecodeShape(heads, kv_heads, head_dim)
        made = [attentions.attention(shape, sequences=1, most_rows=rows) for rows in (1, 2, 8)]
        assert len({attention.parts for attention in made}) == 1


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K"])
def test_embedding_rows_compile(kind: str) -> None:
    assert compile_kernel(embed_source(kind, True), Target("90a")).spilled == 0


def test_argmax_compiles() -> None:
    assert compile_kernel(argmax_source(False), Target("80")).spilled == 0


def test_requests_that_make_no_sense() -> None:
    with pytest.raises(BackendUnavailable, match=r"7\.5"):
        DecodeAttentions((7, 5), 40)
    with pytest.raises(BackendUnavailable, match=r"7\.5"):
        Samplers((7, 5))
    assert why_not(8, 2, 64) is None
    assert "evenly" in str(why_not(9, 2, 64))
    with pytest.raises(ShapeError, match="not 80"):
        DecodeShape(8, 2, 80)
    with pytest.raises(ShapeError, match="rotation of 65"):
        DecodeShape(8, 2, 64, rot_dim=65)
    with pytest.raises(ShapeError, match="1 to 8 rows"):
        DecodeAttentions((9, 0), 132).attention(DecodeShape(8, 2, 64), sequences=1, most_rows=9)


def test_one_block_a_multiprocessor_where_two_launches_share_it() -> None:
    """Issue 7: one row of a sequence leaves equally much room everywhere; wide tiles, many sequences, sm_80 do not."""

    def made(heads: int, kv_heads: int, head_dim: int, sequences: int = 1, rows: int = 1, major: int = 9):
        attentions = DecodeAttentions((major, 0), 132)
        attentions._kernel = lambda variant: None  # type: ignore[method-assign, assignment, return-value]
        return attentions.attention(DecodeShape(heads, kv_heads, head_dim), sequences=sequences, most_rows=rows)

    for shape, parts in (((32, 8, 128), 16), ((24, 8, 128), 16), ((9, 3, 64), 32)):
        attention = made(*shape)
        assert (attention.blocks, attention.spread, attention.parts) == (132, True, parts)
    assert not made(32, 8, 128, rows=8).spread
    assert not made(8, 2, 256).spread
    assert not made(32, 8, 128, sequences=32).spread
    assert made(32, 8, 128, sequences=7).spread
    attention = made(32, 8, 128, sequences=9)  # 72 blocks would leave half of the GPU to nobody
    assert (attention.blocks, attention.spread, attention.parts) == (216, False, 3)
    attention = made(32, 8, 128, major=8)
    assert (attention.blocks, attention.spread, attention.parts) == (256, False, 32)
