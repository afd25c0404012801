"""The scratch block of a run as the typed arrays that its layers work on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frink_numba.backend import Edges
from frink_numba.cuda.arena import float_bytes
from frink_numba.cuda.parts import rope_key
from frink_numba.cuda.shapes import LayerShape
from frink_numba.layer import Layer


class ScratchShape:
    """The sizes that a run's scratch must have room for: the largest of its layers."""

    def __init__(self, shapes: Sequence[LayerShape], rope_tables: int) -> None:
        self.rope_tables = rope_tables
        self.hidden = max(shape.hidden for shape in shapes)
        self.query_width = max(shape.query_width for shape in shapes)
        self.kv_width = max(shape.kv_width for shape in shapes)
        self.ffn = max(shape.ffn for shape in shapes)
        self.slots = min(2, len(shapes))  # one layer's K/V rows come down while the next layer runs
        self.rope_pairs = max(shape.rope_pairs for shape in shapes)

    @classmethod
    def of(cls, layers: Sequence[Layer]) -> ScratchShape:
        return cls([LayerShape.of(layer) for layer in layers], len({rope_key(layer) for layer in layers} - {None}))

    def parts(self, batch: int, start_pos: int) -> dict[str, int]:
        """Elements of float32 of every part, by name, in the order they lie in the block."""
        total = start_pos + batch
        parts = {
            "hidden": batch * self.hidden,
            "normed": batch * self.hidden,
            "projected": batch * self.hidden,
            "queries": batch * self.query_width,
            "attended": batch * self.query_width,
            "gate": batch * self.ffn,
            "up": batch * self.ffn,
        }
        for slot in range(self.slots):
            parts[f"keys{slot}"] = total * self.kv_width
            parts[f"values{slot}"] = total * self.kv_width
        for table in range(self.rope_tables):
            parts[f"cos{table}"] = batch * self.rope_pairs
            parts[f"sin{table}"] = batch * self.rope_pairs
        return parts

    def nbytes(self, batch: int, start_pos: int, edges: Edges | None = None, logits: int = 0) -> int:
        """Bytes of the whole block; nothing for logits, which this tier does not make."""
        return float_bytes(*self.parts(batch, start_pos).values())


@dataclass(slots=True)
class Slot:
    """K/V memory of one layer at a time: prefix rows, then the batch's own."""

    keys: Any  # [start_pos + batch, n_kv_heads, head_dim]
    values: Any
    key_prefix: Any  # [start_pos, n_kv_heads, head_dim]
    value_prefix: Any
    new_keys: Any  # [batch, n_kv_heads, head_dim]
    new_values: Any
    key_rows: Any  # [batch, n_kv_heads * head_dim]
    value_rows: Any


class Views:
    """The scratch block as the arrays that layers of one shape work on."""

    def __init__(self, parts: dict[str, Any], shape: LayerShape, batch: int, start_pos: int, slots: int) -> None:
        def view(name: str, *dims: int) -> Any:
            return parts[name][: math.prod(dims)].reshape(*dims)

        heads, kv_heads, head_dim, total = shape.n_heads, shape.n_kv_heads, shape.head_dim, start_pos + batch
        self.normed = view("normed", batch, shape.hidden)
        self.projected = view("projected", batch, shape.hidden)
        self.queries = view("queries", batch, shape.query_width)
        self.query_heads = view("queries", batch, heads, head_dim)
        self.query_head_rows = view("queries", batch * heads, head_dim)
        self.attended = view("attended", batch, shape.query_width)
        self.attended_heads = view("attended", batch, heads, head_dim)
        self.gate = view("gate", batch, shape.ffn)
        self.up = view("up", batch, shape.ffn)
        self.slots = []
        for slot in range(slots):
            keys = view(f"keys{slot}", total, kv_heads, head_dim)
            values = view(f"values{slot}", total, kv_heads, head_dim)
            new_keys, new_values = keys[start_pos:total], values[start_pos:total]
            self.slots.append(
                Slot(
                    keys,
                    values,
                    keys[:start_pos],
                    values[:start_pos],
                    new_keys,
                    new_values,
                    new_keys.reshape(batch, shape.kv_width),
                    new_values.reshape(batch, shape.kv_width),
                )
            )
        self.new_key_head_rows = [slot.new_keys.reshape(batch * kv_heads, head_dim) for slot in self.slots]
