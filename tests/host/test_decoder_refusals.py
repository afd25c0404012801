"""What a decoder refuses, each with a named error and its cache untouched: caches, arguments, names of backends."""

import numpy as np
import pytest

from frink_numba.errors import CacheError, SettingError
from frink_numba.host.decoder import Decoder
from frink_numba.host.kv_cache import KVCache
from frink_numba.host.load import load
from tests.golden.draws import integers

TOKENS = integers("decoder test", (600,), 80)


@pytest.fixture
def decoder(open_decoder):
    return open_decoder("llama_grouped")


def test_another_models_cache_is_refused(open_decoder, decoder):
    other = open_decoder("llama_multi_head")
    with pytest.raises(CacheError, match="layer 0: the cache holds 4 heads of 16 and 16 channels, the model has 2"):
        decoder.prefill(TOKENS[:5], other.new_cache())
    with pytest.raises(CacheError, match="the cache has 1 layers, the model 3"):
        decoder.prefill(TOKENS[:5], KVCache(decoder.model.layers[:1], 16))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"logits": "first"}, "logits='first': expected 'last', 'all' or None"),
        ({"chunk_size": 0}, "chunk_size=0: expected an integer from 1 up"),
        ({"chunk_size": 2.0}, "chunk_size=2.0"),
        ({"hidden": (3,)}, "hidden=3: expected an integer from 0 to 2"),
        ({"hidden": (-1,)}, "hidden=-1"),
        ({"hidden": ("a",)}, "hidden='a'"),
        ({"hidden": None}, "hidden=None: expected numbers of layers"),
        ({"hidden": 1}, "hidden=1: expected numbers of layers"),
        ({"hidden": "01"}, "hidden='01': expected numbers of layers"),
        ({"logits": ["last"]}, r"logits=\['last'\]"),
        ({"start": 0.5}, r"start=0\.5: expected an integer"),
    ],
)
def test_bad_arguments_are_named(decoder, arguments, words):
    cache = decoder.new_cache()
    with pytest.raises(SettingError, match=words):
        decoder.prefill(TOKENS[:5], cache, **arguments)
    assert cache.positions == 0


@pytest.mark.parametrize("cache", [None, 5, [], "cache"])
def test_what_is_no_cache_is_named(decoder, cache):
    with pytest.raises(CacheError, match=r"the cache is a \w+; make one with decoder\.new_cache\(\)"):
        decoder.prefill(TOKENS[:5], cache)


def test_a_cache_of_more_positions_than_the_model_has_is_refused(save, backends):
    """Positions beyond the context would be computed without a word."""
    path = save("llama_grouped")
    with load(path) as long, load(path, context_length=8) as short:
        cache = Decoder(long, backends).new_cache()
        with pytest.raises(CacheError, match="the cache is for 4096 positions, but the model's context is 8"):
            Decoder(short, backends).prefill(TOKENS[:5], cache)
        assert cache.positions == 0
        assert Decoder(long, backends).prefill(TOKENS[:5], Decoder(short, backends).new_cache()).logits is not None


@pytest.mark.parametrize("dtype", ["foo", np.float64, 5])
def test_a_cache_of_another_type_is_refused(decoder, dtype):
    with pytest.raises(CacheError, match="float32 or float16"):
        decoder.new_cache(dtype=dtype)


@pytest.mark.parametrize("bad", [5, [1], [None, "host"], b"host", {"host"}])
def test_backends_that_are_no_names_are_refused(decoder, bad):
    with pytest.raises(SettingError, match="expected names of backends"):
        Decoder(decoder.model, bad)


@pytest.mark.parametrize("call", ["prefill", "decode", "generate", "plan", "new_cache"])
def test_unknown_keywords_are_refused(decoder, call):
    with pytest.raises(TypeError, match="temprature"):
        getattr(decoder, call)(temprature=1)


@pytest.mark.parametrize("length", [0, 4097, True, 3.5])
def test_a_cache_beyond_the_context_is_refused(decoder, length):
    with pytest.raises(SettingError, match="context_length="):
        decoder.new_cache(length)
