"""The scratch block of a run as the typed arrays that its layers work on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from frink_numba.cuda.shapes import LayerShape


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
