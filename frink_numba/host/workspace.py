"""The work arrays of a layer's pass over a block of tokens, with all views that the body takes of them."""

from __future__ import annotations

from typing import NamedTuple

from frink_numba.host.rope import Rotation
from frink_numba.host.scratch import Scratch
from frink_numba.layer import RopeLayout


class LayerShape(NamedTuple):
    """What the work arrays of a layer depend on; layers of equal shape share them."""

    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    rot_dim: int  # 0: not rotated
    layout: RopeLayout | None


def workspace(shape: LayerShape, shape_id: int, n: int, scratch: Scratch) -> Workspace:
    """The workspace of a shape, known by its id, and `n` tokens."""
    found: Workspace | None = scratch.remembered.get((shape_id, n))
    if found is None:
        found = scratch.remembered[shape_id, n] = Workspace(shape, n, scratch)
    return found


class Workspace:
    """Columns float32 [channels, n] of undefined content, made once a shape and number of tokens.

    Views cost little each, but a decode step would make a dozen a layer, and its small operations are what keeps it
    from the speed of its matrix products.
    """

    def __init__(self, shape: LayerShape, n: int, scratch: Scratch) -> None:
        heads, kv_heads, head_dim = shape.n_heads, shape.n_kv_heads, shape.head_dim
        self.normed = scratch.array("normed", shape.hidden, n)
        self.qkv = scratch.array("qkv", (heads + 2 * kv_heads) * head_dim, n)
        by_head = self.qkv.reshape(-1, head_dim, n)
        self.q, self.k = by_head[:heads], by_head[heads : heads + kv_heads]
        self.k_rows = self.k.transpose(2, 0, 1)
        self.v_rows = by_head[heads + kv_heads :].transpose(2, 0, 1)
        self.rotation = None
        if shape.layout is not None:
            self.rotation = Rotation(by_head[: heads + kv_heads], shape.rot_dim, shape.layout, scratch)
        self.sums = scratch.array("value sums of all heads", heads * head_dim, n)
        self.sums_by_head = self.sums.reshape(heads, head_dim, n)
        self.output = scratch.array("block output", shape.hidden, n)
        self.gate_up = scratch.array("gate and up", 2 * shape.ffn, n)
        self.gate, self.up = self.gate_up[: shape.ffn], self.gate_up[shape.ffn :]
