"""Products of 9 to 64 rows on Hopper: what shapes a compiled variant, and its sizes (see few_gemm.py).

A *record* is 256 columns, four steps of 64. A *set* is the slabs of a block: one for each of its consumer groups, which
share the rows of x. Where there are fewer sets than multiprocessors, the records of a set are shared out over `parts`
blocks, whose sums meet in the workspace; each part then finishes its own share of the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from frink_numba.kernels.gemm_epilogue import PLAIN, Epilogue
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS, GROUP_STEPS, STEP, FragmentKind

RECORD = GROUP_STEPS * STEP  # columns
TOKENS = (16, 32, 64)  # of a variant
FLAG_BYTES = 8192  # the workspace's counts: one for each slab of a product in parts
_SHARED = 232448  # bytes a block may use on sm_90
_SHARED_HALF = 116224 - 1024  # where two are to share a multiprocessor
PIECES = 2  # of a stage, which are waited for one by one: work begins and ends with half a record
_STAGE_BARRIERS = 8 * (PIECES + 1)  # bytes: full ones and an empty one
_MOST_STAGES = 8
_CHUNK = 2048  # bytes that a group stages at a time, where that many hold eight rows of results
_BUFFERS = 2

ARGUMENTS = (
    # name, type
    ("x_map", "u64"),  # tensor map of the rows of x, in device memory
    ("out_map", "u64"),
    ("weights", "u64"),
    ("row_scale", "u64"),
    ("token_scale", "u64"),  # float32 [m]
    ("bias", "u64"),  # float32 [slabs * 64], or 0
    ("token_norm", "u64"),  # f16 results only, else 0
    ("out_scale", "u64"),  # f16 results only, else 0
    ("workspace", "u64"),  # FLAG_BYTES of zeros, then the sums of each part
    ("c2", "f32"),
    ("c1", "f32"),
    ("c0", "f32"),
    ("m", "u32"),
    ("slabs", "u32"),
    ("records", "u32"),
    ("sets", "u32"),
    ("parts", "u32"),
    ("add", "u32"),  # add to the result instead of writing it (float32, not gated)
)


class SmallChunks(Epilogue):
    """An epilogue that stages little at a time: the room is the ring's."""

    __slots__ = ()

    def chunk_tokens(self, tokens: int) -> int:
        most = max(8, _CHUNK // (self.columns * self.item))
        return max(size for size in range(8, tokens + 1, 8) if tokens % size == 0 and size <= most)


@dataclass(frozen=True, slots=True)
class FewGemm:
    """The kind of the weights, most rows of x, the consumer groups of a block, whether records are shared out."""

    kind: str
    tokens: int
    epilogue: Epilogue = PLAIN
    groups: int = 4
    split: bool = False

    @property
    def row(self) -> FragmentKind:
        return FRAGMENT_KINDS[self.kind]

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor holds at a time."""
        return 2 if self.groups <= 2 else 1

    @property
    def threads(self) -> int:
        """The consumers, then a warp of which one thread fetches."""
        return 128 * self.groups + 32

    @property
    def record_bytes(self) -> int:
        """Bytes of 256 columns of a slab: they lie one behind the other, in the file's order."""
        return self.row.record_size * (GROUP_STEPS // self.row.group_steps)

    def piece_bytes(self, piece: int) -> tuple[int, int]:
        """Where a piece of a record begins, and its bytes: equally many steps each, the header before the first."""
        row = self.row
        steps = GROUP_STEPS // PIECES * row.step_size
        return (row.header_size + piece * steps, steps) if piece else (0, row.header_size + steps)

    @property
    def slot(self) -> int:
        """Bytes of one slab's record in a stage."""
        return -(-self.record_bytes // 128) * 128

    @property
    def stage(self) -> int:
        return self.tokens * 2 * RECORD + self.groups * self.slot

    @property
    def store_tokens(self) -> int:
        """Rows of x whose results are stored together."""
        return 8 if self.split else self.tokens

    @property
    def store(self) -> SmallChunks:
        return SmallChunks(self.epilogue.gate, self.epilogue.half)

    @property
    def buffers(self) -> int:
        """Staging buffers of a group."""
        return min(_BUFFERS, self.store.chunks(self.store_tokens))

    @property
    def staging(self) -> int:
        """Bytes of a group's staging."""
        return self.buffers * self.store.buffer_size(self.store_tokens)

    @property
    def _beside(self) -> int:
        return self.groups * (self.staging + self.epilogue.scale_size(self.tokens))

    @property
    def stages(self) -> int:
        limit = _SHARED_HALF if self.resident == 2 else _SHARED
        return min(_MOST_STAGES, (limit - self._beside) // (self.stage + _STAGE_BARRIERS))

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: x, staging, weights, scales, barriers."""
        return self.stages * (self.stage + _STAGE_BARRIERS) + self._beside

    @property
    def partial(self) -> int:
        """Bytes of a group's sums in the workspace."""
        return 64 * self.tokens * 4
