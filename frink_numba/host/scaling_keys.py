"""The rotary scaling of a model, read from its keys `ARCH.rope.scaling.*`, which must tell of one kind of scaling.

A key of YaRN in a file that does not name YaRN contradicts it: the file would run with another rotation than it was
made for, and be wrong without a word.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from frink_numba.host.architectures import Architecture
from frink_numba.host.key_reader import KeyReader
from frink_numba.host.rope_scaling import RopeScaling, ScalingKind, yarn_magnitude

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"

_TYPE, _FACTOR, _OLD_FACTOR = "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"
_ORIGINAL, _MAGNITUDE = "rope.scaling.original_context_length", "rope.scaling.attn_factor"
_YARN = "rope.scaling.yarn_"  # how YaRN's keys start
_YARN_MAGNITUDE, _FAST, _SLOW = f"{_YARN}attn_factor", f"{_YARN}beta_fast", f"{_YARN}beta_slow"
SCALING_KEYS = frozenset({_TYPE, _FACTOR, _OLD_FACTOR, _ORIGINAL, _MAGNITUDE, _YARN_MAGNITUDE, _FAST, _SLOW})

_FLOAT32_ROUNDING = 2.0**-23  # relative


def read_scaling(reader: KeyReader, architecture: Architecture, tensors: Collection[str], theta: float) -> RopeScaling:
    """`tensors`: the names of the file's tensors; `theta`: the rotation's base.

    As in llama.cpp, a factor without a type is linear, and the factor tensors of LongRoPE need no type. GgufError for
    keys that contradict each other, UnsupportedModelError for a kind or a magnitude that is not served.
    """
    long_factors = architecture.rope_factors and (LONG_FACTORS in tensors or SHORT_FACTORS in tensors)
    factor = _factor(reader)
    kind = _kind(reader, factor, long_factors)
    _refuse_keys_of_others(reader, kind, factor)
    if kind is ScalingKind.LONGROPE:
        if not reader.has(_MAGNITUDE):
            reader.fail(_MAGNITUDE, "is missing, which LongRoPE's factors need")
        return RopeScaling(kind, 1.0, reader.integer(_ORIGINAL), magnitude=reader.number(_MAGNITUDE))
    if kind is ScalingKind.YARN:
        if theta == 1:
            reader.fail("rope.freq_base", "is 1, with which YaRN can tell no pair from another")
        assert factor is not None
        scaling = RopeScaling(
            kind,
            factor,
            reader.integer(_ORIGINAL),
            fast_turns=reader.number(_FAST, default=32.0),
            slow_turns=reader.number(_SLOW, default=1.0),
            magnitude=reader.number(_YARN_MAGNITUDE, default=yarn_magnitude(factor)),
        )
    else:
        scaling = RopeScaling(kind, 1.0 if factor is None else factor)
    _check_magnitude(reader, architecture, scaling)
    return scaling


def _factor(reader: KeyReader) -> float | None:
    factors = [reader.number(key) for key in (_FACTOR, _OLD_FACTOR) if reader.has(key)]
    if len(set(factors)) > 1:
        reader.fail(_FACTOR, f"is {factors[0]:g}, but {_OLD_FACTOR} is {factors[1]:g}")
    return factors[0] if factors else None


def _kind(reader: KeyReader, factor: float | None, long_factors: bool) -> ScalingKind:
    default = ScalingKind.LONGROPE if long_factors else ScalingKind.NONE if factor is None else ScalingKind.LINEAR
    name = reader.text(_TYPE, default=default.value)
    if name not in (kind.value for kind in ScalingKind):
        known = ", ".join(kind.value for kind in ScalingKind)
        reader.refuse(_TYPE, f"is {name[:80]!r}; {known} and rope_freqs.weight are served")
    kind = ScalingKind(name)
    if long_factors != (kind is ScalingKind.LONGROPE):
        there = "there are" if long_factors else "there are no"
        reader.fail(_TYPE, f"is {name!r}, but {there} tensors {LONG_FACTORS!r} and {SHORT_FACTORS!r}")
    if kind in (ScalingKind.NONE, ScalingKind.LONGROPE) and factor not in (None, 1.0):
        reader.fail(_FACTOR, f"is {factor:g}, but {_TYPE} is {name!r}")
    if kind in (ScalingKind.LINEAR, ScalingKind.YARN) and factor is None:
        reader.fail(_TYPE, f"is {name!r}, but there is no {_FACTOR}")
    return kind


def _refuse_keys_of_others(reader: KeyReader, kind: ScalingKind, factor: float | None) -> None:
    """Refuse YaRN's keys without YaRN, and an original context that nothing is scaled from."""
    if kind is not ScalingKind.YARN:
        stated = f"{_TYPE} is {kind.value!r}" if reader.has(_TYPE) else f"there is no {_TYPE}"
        for key in reader.names():
            if key.startswith(_YARN):
                reader.fail(key[:80], f"is there, which is a key of YaRN, but {stated}")
    if reader.has(_TYPE) or kind is ScalingKind.LONGROPE or not reader.has(_ORIGINAL):
        return
    original, context = reader.integer(_ORIGINAL), reader.integer("context_length")
    if factor is not None:
        reader.fail(_ORIGINAL, f"is {original} beside a factor of {factor:g}, but there is no {_TYPE} that needs both")
    if original != context:  # equal in phi3's files without LongRoPE: nothing is scaled
        reader.fail(
            _ORIGINAL,
            f"is {original} and context_length is {context}, but neither {_TYPE} nor LongRoPE's factors are there",
        )


def _check_magnitude(reader: KeyReader, architecture: Architecture, scaling: RopeScaling) -> None:
    """Outside LongRoPE the common magnitude is served where it changes nothing: 1, or YaRN's own once more."""
    magnitude = reader.number(_MAGNITUDE, default=1.0)
    yarns = yarn_magnitude(scaling.factor)
    repeated = (
        architecture.states_magnitude
        and scaling.kind is ScalingKind.YARN
        and all(math.isclose(each, yarns, rel_tol=_FLOAT32_ROUNDING) for each in (magnitude, scaling.magnitude))
    )
    if magnitude != 1 and not repeated:
        reader.refuse(_MAGNITUDE, f"is {magnitude:g}, but {_TYPE} is {scaling.kind.value!r}")
