"""The scratch block of a tensor-core run: what lies where in it, from the layers' shapes and the batch alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frink_numba.cuda.arena import Layout, share
from frink_numba.cuda.parts import rope_key
from frink_numba.cuda.shapes import LayerShape
from frink_numba.cuda.tensor.weights import separate_gate
from frink_numba.kernels.fused_attention import SEQUENCE, head_pitch
from frink_numba.kernels.tma import MAP_BYTES
from frink_numba.layer import Layer

STAGED_ROWS = 256  # prefix rows that go up at a time
AHEAD_ROWS = 32  # tokens that a run of one row chooses by itself at most (ahead.py)
_SEGMENT_BYTES = 4 << 20  # of K/V rows that come down together, at least
_SEGMENTS = 8  # at most, unless their rows are larger than this
_MOST_SEGMENT_BYTES = 16 << 20

ATTENTION_WORKSPACE = 1 << 16
COUNTERS = 1 << 17  # bytes at the beginning of the workspace that are zero between launches

_ATTENTION_MAPS = 4  # of a layer, at most

# The launches of a run in their order (program.py), and before them the upload of prefix rows.
_PREFIX, _NORM, _QKV, _PREPARE, _ATTENTION, _O, _O_NORM, _GATE_UP, _GATED, _DOWN, _DOWN_NORM, _HEAD = range(12)
# At which of them the contents of a part matter; what is not named here is needed from first to last. All launches
# follow each other in one stream, and each waits for the one before it.
_NEEDED = {
    "staging": (_PREFIX,),
    "normed": (_NORM, _QKV, _GATE_UP, _HEAD),
    "qkv": (_QKV, _PREPARE, _ATTENTION),  # one launch does both for few rows of a sequence
    "q": (_PREPARE, _ATTENTION),
    "attended": (_ATTENTION, _O),
    "projected": (_O, _O_NORM, _DOWN, _DOWN_NORM),
    "gate": (_GATE_UP, _GATED),
    "up": (_GATE_UP, _GATED),
    "inner": (_GATE_UP, _GATED, _DOWN),
}


# Sums of split products: of 128 rows x 256 tokens for each multiprocessor, and of 8 rows of logits cut along K.
_SPLIT_SUMS, _THIN_SUMS = 128 * 256 * 4, 32 << 20


@dataclass(frozen=True, slots=True)
class TensorScratch:
    """Sizes that a run's scratch must have room for: the largest of its layers."""

    layers: int
    hidden: int
    query_width: int
    padded_query_width: int  # heads at the pitch of `fused_attention`
    kv_width: int
    padded_kv_width: int
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
            padded_kv_width=max(shape.n_kv_heads * head_pitch(shape.head_dim) for shape in shapes),
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
        most = max(_SEGMENTS, -(-nbytes // _MOST_SEGMENT_BYTES))
        segments = max(1, min(most, self.layers, nbytes // _SEGMENT_BYTES))
        return -(-self.layers // segments)

    def parts(self, batch: int) -> dict[str, int]:
        """Bytes of every part, by name."""
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
        if batch == 1:
            parts["ahead"] = self.layers * 8 * AHEAD_ROWS * self.kv_width
        for table in range(self.rope_tables):
            parts[f"cos{table}"] = parts[f"sin{table}"] = 4 * batch * self.rope_pairs
        return parts

    def places(self, batch: int) -> tuple[dict[str, int], int]:
        """Where each part begins in the block, and the bytes of the block. Parts that are never needed at once share.

        Those that are needed all the time come first, in their order.
        """
        parts, layout = self.parts(batch), Layout()
        places = {name: layout.add(size) for name, size in parts.items() if name not in _NEEDED}
        shared, nbytes = share({name: size for name, size in parts.items() if name in _NEEDED}, _NEEDED)
        return places | {name: layout.nbytes + place for name, place in shared.items()}, layout.nbytes + nbytes

    def nbytes(self, batch: int, start_pos: int) -> int:
        """Bytes of the whole block, wherever the batch begins."""
        return self.places(batch)[1]


def workspace_bytes(multiprocessors: int) -> int:
    """Bytes that the launches on a device want at most for counters and sums."""
    return COUNTERS + max(multiprocessors * _SPLIT_SUMS, _THIN_SUMS)


def step_bytes(batch: int, layers: int) -> int:
    """Most bytes of what goes up with a step: maps, a sequence record a layer, positions, tokens, scales of rows.

    A layer has up to seven products with two maps each, and a scale of V; layers of one form share them, and more than
    eight forms in one model are not known.
    """
    forms = min(layers, 8)
    maps = MAP_BYTES * (2 * 7 * forms + _ATTENTION_MAPS * layers)
    return maps + SEQUENCE.itemsize * layers + 2 * 4 * batch + forms * 4 * (-(-batch // 256) * 256) + 2048
