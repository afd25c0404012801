"""Greedy answers on a GPU: the tokens chosen there are those of single steps, and the host's where it is sure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.device import open_device
from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from frink_numba.layer import Layer
from tests.cuda.test_tensor_ahead import OTHERS, PLAIN, ahead, new_cache, one_by_one, same
from tests.differential.gpu import device_of
from tests.golden.prompts import PROMPTS
from tests.golden.smollm2 import golden

pytestmark = pytest.mark.gpu

NEW = 200
BOUND = 2e-2  # of logits, f16 operands, through all layers of SmolLM2; by so much of the largest two may change places


@pytest.mark.parametrize("tier", ["wgmma", "mma"])
@pytest.mark.parametrize("layers", [PLAIN, OTHERS])
def test_blocks_are_what_single_steps_make(tier: str, layers: Sequence[Layer]):
    """R10, R11: tokens and K/V rows, with prompts between them, whatever a block's size."""
    backend = CudaBackend(layers, device_of(tier))
    cache, twin = new_cache(backend, layers, 9), new_cache(backend, layers, 9)
    token, chosen = 3, []
    for n in (1, 2, 5, 32, 32, 7):
        run = ahead(backend, layers, cache, token, n)
        assert run is not None
        assert run.tokens.shape == (n,)
        cache.push(run.kv_rows)
        want = one_by_one(backend, layers, twin, token, n)
        assert run.tokens.tolist() == want
        chosen += want
        token = want[-1]
    assert len(set(chosen)) > 8
    same(cache, twin)
    backend.close()


@pytest.mark.parametrize("name", PROMPTS)
def test_smollm2_says_the_same_with_and_without_the_host_in_between(name: str, smollm2_path):
    """A greedy answer of 200 tokens: the device's is that of its single steps, token for token.

    The host's is the same, or parts from it first where the two likeliest tokens are as good as equal.
    """
    if open_device(0).tier == "simt":
        pytest.skip("the simt tier does not choose tokens")
    prompt = [int(token) for token in golden(name).tokens]
    with load(smollm2_path) as model, Decoder(model, "cuda,host") as device, Decoder(model, "host") as host:
        vocabulary = model.tokenizer.vocab_size
        answer = device.generate(prompt, max_new_tokens=NEW)
        made = [piece.token for piece in answer]
        cache = device.new_cache()
        logits = device.prefill(prompt, cache).logits
        for token in made:
            assert int(logits[:vocabulary].argmax()) == token
            logits = device.decode(token, cache).logits
        cache.truncate(answer.cache.positions)
        same(answer.cache, cache)
        # The host reads the device's tokens: at each the device's choice is the host's, or nearly as likely.
        every = host.prefill([*prompt, *made[:-1]], host.new_cache(), logits="all").logits[len(prompt) - 1 :]
        behind = every[:, :vocabulary].max(axis=1) - every[np.arange(len(made)), made]
        first = np.flatnonzero(behind > 0)
        print(f"{name}: {len(made)} tokens, {answer.finish_reason}; the host's choice differs at {first.tolist()}")
        assert (behind < BOUND * np.abs(every).max(axis=1)).all(), (int(behind.argmax()), float(behind.max()))
