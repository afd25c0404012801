"""Answers that end within a block of tokens chosen together: where each alone, token by token, would end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from frink_numba import registry
from frink_numba.cuda.backend import CudaBackend
from frink_numba.host import generate_batch, token_source
from frink_numba.host.decoder import Decoder
from frink_numba.host.generate_batch import BatchAnswer
from frink_numba.host.load import load
from frink_numba.host.model import Model
from frink_numba.layer import Layer
from tests.cuda.fake_tensor import tensor_device
from tests.golden.tiny_gguf import write
from tests.golden.tiny_text import BOS, EOS, text_content

CHAIN = "abcdefghijklmnopqrstuvwxyzéABCDEFGHIJKLMNOPQRSTUVWXYZ€0123456789"  # the model's every answer; then its end
PROMPTS = ["a", "g", "0Mx", "the qF"]  # what follows the last letter follows
BLOCKS = (1, 4, 16, 32)  # tokens behind the first
NEW = 1 + sum(BLOCKS)
# In each block: at its begin, within it, at its end, and from one to the next; with characters of several bytes.
STOPS = ["b", "c", "de", "fg", "ghi", "lm", "vw", "wx", "yzé", "é", "éA", "Z€", "€0", "MNOPQR", "9"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Behind each byte of the chain the next one is the likeliest by far, whatever came before."""
    file = text_content()
    for name, tensor in file.tensors.items():
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            file.tensors[name] = tensor * np.float32(0.1)
    chain = [*CHAIN.encode(), EOS]
    embedding = file.tensors["token_embd.weight"]
    output = np.zeros_like(file.tensors["output.weight"])
    output[chain[1:]] = embedding[chain[:-1]]
    file.tensors["output.weight"] = output
    file.metadata["tokenizer.ggml.eos_token_id"] = EOS
    with load(write(file, tmp_path_factory.mktemp("model") / "m.gguf")) as model:
        yield model


@pytest.fixture
def on_device(model: Model, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Decoder]:
    """on_device(): a decoder over a fake device."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(token_source, "MOST_SECONDS", 1e9)  # fakes take their time

    def make() -> Decoder:
        def backend(layers: Sequence[Layer]) -> CudaBackend:
            return CudaBackend(layers, tensor_device())

        registry.register_backend("cuda", backend, replace=True)
        return Decoder(model, "cuda,host")

    return make


def ids(prompt: str) -> list[int]:
    return [BOS, *prompt.encode()]


def following(prompt: str) -> str:
    """The answer to a prompt that nothing stops, but its end."""
    return CHAIN[CHAIN.index(prompt[-1]) + 1 :]


def assert_ends_as_alone(host: Decoder, prompt: str, answer: BatchAnswer, shown: str, **how) -> None:
    """Text, tokens, reason and K/V rows are those of one token after the other on the host."""
    alone = host.generate(ids(prompt), **how)
    assert shown == answer.text == "".join(piece.text for piece in alone)
    assert answer.tokens == alone.tokens
    assert (answer.finish_reason, answer.stop_string) == (alone.finish_reason, alone.stop_string)
    assert answer.cache.positions == alone.cache.positions == len(ids(prompt)) + len(answer.tokens) - 1
    for got, want in zip(answer.cache, alone.cache, strict=True):
        for one, other in zip(got.prefix(), want.prefix(), strict=True):
            assert np.linalg.norm(one - other) < 5e-3 * np.linalg.norm(other)


def ended(decoder: Decoder, **how) -> tuple[list[BatchAnswer], list[str]]:
    """The answers to all prompts, and what their pieces showed."""
    caches = [decoder.new_cache() for _ in PROMPTS]
    batch = decoder.generate_batch([ids(prompt) for prompt in PROMPTS], caches=caches, **how)
    shown = [""] * len(PROMPTS)
    for number, piece in batch:
        shown[number] += piece.text
        answer = batch.answers[number]
        assert answer.cache.positions == len(answer.prompt_tokens) + len(answer.tokens) - 1
    return batch.answers, shown


def test_what_follows_is_the_chain(model: Model, on_device):
    """The blocks are those that the stop strings are chosen for, and the model's answers the expected ones."""
    decoder = on_device()
    runtime = decoder._dispatcher.backends[0].device.runtime
    answers, shown = ended(decoder, max_new_tokens=NEW)
    assert runtime.waits == 1 + len(BLOCKS)
    for prompt, text in zip(PROMPTS, shown, strict=True):
        assert text == following(prompt).encode()[:NEW].decode(errors="replace")
    assert [answer.finish_reason for answer in answers] == ["length", "length", "stop", "stop"]


@pytest.mark.parametrize("most", [64, 2])
@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_string_within_a_block(model: Model, on_device, monkeypatch: pytest.MonkeyPatch, stop: str, most: int):
    """R10: where it ends, no token and no row behind it counts; with `most` 2 the next prompt begins there."""
    monkeypatch.setattr(generate_batch, "MOST_SEQUENCES", most)
    how = {"max_new_tokens": NEW, "stop": [stop, "no such"]}
    answers, shown = ended(on_device(), **how)
    with Decoder(model, "host") as host:
        for prompt, answer, text in zip(PROMPTS, answers, shown, strict=True):
            assert_ends_as_alone(host, prompt, answer, text, **how)
            if answer.stop_string is not None:
                assert text == following(prompt).partition(stop)[0]
    assert any(answer.stop_string == stop for answer in answers)


def test_the_models_own_end_within_a_block(model: Model, on_device):
    answers, shown = ended(on_device())
    with Decoder(model, "host") as host:
        for prompt, answer, text in zip(PROMPTS, answers, shown, strict=True):
            assert text == following(prompt)
            assert (answer.finish_reason, answer.tokens[-1]) == ("stop", EOS)
            assert_ends_as_alone(host, prompt, answer, text)


def test_an_answer_goes_on_behind_its_stop_string(model: Model, on_device):
    """Its cache holds nothing of what the device had chosen beyond: another batch goes on there, to the end."""
    decoder = on_device()
    answers, _ = ended(decoder, max_new_tokens=NEW, stop=["n", "D", "2"])
    assert {answer.stop_string for answer in answers} == {"n", "D", "2"}
    caches = [answer.cache for answer in answers]
    batch = decoder.generate_batch([[answer.tokens[-1]] for answer in answers], caches=caches)
    list(batch)
    for prompt, first, second in zip(PROMPTS, answers, batch.answers, strict=True):
        assert [*first.tokens, *second.tokens] == [*following(prompt).encode(), EOS]
        assert second.cache.positions == len(ids(prompt)) + len(first.tokens) + len(second.tokens) - 1
