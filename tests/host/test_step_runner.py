"""Logits that a backend answers: handed to the caller as they are, within bounds, and never taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from frink_numba.host import step_runner
from tests.golden.draws import integers

TOKENS = integers("decoder test", (40,), 80)


@pytest.fixture
def decoder(open_decoder):
    return open_decoder("llama_grouped")


def answering(decoder: Any, monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], np.ndarray]) -> list[np.ndarray]:
    """Let steps answer the logits that `make` gives: they lie in the list."""
    dispatcher, answered = decoder._open(), []
    real = dispatcher.run

    def run(step: Any) -> Any:
        result = real(step)
        if step.logits:
            result.logits = make(step)
            answered.append(result.logits)
        return result

    monkeypatch.setattr(dispatcher, "run", run)
    return answered


def numbered(decoder: Any) -> Callable[[Any], np.ndarray]:
    """Logits in a memory of their own, full of the step's position."""
    return lambda step: np.full((step.logits, decoder.model.vocab_size), step.start_pos, np.float32)


def test_the_last_logits_are_handed_over_without_a_copy(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = answering(decoder, monkeypatch, numbered(decoder))
    cache = decoder.new_cache()
    outputs = [decoder.prefill(TOKENS[:20], cache, chunk_size=8), decoder.decode(3, cache)]
    assert [len(logits) for logits in answered] == [1, 1], "of the last chunk alone"
    for output, logits, start in zip(outputs, answered, (16, 20), strict=True):
        assert np.shares_memory(output.logits, logits)
        assert output.logits.shape == (decoder.model.vocab_size,)
        assert (output.logits == start).all()


def test_callers_who_keep_many_get_copies(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in page-locked memory is bounded; when they let go, the next are handed over again."""
    monkeypatch.setattr(step_runner, "HANDED_OVER_BYTES", 3 * 4 * decoder.model.vocab_size)
    answered = answering(decoder, monkeypatch, numbered(decoder))
    cache = decoder.new_cache()
    kept = [decoder.decode(3, cache).logits for _ in range(6)]
    shared = [np.shares_memory(logits, own) for logits, own in zip(answered, kept, strict=True)]
    assert shared == [True] * 3 + [False] * 3
    assert [int(logits[0]) for logits in kept] == list(range(6))
    answered.clear()
    part = kept[1][5:7]  # keeps all of its memory
    del kept
    logits = [decoder.decode(3, cache).logits for _ in range(3)]
    assert [np.shares_memory(a, b) for a, b in zip(answered, logits, strict=True)] == [True, True, False]
    assert part.tolist() == [1, 1]


@pytest.mark.parametrize("kind", ["float64", "read-only"])
def test_what_callers_could_not_use_is_copied(kind: str, decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(step: Any) -> np.ndarray:
        logits = numbered(decoder)(step).astype(np.float64 if kind == "float64" else np.float32)
        logits.flags.writeable = kind == "float64"
        return logits

    answering(decoder, monkeypatch, make)
    logits = decoder.prefill(TOKENS[:4], decoder.new_cache()).logits
    assert logits.dtype == np.float32
    logits += 1
    assert (logits == 1).all()
