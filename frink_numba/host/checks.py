"""What a decoder checks before it runs anything: token ids, layers, caches. Errors leave all as it was."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import numpy as np

from frink_numba.errors import CacheError, PromptError, SettingError
from frink_numba.host.integers import checked_integer, shown
from frink_numba.host.kv_cache import KVCache
from frink_numba.layer import Layer

_Checked = TypeVar("_Checked")


def checked_tokens(tokens: Sequence[int] | np.ndarray, vocab: int) -> np.ndarray:
    """Token ids int64 [n], n > 0, each inside the vocabulary."""
    if isinstance(tokens, str | bytes):
        raise PromptError("the prompt is text; encode it first (model.tokenizer.encode), or call generate")
    try:
        ids = np.asarray(tokens)
    except ValueError:
        raise PromptError("a prompt is a flat list of token ids, not a ragged one") from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise PromptError(f"a prompt is a flat list of token ids, not {ids.dtype} of shape {list(ids.shape)}")
    if not ids.size:
        raise PromptError("the prompt is empty: give at least one token")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        wrong = low if low < 0 else high
        raise PromptError(f"token {wrong} is outside the vocabulary: ids are from 0 to {vocab - 1}")
    return ids.astype(np.int64, copy=False)


def checked_layers(layers: Collection[int], count: int) -> frozenset[int]:
    """Numbers of layers, of which there are `count`."""
    if isinstance(layers, tuple) and not layers:
        return frozenset()
    if isinstance(layers, str) or not isinstance(layers, Collection | np.ndarray):
        raise SettingError(f"hidden={shown(layers)}: expected numbers of layers, such as (0, 5)")
    return frozenset(checked_integer("hidden", layer, 0, count - 1) for layer in layers)


def check_is_cache(cache: KVCache) -> None:
    if not isinstance(cache, KVCache):
        raise CacheError(f"the cache is a {type(cache).__name__}; make one with decoder.new_cache()")


def check_cache(cache: KVCache, layers: Sequence[Layer], context: int, count: int, start: int | None = None) -> None:
    """The cache is for `layers` and at most `context` positions, at `start` if given, and `count` more tokens fit."""
    check_is_cache(cache)
    if cache.context_length > context:
        raise CacheError(
            f"the cache is for {cache.context_length} positions, but the model's context is {context}: make one with "
            "decoder.new_cache()"
        )
    if cache.layers is not layers:
        _check_widths(layers, cache)
    at = cache.positions
    if start is not None and checked_integer("start", start, 0) != at:
        raise CacheError(f"the cache is at position {at}, not at {start}; truncate it or prefill the difference")
    if at + count > cache.context_length:
        raise PromptError(
            f"{count} tokens do not fit behind the cache's {at}: the context is {cache.context_length} tokens"
        )


def _check_widths(layers: Sequence[Layer], cache: KVCache) -> None:
    """A cache that was made for other layer descriptions fits these."""
    if len(cache) != len(layers):
        raise CacheError(f"the cache has {len(cache)} layers, the model {len(layers)}: it is another model's")
    for number, (layer, rows) in enumerate(zip(layers, cache, strict=True)):
        spec = layer.attention
        if (rows.n_kv_heads, rows.key_dim, rows.value_dim) != (spec.n_kv_heads, spec.head_dim, spec.head_dim):
            raise CacheError(
                f"layer {number}: the cache holds {rows.n_kv_heads} heads of {rows.key_dim} and {rows.value_dim} "
                f"channels, the model has {spec.n_kv_heads} of {spec.head_dim}: it is another model's"
            )


def checked_caches(caches: Sequence[KVCache], count: int) -> list[KVCache]:
    """A cache for each of `count` prompts, none of them twice."""
    held = list(caches)
    if len(held) != count:
        raise CacheError(f"{count} prompts, but {len(held)} caches")
    for number, cache in enumerate(held):
        about(number, check_is_cache, cache)
    if len({id(cache) for cache in held}) != len(held):
        raise CacheError("each prompt needs a cache of its own: one is there twice")
    return held


def checked_targets(
    targets: Sequence[Sequence[int] | np.ndarray], prompts: Sequence[np.ndarray], vocab: int
) -> list[np.ndarray]:
    """As many targets as each prompt has tokens, each inside the vocabulary."""
    if len(targets) != len(prompts):
        raise PromptError(f"{len(prompts)} prompts, but targets of {len(targets)}")
    found = [about(number, checked_tokens, own, vocab) for number, own in enumerate(targets)]
    for number, (own, prompt) in enumerate(zip(found, prompts, strict=True)):
        if len(own) != len(prompt):
            raise PromptError(f"prompt {number}: {len(prompt)} tokens, but {len(own)} targets")
    return found


def about(number: int, check: Callable[..., _Checked], *arguments: Any, **options: Any) -> _Checked:
    """What `check` answers; its error says that it is about prompt `number`."""
    try:
        return check(*arguments, **options)
    except (PromptError, CacheError) as error:
        raise type(error)(f"prompt {number}: {error}") from None
