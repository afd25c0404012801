"""Why a device does not serve a layer, whatever else is in the step (R4, R5, R12 to R19); nothing asks the device."""

from __future__ import annotations

from frink_numba.backend import LayerCache
from frink_numba.cuda.body import Body
from frink_numba.cuda.classify import decline_reason
from frink_numba.cuda.shapes import check_layer
from frink_numba.errors import ShapeError
from frink_numba.layer import Layer


def static_reason(layer: Layer, body: Body) -> str | None:
    """What the layer's description gives against it: a feature that no kernel has, or parts that do not fit."""
    reason = decline_reason(body.judged(layer))
    if reason is None:
        try:
            check_layer(layer)
        except ShapeError as error:
            return str(error)
        reason = body.why_not(layer)
    return reason


def cache_reason(cache: LayerCache, layer: Layer, start_pos: int) -> str | None:
    """R12 and R13: the cache holds exactly the positions before the batch, in the model's shape."""
    if cache.positions != start_pos or cache.rows != start_pos:
        return "its cache does not hold exactly the rows before the batch"
    spec = layer.attention
    if (cache.n_kv_heads, cache.key_dim, cache.value_dim) != (spec.n_kv_heads, spec.head_dim, spec.head_dim):
        return "its cache has other K/V heads or widths than the layer"
    return None
