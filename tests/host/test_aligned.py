"""FRINK_INVARIANT on the host: bits do not depend on chunks or neighbours, for every option of a layer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frink_numba.backend import Step
from frink_numba.host import weights
from frink_numba.host.aligned import WIDTH, aligned, padded
from frink_numba.host.backend import HostBackend
from frink_numba.host.decoder import Decoder
from frink_numba.host.kv_cache import KVCache
from frink_numba.host.load import load
from frink_numba.host.weights import WeightStore
from frink_numba.layer import Activation, Layer, RopeLayout
from tests import reference
from tests.golden.tiny import VARIANTS, golden_logits, tokens
from tests.host.errors import worst_error
from tests.host.test_tiny_models import FIRST
from tests.invariance import answers, differences, random_cuts
from tests.random_layers import pairwise, random_layer

HIDDEN = 40
OPTIONS = {
    "layout": [RopeLayout.NORM, RopeLayout.NEOX, None],
    "kv_heads": [1, 2, 4],
    "window": [0, 3, 300],
    "softcap": [0.0, 8.0],
    "sinks": [False, True],
    "qk_norm": ["", "head", "whole", "rows"],
    "output_gate": [False, True],
    "value_norm": [False, True],
    "activation": [Activation.SWIGLU, Activation.GEGLU, Activation.GEGLU_ERF, Activation.REGLU_SQUARED],
    "loras": ["", "qkvogud"],
    "experts": [0, 5],
    "shared": [False, True],
    "normalized": [False, True],
    "bias": [False, True],
    "post_norms": [False, True],
}
CHOICES = [
    chosen | {"value_norm": chosen["value_norm"] and not chosen["output_gate"]}  # the host serves either
    for chosen in pairwise(OPTIONS)
    if not (chosen["experts"] and chosen["loras"])
]


@given(start=st.integers(0, 40), n=st.integers(1, 30))
def test_blocks_are_at_fixed_positions(start: int, n: int) -> None:
    """Every row once and in order, the token at position p always in column p % WIDTH."""
    rows = np.arange(1.0, n + 1, dtype=np.float32)[:, None]
    seen: list[int] = []
    for first, last, columns in aligned(start, n):
        assert 0 <= columns.start < columns.stop <= WIDTH
        assert (start + first) % WIDTH == columns.start
        block = padded(rows[first:last], columns)
        assert block.shape == (1, WIDTH)
        np.testing.assert_array_equal(np.flatnonzero(block[0]), range(columns.start, columns.stop))
        np.testing.assert_array_equal(block[0, columns], rows[first:last, 0])
        seen += range(first, last)
    assert seen == list(range(n))


def _run(layers: list[Layer], hidden: np.ndarray, cuts: list[int], dtype, evict: bool, invariant=True):  # type: ignore[no-untyped-def]
    backend = HostBackend(layers, WeightStore(invariant=invariant))
    assert backend.invariant is invariant
    cache = KVCache(layers, 1024, dtype=dtype)
    out, rows, used, first = [], [], [set() for _ in layers], 0
    for n in cuts:
        step = Step(layers, cache, cache.positions, n, hidden[first : first + n])
        run = backend.run(0, len(layers), step)
        out.append(run.hidden.copy())
        rows.append([np.stack(pair) for pair in run.kv_rows])
        for layer, numbers in zip(used, run.experts, strict=True):
            layer.update(numbers)
        cache.push(run.kv_rows)
        if evict:
            cache.evict()
        first += n
    return np.concatenate(out), [np.concatenate(parts, axis=1) for parts in zip(*rows, strict=True)], used


@pytest.mark.parametrize("number", range(len(CHOICES)))
def test_every_option_of_a_layer(number: int) -> None:
    """Two layers, three random cuts, float32 or float16 rows, evicted or not: the same bits, experts, and the truth."""
    rng = np.random.default_rng(number)
    layers = [random_layer(rng, **CHOICES[number]), random_layer(rng, **CHOICES[number])]
    n = 70
    hidden = rng.normal(size=(n, HIDDEN)).astype(np.float32)
    dtype = (np.float32, np.float16)[number % 2]
    whole = _run(layers, hidden, [n], dtype, evict=False)
    for turn in range(3):
        cuts = random_cuts(rng, n, (1, 2, 3, 5, 7, 13, 40))
        other = _run(layers, hidden, cuts, dtype, evict=turn == 2 and CHOICES[number]["window"] > 0)
        np.testing.assert_array_equal(other[0].view(np.uint32), whole[0].view(np.uint32), err_msg=f"{cuts}")
        for one, same in zip(other[1], whole[1], strict=True):
            np.testing.assert_array_equal(one, same, err_msg=f"{cuts}")
        assert other[2] == whole[2]
    if dtype is np.float32:
        x = hidden.astype(np.float64)
        for layer in layers:
            x = reference.layer(layer, x)[0]
        assert reference.relative_error(whole[0], x) < 1e-5


def test_keys_in_many_blocks() -> None:
    """Blocks of keys on both sides of the edges at 256 and 512, with a window across them, over evicted rows."""
    rng = np.random.default_rng(0)
    layers = [random_layer(rng, window=w, softcap=c) for w, c in ((0, 0.0), (270, 9.0), (5, 0.0))]
    hidden = rng.normal(size=(600, HIDDEN)).astype(np.float32)
    whole = _run(layers, hidden, [600], np.float32, evict=False)
    for cuts in ([255, 1, 1, 254, 1, 1, 87], [7] * 85 + [5], [300, 300]):
        other = _run(layers, hidden, cuts, np.float32, evict=len(cuts) > 2)
        np.testing.assert_array_equal(other[0].view(np.uint32), whole[0].view(np.uint32))
    x = hidden.astype(np.float64)
    for layer in layers:
        x = reference.layer(layer, x)[0]
    assert reference.relative_error(whole[0], x) < 1e-5


def test_a_token_beyond_float32_does_not_touch_its_neighbours() -> None:
    """Squares that overflow send a column another way (`rms_norm`): that column alone."""
    rng = np.random.default_rng(3)
    layers = [random_layer(rng)]
    hidden = rng.normal(size=(8, HIDDEN)).astype(np.float32)
    hidden[5] *= np.float32(1e20)
    whole = _run(layers, hidden, [8], np.float32, evict=False)
    single = _run(layers, hidden, [1] * 8, np.float32, evict=False)
    np.testing.assert_array_equal(single[0].view(np.uint32), whole[0].view(np.uint32))


def test_without_the_setting_bits_do_depend_on_chunks() -> None:
    """What the tests above can see: the same layers in the same cuts, and the usual blocks."""
    rng = np.random.default_rng(0)
    layers = [random_layer(rng, window=300), random_layer(rng)]
    hidden = rng.normal(size=(70, HIDDEN)).astype(np.float32)
    outcomes = [
        _run(layers, hidden, cuts, np.float32, False, invariant=False)[0] for cuts in ([70], [1] * 70, [33, 37])
    ]
    assert any((one != other).any() for one, other in itertools.combinations(outcomes, 2))


@pytest.fixture
def invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRINK_INVARIANT", "1")


@pytest.mark.parametrize("name", FIRST.values())
def test_every_architecture(name: str, save, invariant: None) -> None:  # type: ignore[no-untyped-def]
    """Logits of all positions, hidden states and K/V rows through the decoder, and still transformers' logits."""
    variant, ids = VARIANTS[name], tokens(VARIANTS[name])
    rng = np.random.default_rng(len(name))
    with load(save(name), context_length=variant.context) as model, Decoder(model, "host") as decoder:
        whole = answers(decoder, ids, [len(ids)], layers=(0, 1))
        assert worst_error(whole["logits"], golden_logits(variant)) < 1e-5
        for _ in range(2):
            cuts = random_cuts(rng, len(ids), (1, 2, 3, 9, 31))
            assert not differences(whole, answers(decoder, ids, cuts, layers=(0, 1))), cuts
        last = answers(decoder, ids, cuts, logits="last")
        at = last["positions"]
        np.testing.assert_array_equal(last["logits"].view(np.uint32), whole["logits"][at].view(np.uint32))


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_cut_and_any_neighbours_of_the_real_model(data: st.DataObject, real: tuple[Decoder, dict]) -> None:  # type: ignore[type-arg]
    """SmolLM2: 34 tokens in any chunks, alone or as one of several prompts."""
    decoder, whole = real
    cuts: list[int] = []
    while sum(cuts) < 34:
        cuts.append(data.draw(st.integers(1, 34 - sum(cuts)), label="chunk"))
    assert not differences(whole, answers(decoder, IDS, cuts))
    others = data.draw(st.lists(st.integers(1, 9), max_size=3), label="neighbours")
    place = data.draw(st.integers(0, len(others)), label="place")
    prompts = [IDS[:n][::-1] for n in others]
    prompts.insert(place, IDS)
    caches = [decoder.new_cache() for _ in prompts]
    outputs = decoder.prefill_batch(
        prompts, caches, logits="all", chunk_size=data.draw(st.integers(5, 60), label="size")
    )
    found = {"logits": outputs[place].logits}
    for number, rows in enumerate(caches[place]):
        found[f"K {number}"], found[f"V {number}"] = rows.prefix()
    assert not differences(found, whole)


IDS = np.random.default_rng(7).integers(0, 49152, 34)


@pytest.fixture(scope="module")
def real(smollm2_path):  # type: ignore[no-untyped-def]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FRINK_INVARIANT", "1")
        with load(smollm2_path) as model, Decoder(model, "host") as decoder:
            yield decoder, answers(decoder, IDS, [len(IDS)])


def test_the_real_model_without_compiled_products(  # type: ignore[no-untyped-def]
    smollm2_path, invariant: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no numba, all products are NumPy's, of four columns each."""
    monkeypatch.setattr(weights, "thin_set", lambda matrices: None)
    with load(smollm2_path) as model, Decoder(model, "host") as decoder:
        whole, other = (answers(decoder, IDS[:11], cuts) for cuts in ([11], [1, 1, 6, 3]))
    assert not differences(whole, other)


def test_the_real_model_without_the_setting_does_depend_on_chunks(  # type: ignore[no-untyped-def]
    smollm2_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sabotage of the tests above: products of one column and of many sum in other orders."""
    monkeypatch.delenv("FRINK_INVARIANT", raising=False)
    with load(smollm2_path) as model, Decoder(model, "host") as decoder:
        whole, single = (answers(decoder, IDS[:6], cuts) for cuts in ([6], [1] * 6))
    assert differences(whole, single)
