"""Answers that go on together in models with sliding windows: on a device, on the host, and with rows evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from frink_numba import registry
from frink_numba.cuda.backend import CudaBackend
from frink_numba.host import token_source
from frink_numba.host.decoder import Decoder
from frink_numba.host.generate_batch import BatchGeneration
from frink_numba.host.load import load
from frink_numba.layer import Layer
from tests.cuda.fake_tensor import tensor_device
from tests.golden.tiny import VARIANTS
from tests.golden.tiny_gguf import write
from tests.golden.tiny_text import BOS, TOKENS, text_content

# Shorter than the window of 7, and growing beyond it within a block; as long; longer by far.
PROMPTS = [[BOS, *text.encode()] for text in ("a", "jumps!", "the quick brown fox", "over the lazy dog")]
NEW = 24
HEAD = 32  # channels, so that steps of a token have their own kernel
WINDOWED = [name for name, v in VARIANTS.items() if v.window and not v.experts and not v.adapted]
HOW = {"greedy": {}, "drawn": {"temperature": 1.5, "seed": 5}}
NEAR = 1e-2  # of the logits' norm: two tokens whose logits are so near may change places
ERROR = 1e-2  # of a position's row, the last layer's included

Make = Callable[..., Decoder]


@pytest.fixture
def decoder_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    """decoder_of(variant, backends, tier) over a model that reads and writes bytes; `cuda` is a fake device."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(token_source, "MOST_SECONDS", 1e9)  # fakes take their time
    opened = ExitStack()

    def make(name: str, backends: str = "cuda,host", tier: str = "wgmma") -> Decoder:
        def backend(layers: Sequence[Layer]) -> CudaBackend:
            return CudaBackend(layers, tensor_device(tier))

        registry.register_backend("cuda", backend, replace=True)
        file = text_content(replace(VARIANTS[name], head_dim=HEAD))
        return opened.enter_context(
            Decoder(opened.enter_context(load(write(file, tmp_path / f"{name}.gguf"))), backends)
        )

    with opened:
        yield make


def started(decoder: Decoder, **how) -> BatchGeneration:
    caches = [decoder.new_cache() for _ in PROMPTS]
    return decoder.generate_batch(PROMPTS, max_new_tokens=NEW, caches=caches, **how)


def assert_rows_are_the_hosts(host: Decoder, batch: BatchGeneration, *, greedy: bool) -> None:
    """K/V rows of every layer, and every chosen token, against one prefill of each answer on the host."""
    for prompt, answer in zip(PROMPTS, batch.answers, strict=True):
        whole = host.new_cache()
        logits = host.prefill([*prompt, *answer.tokens[:-1]], whole, logits="all").logits
        for got, want in zip(answer.cache, whole, strict=True):
            for one, other in zip(got.prefix(), want.prefix(), strict=True):
                other = other[len(other) - len(one) :]  # the others were evicted
                errors = np.linalg.norm(one - other, axis=(1, 2)) / np.linalg.norm(other, axis=(1, 2))
                assert errors.max() < ERROR
        rows = logits[len(prompt) - 1 :, :TOKENS]
        behind = rows.max(axis=1) - rows[np.arange(len(rows)), answer.tokens]
        assert not greedy or (behind <= NEAR * np.linalg.norm(rows, axis=1)).all()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", WINDOWED)
def test_a_group_on_the_device_sees_what_the_host_sees(name: str, how: str, decoder_of: Make, segments: None):
    """R18, R24: layers with and without a window, over prompts on both sides of its length; both tiers in turn."""
    decoder = decoder_of(name, tier=("wgmma", "mma")[WINDOWED.index(name) % 2])
    batch = started(decoder, **HOW[how])
    list(batch)
    assert sum(len(answer.tokens) > 7 for answer in batch.answers) > 2
    assert {row.backend for row in decoder.plan(batch=1).rows} == {"cuda"}
    calls = decoder._dispatcher.backends[0].device.runtime.calls
    assert ("decode_attention" in calls) is (VARIANTS[name].qk_norm != "whole")
    assert_rows_are_the_hosts(decoder_of(name, "host"), batch, greedy=how == "greedy")


@pytest.mark.parametrize("name", WINDOWED)
def test_a_group_on_the_host_answers_as_each_alone(name: str, decoder_of: Make):
    host = decoder_of(name, "host")
    batch = started(host, temperature=1.5, seed=5)
    list(batch)
    for prompt, answer in zip(PROMPTS, batch.answers, strict=True):
        alone = host.generate(prompt, max_new_tokens=NEW, temperature=1.5, seed=5)
        assert [piece.token for piece in alone] == answer.tokens
    assert_rows_are_the_hosts(host, batch, greedy=False)


@pytest.mark.parametrize("backends", ["host", "cuda,host"])
@pytest.mark.parametrize("name", ["mistral_window", "gemma3_two_bases"])
def test_rows_evicted_between_two_pieces_are_not_missed(name: str, backends: str, decoder_of: Make):
    """Fault 6, in groups: of some members, at different pieces, in the middle of blocks."""
    decoder = decoder_of(name, backends)
    batch, freed = started(decoder), 0
    for number, _ in batch:
        answer = batch.answers[number]
        if number in (0, 2) and len(answer.tokens) % (3 + number) == 0:
            freed += answer.cache.evict()
        assert answer.cache.positions == len(PROMPTS[number]) + len(answer.tokens) - 1
    assert freed > NEW
    assert_rows_are_the_hosts(decoder_of(name, "host"), batch, greedy=True)
