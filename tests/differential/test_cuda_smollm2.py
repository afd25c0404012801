"""The real SmolLM2-135M with all layers on a GPU: against the host, and against transformers' golden.

The tier is the device's best, or what FRINK_CUDA_TIER says.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from frink_numba.cuda.device import open_device
from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from frink_numba.host.model import Model
from tests.golden.prompts import PROMPTS
from tests.golden.sketch import SAFETY, sketched_errors
from tests.golden.smollm2 import NEW_TOKENS, golden

pytestmark = pytest.mark.gpu

BOUND = 1e-4  # of logits, float32 kernels
HALF_BOUND = 2e-2  # of logits, f16 operands, through all layers
DIVERGENCE = 1e-3  # mean KL, any tier (design: numerics)


@pytest.fixture(scope="module")
def model(smollm2_path) -> Iterator[Model]:
    with load(smollm2_path) as model:
        yield model


@pytest.fixture(scope="module")
def device(model: Model) -> Iterator[Decoder]:
    with Decoder(model, "cuda,host") as decoder:
        yield decoder


@pytest.fixture(scope="module")
def host(model: Model) -> Iterator[Decoder]:
    with Decoder(model, "host") as decoder:
        yield decoder


def tokens(n: int, seed: int = 0) -> np.ndarray:
    """`n` tokens of real text, or where that ends, of the same text again from elsewhere."""
    text = golden("long").tokens
    return np.concatenate([np.roll(text, -37 * turn - seed) for turn in range(-(-n // len(text)))])[:n]


def bound() -> float:
    return BOUND if open_device(0).tier == "simt" else HALF_BOUND


def check_logits(got: np.ndarray, want: np.ndarray) -> None:
    """As `check_close`, and close as distributions."""
    check_close(got, want)
    truth, mine = (log_softmax(np.atleast_2d(x).astype(np.float64)) for x in (want, got))
    assert np.mean(np.sum(np.exp(truth) * (truth - mine), axis=1)) < DIVERGENCE


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def check_close(got: np.ndarray, want: np.ndarray) -> None:
    """Every position under the bound, and the same first entry wherever the two first are apart."""
    got, want = np.atleast_2d(got), np.atleast_2d(want)
    norms = np.linalg.norm(want, axis=1)
    errors = np.linalg.norm(got - want, axis=1) / norms
    assert np.isfinite(got).all()
    assert errors.max() < bound(), errors.max()
    first_two = np.partition(want, -2, axis=1)[:, -2:]
    clear = first_two[:, 1] - first_two[:, 0] > 2 * np.abs(got - want).max(axis=1)
    np.testing.assert_array_equal(got.argmax(axis=1)[clear], want.argmax(axis=1)[clear])


def test_every_layer_runs_on_the_device(device: Decoder):
    """All 30 layers in one run; a step of one row too where there are kernels for it, else it goes to the host (R2)."""
    plan = device.plan(batch=512)
    assert [(row.layers, row.backend) for row in plan.rows] == [("0-29", "cuda")]
    assert "tier" in plan.rows[0].note
    assert device.plan(batch=1).backend_of(0) == ("host" if open_device(0).tier == "simt" else "cuda")


@pytest.mark.parametrize("n", [4, 5, 63, 512, 3000])
def test_prompts_in_one_go_in_chunks_and_on_after_truncation(n: int, device: Decoder, host: Decoder):
    """R11, R24: logits of every position (of the last for 3000, beside all hidden rows), however the prompt is cut."""
    ids = tokens(n)
    kept = "all" if n <= 512 else "last"
    host_cache, host_hidden = host.new_cache(), 29
    want = host.prefill(ids, host_cache, logits=kept, hidden=(host_hidden,))
    more = tokens(max(4, n // 3), seed=5)
    host_cache.truncate(n // 2)
    want_more = host.prefill(more, host_cache, logits=kept)
    for chunk_size in {n, 512, -(-n // 3), 4 if n < 64 else 100}:
        cache = device.new_cache()
        got = device.prefill(ids, cache, logits=kept, hidden=(host_hidden,), chunk_size=chunk_size)
        check_logits(got.logits, want.logits)
        check_close(got.hidden[host_hidden], want.hidden[host_hidden])
        cache.truncate(n // 2)
        check_logits(device.prefill(more, cache, logits=kept, chunk_size=chunk_size).logits, want_more.logits)


@pytest.mark.parametrize("name", PROMPTS)
def test_the_golden(name: str, device: Decoder):
    """Logits of every position against transformers', and the same 40 greedy tokens where kernels are float32."""
    expected = golden(name)
    out = device.prefill(expected.tokens, device.new_cache(), logits="all")
    assert out.logits is not None
    errors = sketched_errors(out.logits, expected.sketch, expected.norm)
    assert np.all(errors < bound() / SAFETY), errors.max()
    if open_device(0).tier != "simt":
        return  # greedy text may part where two tokens are as good as equal
    pieces = device.generate([int(token) for token in expected.tokens], max_new_tokens=NEW_TOKENS, temperature=0)
    made = [piece.token for piece in pieces]
    np.testing.assert_array_equal(made, expected.greedy[: len(made)])
    assert len(made) == NEW_TOKENS or made == list(expected.greedy[: len(made)])


def test_two_runs_are_bitwise_equal(device: Decoder):
    ids = tokens(200)
    first, second = (device.prefill(ids, device.new_cache(), logits="all").logits for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_weights_went_up_once(device: Decoder):
    """R8, over the decoder's whole life so far."""
    backend = device._dispatcher.backends[0]
    device.prefill(tokens(8), device.new_cache())
    before = backend.stats
    device.prefill(tokens(64), device.new_cache())
    after = backend.stats
    assert after.weights_up == before.weights_up > 50_000_000
    assert after.runs == before.runs + 1
    ends = open_device(0).tier != "simt"  # tokens go up and logits come down, and no hidden batch travels
    assert after.hidden_up - before.hidden_up == (0 if ends else 64 * 576 * 4)
    assert after.logits_down - before.logits_down == (49152 * 4 if ends else 0)
    assert after.kv_down - before.kv_down == 30 * 2 * 64 * 192 * 4
    assert after.prefix_up == before.prefix_up
