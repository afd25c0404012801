"""Greedy answers whose tokens a device chooses by itself: the host's answers, whatever fails in the middle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from frink_numba import registry
from frink_numba.cuda.backend import CudaBackend
from frink_numba.errors import FrinkError
from frink_numba.host import token_source
from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from frink_numba.host.model import Model
from frink_numba.host.token_source import MOST_AHEAD
from frink_numba.layer import Layer
from tests.cuda import fake_tensor_kernels as compute
from tests.cuda.fake_gpu import FakeCudaError, FakeRuntime
from tests.cuda.fake_tensor import tensor_device
from tests.golden.tiny_gguf import write
from tests.golden.tiny_text import BOS, TOKENS, text_content

PROMPT = [BOS, *b"the quick brown fox"]
NEW = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Its vocabulary is padded, and one of the rows beyond would often be the most likely."""
    file = text_content()
    file.tensors["output.weight"][TOKENS:] = 3 * file.tensors["output.weight"][:1]
    file.metadata["tokenizer.ggml.eos_token_id"] = 258
    path = write(file, tmp_path_factory.mktemp("model") / "m.gguf")
    with load(path) as model:
        yield model


@pytest.fixture
def on_device(model: Model, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Decoder, FakeRuntime]]:
    """on_device(schedule, seed): a decoder over a fake device and the host, and the device's runtime."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(token_source, "MOST_SECONDS", 1e9)  # fakes take their time

    def make(schedule: str = "lazy", seed: int = 0) -> tuple[Decoder, FakeRuntime]:
        device = tensor_device("wgmma", schedule=schedule, seed=seed)

        def backend(layers: Sequence[Layer]) -> CudaBackend:
            return CudaBackend(layers, device)

        registry.register_backend("cuda", backend, replace=True)
        return Decoder(model, "cuda,host"), device.runtime

    return make


def tokens_of(decoder: Decoder, n: int = NEW, **how) -> list[int]:
    return [piece.token for piece in decoder.generate(PROMPT, max_new_tokens=n, **how)]


def single_steps(decoder: Decoder, n: int = NEW) -> tuple[list[int], list[np.ndarray]]:
    """Greedy tokens with the host in between, and the K/V rows of the prompt and of all but the last."""
    cache, chosen = decoder.new_cache(), []
    logits = decoder.prefill(PROMPT, cache).logits
    while True:
        chosen.append(int(logits[:TOKENS].argmax()))
        if len(chosen) == n:
            return chosen, [part.copy() for layer in cache for part in layer.prefix()]
        logits = decoder.decode(chosen[-1], cache).logits


@pytest.mark.parametrize("schedule", ["lazy", "random", "reversed"])
def test_an_answer_is_that_of_single_steps(schedule: str, on_device):
    """R24: tokens and rows to the bit; after each piece the cache holds the prompt and the new tokens but the last."""
    decoder, _ = on_device()
    want, rows = single_steps(decoder)
    decoder, runtime = on_device(schedule, 3)
    answer = decoder.generate(PROMPT, max_new_tokens=NEW)
    got = []
    for piece in answer:
        got.append(piece.token)
        assert answer.cache.positions == len(PROMPT) + len(got) - 1
    assert got == want
    assert len(set(want)) > 5
    for one, other in zip((part for layer in answer.cache for part in layer.prefix()), rows, strict=True):
        np.testing.assert_array_equal(one, other)
    assert runtime.waits == 1 + 4  # the prompt, and blocks of 1, 4, 16 and the last 2 tokens


def test_blocks_grow_to_their_most(on_device):
    decoder, runtime = on_device()
    made = len(tokens_of(decoder, None))
    assert made > 90  # until the context is full
    most = [1, 4, 16, MOST_AHEAD]
    assert runtime.waits == 1 + len(most) + -(-(made - 1 - sum(most)) // MOST_AHEAD)


def test_a_slow_device_still_answers_piece_by_piece(on_device, monkeypatch: pytest.MonkeyPatch):
    """A block takes no longer than a tenth of a second, as far as the one before can tell; the answer is the same."""
    decoder, _ = on_device()
    want, _ = single_steps(decoder)
    real, blocks = Decoder.decode_ahead, []
    clock = [0.0]

    def slow(self, token, cache, most, **how):
        chosen = real(self, token, cache, most, **how)
        clock[0] += 0.03 * len(chosen)
        blocks.append(len(chosen))
        return chosen

    monkeypatch.setattr(Decoder, "decode_ahead", slow)
    monkeypatch.setattr(token_source, "MOST_SECONDS", 0.1)
    monkeypatch.setattr(token_source.time, "perf_counter", lambda: clock[0])
    assert tokens_of(decoder) == want
    assert max(blocks) == 3
    blocks.clear()
    monkeypatch.setattr(token_source, "MOST_SECONDS", 0.01)
    assert tokens_of(decoder) == want
    assert set(blocks) == {1}


def test_the_context_ends_an_answer_to_the_token(on_device):
    decoder, _ = on_device()
    want, _ = single_steps(decoder, 12)
    cache = decoder.new_cache(len(PROMPT) + 11)
    answer = decoder.generate(PROMPT, cache=cache)
    assert [piece.token for piece in answer] == want
    assert (answer.finish_reason, cache.positions) == ("context", cache.context_length)


def test_an_answer_that_ends_within_a_block_leaves_nothing_behind(on_device):
    """A stop string, an early close, and what comes after them over the same cache (R10)."""
    decoder, _ = on_device()
    want, _ = single_steps(decoder, 40)
    for end in range(1, 20):
        answer = decoder.generate(PROMPT, max_new_tokens=40)
        for _ in range(end):
            next(answer)
        answer.close()
        cache = answer.cache
        assert cache.positions == len(PROMPT) + end - 1
        more = decoder.generate([want[end - 1]], cache=cache, max_new_tokens=10)
        assert [piece.token for piece in more] == want[end : end + 10]
    at = next(at for at in range(9, 40) if 32 < want[at] < 127 and want[at] not in want[:at])
    answer = decoder.generate(PROMPT, max_new_tokens=40, stop=[chr(want[at])])
    assert [piece.token for piece in answer] == want[: at + 1]
    assert answer.finish_reason == "stop"
    assert answer.cache.positions == len(PROMPT) + at


def test_a_cache_that_changes_between_two_pieces(on_device):
    """What was run ahead is forgotten, and computed again: no token is lost or said twice."""
    decoder, _ = on_device()
    want, _ = single_steps(decoder)
    for change in range(1, NEW - 1):
        answer = decoder.generate(PROMPT, max_new_tokens=NEW)
        got = []
        for piece in answer:
            got.append(piece.token)
            if len(got) == change:
                at = answer.cache.positions
                decoder.decode(7, answer.cache)
                answer.cache.truncate(at)
        assert got == want


FEW = 11  # behind the prompt, blocks of 1, 4 and 5 tokens


def calls_of(on_device) -> list[str]:
    decoder, runtime = on_device()
    before = len(runtime.calls)
    tokens_of(decoder, FEW)
    return runtime.calls[before:]


def test_a_failure_at_every_call_loses_and_repeats_no_token(on_device, model):
    """R21: of the prompt, of the first block and of every later one: the answer is the undisturbed one.

    The host takes the place of the step that failed. Its tokens are the device's unless two are as good as equal, so
    the model's are checked to be far apart.
    """
    decoder, _ = on_device()
    want, _ = single_steps(decoder, FEW)
    with Decoder(model, "host") as host:
        assert single_steps(host, FEW)[0] == want
    points = calls_of(on_device)
    kinds = {"send", "graph", "replay", "fetch_strided", "fetch", "synchronize", "argmax", "embed", "device_bytes"}
    assert kinds <= set(points)
    for point, name in enumerate(points):
        if name == "release":  # letting go of memory is not part of the work
            continue
        decoder, runtime = on_device("random", point)
        runtime.fail_at = len(runtime.calls) + point
        answer = decoder.generate(PROMPT, max_new_tokens=FEW)
        got = [piece.token for piece in answer]
        assert len(runtime.calls) > runtime.fail_at, name
        assert got == want, f"after failure {point}: {name}"
        assert answer.cache.positions == len(PROMPT) + FEW - 1


def test_a_device_that_is_lost_in_the_middle(on_device):
    """The host goes on for the rest of the answer."""
    decoder, _ = on_device()
    want, _ = single_steps(decoder, FEW)
    points = calls_of(on_device)
    for point in range(len(points) - 1, 0, -23):
        decoder, runtime = on_device()
        runtime.error, runtime.sticky = FakeCudaError("CUDA_ERROR_ILLEGAL_ADDRESS"), True
        runtime.fail_at = len(runtime.calls) + point
        assert tokens_of(decoder, FEW) == want


def test_logits_that_are_no_numbers_are_an_error_at_their_token(on_device, monkeypatch: pytest.MonkeyPatch):
    """As with single steps: the tokens before come first, and the cache holds their rows."""
    decoder, _ = on_device()
    want, _ = single_steps(decoder)
    real, calls = compute.argmax, []

    def spoilt(memory, variant, blocks, a):
        calls.append(None)
        if len(calls) >= 6:
            memory(a.logits, (a.pitch,), np.float32)[7] = np.nan
        real(memory, variant, blocks, a)

    monkeypatch.setattr(compute, "argmax", spoilt)
    decoder, _ = on_device()
    answer, got = decoder.generate(PROMPT, max_new_tokens=NEW), []
    with pytest.raises(FrinkError, match="not numbers"):
        got.extend(piece.token for piece in answer)
    assert answer.tokens == want[:6]
    assert answer.cache.positions == len(PROMPT) + 5


def test_sampling_goes_one_by_one(on_device):
    """Temperature and penalty need the logits of each token."""
    decoder, runtime = on_device()
    for how in ({"temperature": 1.0, "seed": 1}, {"repetition_penalty": 1.3}):
        before = runtime.waits
        assert len(tokens_of(decoder, 6, **how)) == 6
        assert runtime.waits - before == 6


def test_decode_ahead_for_everybody(on_device):
    """What it answers is pushed; `stage` leaves that to the caller."""
    decoder, _ = on_device()
    want, _ = single_steps(decoder)
    cache = decoder.new_cache()
    decoder.prefill(PROMPT, cache)
    assert decoder.decode_ahead(want[0], cache, 5) == want[1:6]
    assert (cache.positions, cache.staged) == (len(PROMPT) + 5, 0)
    assert decoder.decode_ahead(want[5], cache, 5, stage=True) == want[6:11]
    assert (cache.positions, cache.staged) == (len(PROMPT) + 5, 5)
    cache.advance(2)
    assert decoder.decode_ahead(want[7], cache, 3) == want[8:11]
    assert decoder.activations[0][0] == NEW + 1 + 5 + 5 + 3
