"""Answers that go on together on a device: what each would be alone, whatever fails in the middle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count

import numpy as np
import pytest

from frink_numba import registry
from frink_numba.cuda.backend import CudaBackend
from frink_numba.errors import FrinkError
from frink_numba.host import token_source
from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from frink_numba.host.model import Model
from frink_numba.layer import Layer
from tests.cuda import fake_tensor_kernels as compute
from tests.cuda.fake_gpu import FakeRuntime
from tests.cuda.fake_tensor import tensor_device
from tests.golden.tiny_gguf import write
from tests.golden.tiny_text import BOS, TOKENS, text_content

PROMPTS = [[BOS, *text.encode()] for text in ("the quick brown fox", "a", "jumps", "over the lazy dog")]
NEW = 10
NEAR = 1e-2  # of the logits' norm: two tokens whose logits are so near may change places


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Its vocabulary is padded, and one of the rows beyond would often be the most likely."""
    file = text_content()
    file.tensors["output.weight"][TOKENS:] = 3 * file.tensors["output.weight"][:1]
    with load(write(file, tmp_path_factory.mktemp("model") / "m.gguf")) as model:
        yield model


@pytest.fixture
def on_device(model: Model, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Decoder, FakeRuntime]]:
    """on_device(tier): a decoder over a fake device and the host, and the device's runtime."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(token_source, "MOST_SECONDS", 1e9)  # fakes take their time

    def make(tier: str = "wgmma") -> tuple[Decoder, FakeRuntime]:
        device = tensor_device(tier)

        def backend(layers: Sequence[Layer]) -> CudaBackend:
            return CudaBackend(layers, device)

        registry.register_backend("cuda", backend, replace=True)
        return Decoder(model, "cuda,host"), device.runtime

    return make


def tokens_of(decoder: Decoder, **how) -> list[list[int]]:
    batch = decoder.generate_batch(PROMPTS, max_new_tokens=NEW, **how)
    for _ in batch:
        pass
    return [answer.tokens for answer in batch.answers]


def assert_greedy(model: Model, answers: Sequence[Sequence[int]]) -> None:
    """Every token is the likeliest for the host, behind those before it, or as good as that."""
    with Decoder(model, "host") as host:
        for prompt, tokens in zip(PROMPTS, answers, strict=True):
            assert len(tokens) == NEW
            logits = host.prefill([*prompt, *tokens[:-1]], host.new_cache(), logits="all").logits
            rows = logits[len(prompt) - 1 :, :TOKENS]
            behind = rows.max(axis=1) - rows[np.arange(len(tokens)), tokens]
            assert (behind <= NEAR * np.linalg.norm(rows, axis=1)).all()


@pytest.mark.parametrize("tier", ["wgmma", "mma"])
def test_greedy_answers_are_the_hosts(model: Model, tier: str, on_device):
    """R24: one wait for the device a block of steps of all, and no logits behind the prompts'."""
    decoder, runtime = on_device(tier)
    assert_greedy(model, tokens_of(decoder))
    blocks = [1, 4, 4]
    assert sum(blocks) == NEW - 1
    assert runtime.waits == 1 + len(blocks)
    stats = decoder._dispatcher.backends[0].stats
    assert stats.logits_down == 4 * len(PROMPTS) * decoder.model.vocab_size


def test_answers_do_not_depend_on_who_goes_along(model: Model, on_device):
    """Single steps and groups of other sizes: the same tokens, or ones as likely."""
    decoder, _ = on_device()
    assert_greedy(
        model, [[piece.token for piece in decoder.generate(prompt, max_new_tokens=NEW)] for prompt in PROMPTS]
    )


def test_drawn_answers_take_the_logits(model: Model, on_device):
    decoder, _ = on_device()
    drawn = tokens_of(decoder, temperature=0.7, seed=3)
    assert drawn == tokens_of(decoder, temperature=0.7, seed=3)
    assert drawn != tokens_of(decoder, temperature=0.7, seed=4)


def test_a_failure_at_any_call_costs_no_token(model: Model, on_device):
    """R21, at calls all through the generation: the rest of the answers is right, whoever serves it."""
    decoder, runtime = on_device()
    tokens_of(decoder)
    calls = len(runtime.calls)
    for at in range(0, calls, max(1, calls // 40)):
        decoder, runtime = on_device()
        runtime.fail_at = at
        assert_greedy(model, tokens_of(decoder))


def test_a_device_lost_in_the_middle(model: Model, on_device):
    decoder, runtime = on_device()
    batch = decoder.generate_batch(PROMPTS, max_new_tokens=NEW)
    for number, _ in enumerate(batch):
        if number == 17:
            runtime.fail_at, runtime.sticky = len(runtime.calls) + 3, True
    assert_greedy(model, [answer.tokens for answer in batch.answers])


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_steps_of_one_cache_after_groups_write_to_that_cache(
    rows: int, grows: bool, model: Model, on_device, segments: None
):
    """R10, of steps by themselves, over caches that a group saw first, or when they had moved: the host's K/V rows.

    Long steps come again as graphs, as those of real models do.
    """
    decoder, _ = on_device()
    texts = [[BOS, *bytes(range(40 + number, 60 + number))] for number in range(3)]
    alone = [65 + number % 7 for number in range(rows)]
    caches = [decoder.new_cache() for _ in texts]
    for number in range(3):
        for cache in caches if number else ():
            decoder.prefill(alone, cache)
            if grows:
                cache.reserve(2 * cache[0].buffers[0].shape[0])
        decoder.prefill_batch(texts, caches)
    with Decoder(model, "host") as host:
        for text, cache in zip(texts, caches, strict=True):
            whole = host.new_cache()
            host.prefill([*text, *alone, *text, *alone, *text], whole)
            for got, want in zip(cache, whole, strict=True):
                for one, other in zip(got.prefix(), want.prefix(), strict=True):
                    assert np.linalg.norm(one - other) < 5e-3 * np.linalg.norm(other)


@pytest.mark.parametrize("budget", range(1_000_000, 1_600_000, 60_000))
def test_steps_behind_groups_stay_within_the_budget(budget: int, on_device, monkeypatch: pytest.MonkeyPatch):
    """Spare scratch takes no room from embedding and output matrix, or from what rows leave that need more room."""
    monkeypatch.setenv("FRINK_CUDA_MEMORY", str(budget))
    decoder, runtime = on_device()
    caches = [decoder.new_cache() for _ in PROMPTS]
    for _ in decoder.generate_batch(PROMPTS, max_new_tokens=NEW, caches=caches):
        assert runtime.held <= budget
    for cache in caches:
        decoder.prefill([65 + number % 9 for number in range(256)], cache)
        assert runtime.held <= budget


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[int, int]], None]:
    """spoilt({n: row}): in the n-th choice, counted from 1, the row's logits are not numbers."""

    def spoilt(rows: Mapping[int, int]) -> None:
        real, calls = compute.argmax, count(1)

        def argmax(memory, variant, blocks, a):
            row = rows.get(next(calls))
            if row is not None:
                memory(a.logits, (row + 1, a.pitch), np.float32)[row, 7] = np.nan
            real(memory, variant, blocks, a)

        monkeypatch.setattr(compute, "argmax", argmax)

    return spoilt


@pytest.mark.parametrize("rows", [{1: 1}, {2: 1}, {4: 1, 6: 1}, {6: 1}, {8: 1, 10: 0}], ids=str)
def test_logits_that_are_no_numbers_end_their_answer_alone(rows: Mapping[int, int], on_device, spoilt):
    """At the begin of a block or within it: the tokens before them stay, and the others go on together."""
    want = tokens_of(on_device()[0])
    spoilt(rows)
    decoder, _ = on_device()
    caches = [decoder.new_cache() for _ in PROMPTS]
    batch = decoder.generate_batch(PROMPTS, max_new_tokens=NEW, caches=caches)
    with pytest.raises(FrinkError, match=r"^prompt 1: the logits are not numbers"):
        list(batch)
    at = min(rows)
    assert [answer.tokens for answer in batch.answers] == [want[0], want[1][:at], *want[2:]]
    assert [answer.finish_reason for answer in batch.answers] == ["length", None, "length", "length"]
    for prompt, answer in zip(PROMPTS, batch.answers, strict=True):
        assert answer.cache.positions == len(prompt) + len(answer.tokens) - 1


def test_a_member_whose_logits_are_no_numbers_has_no_tokens(on_device, spoilt):
    """R10: `decode_batch` leaves its cache as it was, and counts the rows of the others."""
    spoilt({1: 1})
    decoder, _ = on_device()
    caches = [decoder.new_cache() for _ in PROMPTS]
    decoder.prefill_batch(PROMPTS, caches)
    outputs = decoder.decode_batch([65] * len(PROMPTS), caches, ahead=3)
    sizes = [len(output.tokens) for output in outputs]
    assert sizes == [3, 0, 3, 3]
    assert [cache.positions for cache in caches] == [len(p) + n for p, n in zip(PROMPTS, sizes, strict=True)]


def test_texts_are_scored_on_the_device(model: Model, on_device):
    """Log-probabilities, without logits or K/V rows on the bus; the host's values."""
    decoder, _ = on_device()
    inputs, targets = [prompt[:-1] for prompt in PROMPTS[:1] + PROMPTS[2:]], [p[1:] for p in PROMPTS[:1] + PROMPTS[2:]]
    got = decoder.prefill_batch(inputs, targets=targets)
    stats = decoder._dispatcher.backends[0].stats
    assert (stats.logits_down, stats.kv_down) == (0, 0)
    with Decoder(model, "host") as host:
        for one, other in zip(got, host.prefill_batch(inputs, targets=targets), strict=True):
            np.testing.assert_allclose(one.scores, other.scores, atol=0.1)
            assert np.abs(one.scores).max() > 0.5
