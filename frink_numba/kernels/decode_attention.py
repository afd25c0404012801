"""Attention of few query rows over the f16 mirror (generation), with RoPE and the new K/V rows in the same launch.

    y[r, h] = sum_j softmax_j(cap(scale * q[r, h] . k[j, h / group])) v[j, h / group],   j visible to row r

A *sequence* is 1 to 8 neighbouring rows of the step with a mirror of their own. Its record in the table (device memory,
read at each launch, so that a captured graph serves every position):

    bytes 0..15  int32 first_row, rows, start_pos, pad        16..31  uint64 k_base, v_base (this layer's mirrors)

Row r of a sequence is position start_pos + r and sees the keys 0 .. start_pos + r (the last `window` of them). Mirrors
are f16 [capacity, n_kv_heads, head_dim]; row p is position p.

In order of use:

    attentions = DecodeAttentions((9, 0), multiprocessors=132)            # per device
    attention = attentions.attention(DecodeShape(...), sequences=1, most_rows=1)
    launch = attention.bind(qkv, out, table, workspace=address, cos=..., sin=..., k_rows=..., v_rows=...)
    launch(stream)

`bind` reads q, k and v as the product left them (float32 [M, (n_heads + 2 n_kv_heads) * head_dim], bias added), and does
per launch: the norm of each head of q and k where the shape has one, RoPE, the f16 K and V rows at
start_pos .. start_pos + rows - 1 of the mirrors, the same rows as float32 for the host's cache, attention. Keys are cut
over blocks where there are many; the last block of a head to finish adds the parts in their order, so that results
repeat bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from frink_numba.layer import RopeLayout

MOST_ROWS = 8  # query rows of a sequence


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What shapes the code of an attention.

    head_dim: 32 to 256, a multiple of 32. rot_dim: channels that turn (0: no RoPE), even. q_norm, k_norm: an RMS norm of
    each head, before RoPE (`norm_after_rope`: after it), weights float32 [head_dim] or, with `norm_by_head`, [heads,
    head_dim]. window: 0 sees all. softcap: 0 is none. scale: of the scores, for unscaled q and k.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    rot_dim: int = 0
    layout: RopeLayout = RopeLayout.NORM
    q_norm: bool = False
    k_norm: bool = False
    norm_by_head: bool = False
    norm_after_rope: bool = False
    window: int = 0
    softcap: float = 0.0


class DecodeAttentions:
    """The decode attentions of one device: kernels loaded once each. Thread-safe."""

    def __init__(self, capability: tuple[int, int], multiprocessors: int) -> None:
        raise NotImplementedError

    def attention(self, shape: DecodeShape, *, sequences: int, most_rows: int) -> DecodeAttention:
        """The attention of `sequences` records of the table, none with more than `most_rows` rows (1..8)."""
        raise NotImplementedError

    def close(self) -> None:
        """Unload the kernels; their launches must not run any more."""


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """One attention's kernel and cut."""

    shape: DecodeShape
    sequences: int
    most_rows: int

    @property
    def workspace(self) -> int:
        """Bytes of the workspace, zeroed once; launches leave its counters at zero. One per stream."""
        raise NotImplementedError

    def bind(
        self,
        qkv: int,
        out: int,
        table: int,
        *,
        workspace: int,
        cos: int = 0,
        sin: int = 0,
        q_norm: int = 0,
        k_norm: int = 0,
        eps: float = 0.0,
        k_rows: int = 0,
        v_rows: int = 0,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> object:
        """A launch with these buffers.

        qkv: float32 [M, (n_heads + 2 n_kv_heads) * head_dim]. out: f16 [M, n_heads * head_dim], true value / v_scale.
        cos, sin: float32 [M, rot_dim / 2], row by row of the step. q_norm, k_norm: float32 weights. k_rows, v_rows:
        float32 [M, n_kv_heads * head_dim], true values, or 0 where nobody wants them. k_scale, v_scale: powers of two;
        mirrors hold the true value divided by them.
        """
        raise NotImplementedError
