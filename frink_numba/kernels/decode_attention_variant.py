"""What a compiled decode attention is made for: its parameters, and what lies where in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from frink_numba.layer import RopeLayout

WARPS = 8
THREADS = 32 * WARPS
MOST_PARTS = 32  # one lane a part
STEP = 16 * WARPS  # keys of a block at a time
WHOLE_KEYS = 2 * STEP  # are not cut
LEAST_KEYS = STEP  # of a part, where there are several
PART_STEP = 32  # keys by which parts grow

ARGUMENTS = (
    # name, type
    ("qkv", "u64"),
    ("out", "u64"),
    ("table", "u64"),
    ("workspace", "u64"),  # counters, then sums, then states
    ("cos", "u64"),
    ("sin", "u64"),
    ("q_norm", "u64"),
    ("k_norm", "u64"),
    ("sinks", "u64"),  # or 0
    ("k_rows", "u64"),  # or 0
    ("v_rows", "u64"),
    ("eps", "f32"),
    ("scale", "f32"),  # see decode_attention_ops.attend
    ("cap", "f32"),
    ("k_factor", "f32"),  # 1 / k_scale
    ("v_factor", "f32"),
    ("n_heads", "u32"),
    ("n_kv_heads", "u32"),
    ("parts", "u32"),
    ("tiles", "u32"),
    ("window", "u32"),  # 0: everything
    ("sums_at", "u32"),  # in the workspace
    ("states_at", "u32"),
    ("tasks", "u32"),  # of which each has its keys cut into `parts`; blocks behind them all have no work
)


def q_row_bytes(head_dim: int) -> int:
    """Bytes from query to query in shared memory: two rows' 64-byte pieces lie in different banks."""
    return 2 * head_dim + 64


def sums_row(head_dim: int) -> int:
    """float32 from query to query of a warp's sums in shared memory."""
    return head_dim + 4


@dataclass(frozen=True, slots=True)
class DecodeKernel:
    """One compiled variant: query_tiles eights of queries a block; the rest as in DecodeShape."""

    head_dim: int
    query_tiles: int
    rot_dim: int
    layout: RopeLayout
    q_norm: bool
    k_norm: bool
    capped: bool
    overlap: bool
    norm_last: bool = False

    @property
    def queries(self) -> int:
        return 8 * self.query_tiles

    @property
    def resident(self) -> int:
        """Blocks whose registers a multiprocessor holds."""
        return 2 if self.head_dim * self.query_tiles <= 128 else 1

    @property
    def states_at(self) -> int:
        return self.queries * q_row_bytes(self.head_dim)

    @property
    def factors_at(self) -> int:
        return self.states_at + self.queries * WARPS * 8

    @property
    def sums_at(self) -> int:
        return self.factors_at + self.queries * MOST_PARTS * 4

    @property
    def shared(self) -> int:
        return self.sums_at + WARPS * self.queries * sums_row(self.head_dim) * 4
