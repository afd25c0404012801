"""What a tensor-core product does with its sums: the choices, and the sizes that follow from them.

    value = acc * row_scale[n] * token_scale[m] + bias[n]          (plain)
    value = act(gate) * up, both as above without bias              (gated: rows g are gate, g + 8 are up)

An f16 result is written as value / out_scale[m], where out_scale is the power of two that keeps the largest possible
value under 2**15: |value| <= (norm * c2 + c1) * norm + c0 with the 2-norm of the token's input row. The bound is loose,
which costs nothing: f16 loses accuracy only 2**29 below the top. `gemm_store.py` emits the code.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 8192  # the most bytes that a warp group stages at a time, where the tile's tokens have a divisor for it
_LARGEST_CHUNK = 14336  # rather than chunks of 16 tokens or fewer

GATES = ("", "swiglu", "geglu", "geglu_erf")  # see gates.py


def chunk_tokens(tokens: int, token_bytes: int) -> int:
    """Tokens of a tile that are staged at a time: a multiple of 8 that divides the tile's; `token_bytes` of each."""
    sizes = [size for size in range(8, tokens + 1, 8) if tokens % size == 0]
    most = CHUNK if tokens <= 192 else CHUNK // 2  # the widest tiles need the room for their stages
    fits = max((size for size in sizes if size * token_bytes <= most), default=8)
    larger = [size for size in sizes if fits < size and size * token_bytes <= _LARGEST_CHUNK]
    return larger[0] if fits <= 16 and larger else fits


@dataclass(frozen=True, slots=True)
class Epilogue:
    """gate: one of GATES, "" for none; half: f16 result with a power of two per token, else float32."""

    gate: str = ""
    half: bool = False

    @property
    def columns(self) -> int:
        """Result columns of a slab of 64 weight rows."""
        return 32 if self.gate else 64

    @property
    def item(self) -> int:
        return 2 if self.half else 4

    @property
    def box_columns(self) -> int:
        """Columns of one box of the result's tensor map: at most 128 bytes."""
        return min(self.columns, 128 // self.item)

    @property
    def swizzle(self) -> int:
        """Bytes of the swizzle pattern of a box: 64 or 128."""
        return self.box_columns * self.item

    def chunk_tokens(self, tokens: int) -> int:
        return chunk_tokens(tokens, self.columns * self.item)

    def chunks(self, tokens: int) -> int:
        return tokens // self.chunk_tokens(tokens)

    def scale_size(self, tokens: int) -> int:
        """Bytes of the tokens' scales in shared memory, of one warp group."""
        return max(128, tokens * (8 if self.half else 4))

    def buffer_size(self, tokens: int) -> int:
        """Bytes of one staging buffer of one warp group, a multiple of 1024."""
        return -(-self.chunk_tokens(tokens) * self.columns * self.item // 1024) * 1024


PLAIN = Epilogue()
