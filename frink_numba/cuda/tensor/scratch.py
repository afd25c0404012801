"""The scratch block of a tensor-core run: what lies where in it, from the layers' shapes and the batch alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frink_numba.cuda.arena import Layout
from frink_numba.cuda.parts import rope_key
from frink_numba.cuda.shapes import LayerShape
from frink_numba.cuda.tensor.weights import separate_gate
from frink_numba.kernels.fused_attention import SEQUENCE, head_pitch
from frink_numba.kernels.tma import MAP_BYTES
from frink_numba.layer import Layer

STAGED_ROWS = 256  # prefix rows that go up at a time
_SEGMENT_BYTES = 4 << 20  # of K/V rows that come down together
_SEGMENTS = 8  # at most

ATTENTION_WORKSPACE = 1 << 16
COUNTERS = 1 << 17  # bytes at the beginning of the workspace that are zero between launches

_ATTENTION_MAPS = 4  # of a layer, at most


@dataclass(frozen=True, slots=True)
class TensorScratch:
    """Sizes that a run's scratch must have room for: the largest of its layers."""

    layers: int
    hidden: int
    query_width: int
    padded_query_width: int  # heads at the pitch of `fused_attention`
    kv_width: int
    ffn: int
    rope_pairs: int
    rope_tables: int
    post_norms: bool
    separate_gate: bool
    workspace: int

    @classmethod
    def of(cls, layers: Sequence[Layer], workspace: int) -> TensorScratch:
        """`workspace`: bytes that the kernels want at most, whatever the shape."""
        shapes = [LayerShape.of(layer) for layer in layers]
        return cls(
            layers=len(layers),
            hidden=max(shape.hidden for shape in shapes),
            query_width=max(shape.query_width for shape in shapes),
            padded_query_width=max(shape.n_heads * head_pitch(shape.head_dim) for shape in shapes),
            kv_width=max(shape.kv_width for shape in shapes),
            ffn=max(shape.ffn for shape in shapes),
            rope_pairs=max(shape.rope_pairs for shape in shapes),
            rope_tables=len({rope_key(layer) for layer in layers} - {None}),
            post_norms=any(x.post_attn_norm is not None or x.post_ffn_norm is not None for x in layers),
            separate_gate=any(map(separate_gate, layers)),
            workspace=workspace,
        )

    def segment(self, batch: int) -> int:
        """Layers of a segment: their new float32 K/V rows come down together, while the next segment runs."""
        nbytes = self.layers * 8 * batch * self.kv_width
        segments = max(1, min(_SEGMENTS, self.layers, nbytes // _SEGMENT_BYTES))
        return -(-self.layers // segments)

    def parts(self, batch: int) -> dict[str, int]:
        """Bytes of every part, by name, in the order they lie in the block."""
        filled = 4 * (-(-batch // 256) * 256)  # scales and norms of rows, as long as the widest tile
        parts = {
            # First and always as long: the kernels leave zeros there for the next run, as far as COUNTERS.
            "attention_workspace": ATTENTION_WORKSPACE,
            "workspace": self.workspace,
            "step": step_bytes(batch, self.layers),
            "hidden": 4 * batch * self.hidden,
            "normed": 2 * batch * self.hidden,
            "normed_scale": filled,
            "normed_norm": filled,
            "attended": 2 * batch * self.query_width,
            "inner": 2 * batch * self.ffn,
            "inner_scale": filled,
            "inner_norm": filled,
            "qkv": 4 * batch * (self.query_width + 2 * self.kv_width),
            "staging": 8 * STAGED_ROWS * self.kv_width,
            "q": 2 * batch * self.padded_query_width,
        }
        if self.post_norms:
            parts["projected"] = 4 * batch * self.hidden
        if self.separate_gate:
            parts["gate"] = parts["up"] = 4 * batch * self.ffn
        segment = self.segment(batch)
        for slot in range(min(2, -(-self.layers // segment))):
            parts[f"rows{slot}"] = segment * 8 * batch * self.kv_width
        for table in range(self.rope_tables):
            parts[f"cos{table}"] = parts[f"sin{table}"] = 4 * batch * self.rope_pairs
        return parts

    def nbytes(self, batch: int, start_pos: int) -> int:
        """Bytes of the whole block, wherever the batch begins."""
        layout = Layout()
        for size in self.parts(batch).values():
            layout.add(size)
        return layout.nbytes


def step_bytes(batch: int, layers: int) -> int:
    """Most bytes of what goes up with a step: maps, a sequence record a layer, positions, tokens, scales of rows.

    A layer has up to seven products with two maps each, and a scale of V; layers of one form share them, and more than
    eight forms in one model are not known.
    """
    forms = min(layers, 8)
    maps = MAP_BYTES * (2 * 7 * forms + _ATTENTION_MAPS * layers)
    return maps + SEQUENCE.itemsize * layers + 2 * 4 * batch + forms * 4 * (-(-batch // 256) * 256) + 1024
