"""One compiled variant of the `wgmma` tier: what shapes its code, and the sizes that follow (see gemm_wgmma.py)."""

from __future__ import annotations

from dataclasses import dataclass

from frink_numba.kernels.gemm_epilogue import PLAIN, Epilogue
from frink_numba.kernels.gemm_kinds import FRAGMENT_KINDS, FragmentKind
from frink_numba.kernels.gemm_plan import blocks_on_multiprocessor

SHARED_LIMIT = 232448  # bytes a block may use on sm_90
FLAG_BYTES = 8192  # the workspace's flags: one for each slab of each block
# Of them, for a norm in front: the parts of each tile's rows that are normed, then two counts in lines of their own.
NORMED_AT = FLAG_BYTES // 2
TICKETS_AT, LEFT_AT = FLAG_BYTES - 256, FLAG_BYTES - 128
MOST_NORM_TILES = (TICKETS_AT - NORMED_AT) // 4
_MOST_STAGES = 16
_MOST_BUFFERS = 4

ARGUMENTS = (
    # name, type
    ("x_map", "u64"),  # tensor map of the tokens, in device memory
    ("out_map", "u64"),
    ("weights", "u64"),
    ("behind", "u64"),  # the weights of the second kind, else 0
    ("row_scale", "u64"),
    ("token_scale", "u64"),  # float32 [m]
    ("bias", "u64"),  # float32 [slabs * 64], or 0
    ("token_norm", "u64"),  # f16 results only, else 0
    ("out_scale", "u64"),  # f16 results only, else 0
    ("workspace", "u64"),  # FLAG_BYTES of zeros, then the sums of each block
    ("c2", "f32"),
    ("c1", "f32"),
    ("c0", "f32"),
    ("m", "u32"),
    ("token_tiles", "u32"),
    ("slabs", "u32"),  # of both kinds
    ("border", "u32"),  # slabs of the first kind
    ("steps", "u32"),
    ("swath", "u32"),  # token tiles that are walked through together, for the L2 cache
    ("split_tiles", "u32"),
    ("workers", "u32"),  # clusters that share the split tiles: the first ones
    ("add", "u32"),  # add to the result instead of writing it (float32, not gated)
    # With a norm: its rows, float32 [m, cols] and its weight, float32 [cols]; it makes the operands that `x_map` is of,
    # f16 [m, cols] at `half`, `token_scale` and `token_norm`.
    ("hidden", "u64"),
    ("norm_weight", "u64"),
    ("half", "u64"),
    ("tickets", "u64"),  # a count that no kernel touches but those with a norm: zero before and behind them
    ("cols", "u32"),
    ("turn_rows", "u32"),  # gemm_norm.turns_of
    ("tile_turns", "u32"),
    ("turns", "u32"),
    ("eps", "f32"),
)


@dataclass(frozen=True, slots=True)
class WgmmaGemm:
    """The kind of the weights, T tokens a tile (a multiple of 8), the epilogue, the blocks of a cluster (1 or 2), and
    the consumer groups of a block (1 to 3), each with its slab. norm: most columns of an RMS norm in front; 0: none.
    second: the kind of the weights behind the first ones, or "".
    """

    kind: str
    tokens: int
    epilogue: Epilogue = PLAIN
    cluster: int = 1
    groups: int = 2
    norm: int = 0
    second: str = ""

    @property
    def resident(self) -> int:
        return blocks_on_multiprocessor(self.cluster, self.groups)

    @property
    def threads(self) -> int:
        return 128 * (1 + self.groups)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread after `setmaxnreg`: (producer, consumers)."""
        if self.groups == 1:
            return 40, 216
        if self.groups == 3:
            return 32, 160
        return (40, 232) if self.tokens > 128 else (56, 224)

    @property
    def kinds(self) -> tuple[FragmentKind, ...]:
        """The kind of the weights; with a second kind, both."""
        return tuple(FRAGMENT_KINDS[name] for name in (self.kind, self.second) if name)

    @property
    def slot(self) -> int:
        """Bytes of one slab's step in a stage: room for the header, then the step, of the larger kind."""
        return max(-(-(kind.header_size + kind.step_size) // 128) * 128 for kind in self.kinds)

    @property
    def stage(self) -> int:
        return self.tokens * 128 + self.groups * self.slot

    @property
    def _normed(self) -> int:
        """Bytes of the barriers at which a block's groups have had their last tickets, and have done their norms."""
        return 16 if self.norm else 0

    @property
    def _limit(self) -> int:
        return (SHARED_LIMIT if self.resident == 1 else SHARED_LIMIT // 2 - 1024) - self._normed

    @property
    def _scales(self) -> int:
        return self.groups * self.epilogue.scale_size(self.tokens)

    @property
    def _buffer(self) -> int:
        return self.groups * self.epilogue.buffer_size(self.tokens)

    @property
    def stages(self) -> int:
        least = min(2, self.epilogue.chunks(self.tokens))
        return min(_MOST_STAGES, (self._limit - self._scales - least * self._buffer) // (self.stage + 16))

    @property
    def buffers(self) -> int:
        """Staging buffers of a consumer group: what fits beside the stages."""
        room = self._limit - self._scales - self.stages * (self.stage + 16)
        return min(_MOST_BUFFERS, self.epilogue.chunks(self.tokens), room // self._buffer)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: tokens, staging, weights, scales, barriers."""
        return self.stages * (self.stage + 16) + self.buffers * self._buffer + self._scales + self._normed

    @property
    def sides(self) -> int:
        """Slabs of a cluster's tile."""
        return self.cluster * self.groups

    @property
    def partial(self) -> int:
        """Bytes of a cluster's sums in the workspace."""
        return self.sides * 64 * self.tokens * 4

    def workspace(self, clusters: int) -> int:
        return FLAG_BYTES + clusters * self.partial
