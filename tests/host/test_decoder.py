"""The decoder: chunks, caches, logits and hidden states, failures that leave no trace, and what is refused."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from frink_numba.errors import (
    BackendError,
    CacheError,
    Cancelled,
    FrinkError,
    GgufError,
    PromptError,
    SettingError,
)
from frink_numba.host import parts as parts_module
from frink_numba.host.decoder import Decoder
from frink_numba.host.kv_cache import KVCache
from frink_numba.host.layer_kv import LayerKV
from frink_numba.host.load import load
from frink_numba.host.weights import WeightStore
from tests.golden.draws import integers
from tests.golden.tiny import VARIANTS
from tests.golden.tiny_gguf import content

TOKENS = integers("decoder test", (600,), 80)


def relative(a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def rows_of(cache):
    return [np.stack(layer.prefix()).copy() for layer in cache]


@pytest.fixture
def decoder(open_decoder):
    return open_decoder("llama_grouped")


# Chunks


@pytest.mark.parametrize("name", ["llama_grouped", "mistral_window", "qwen2_grouped"])
@pytest.mark.parametrize("chunk_size", [1, 2, 63, 64, 512])
def test_the_chunk_size_changes_nothing_but_rounding(open_decoder, name, chunk_size):
    """Faults 1, 3 and 7: 600 tokens, so that 512 leaves a second chunk too."""
    decoder = open_decoder(name)
    whole_cache, cache = decoder.new_cache(), decoder.new_cache()
    whole = decoder.prefill(TOKENS, whole_cache, logits="all", hidden=(0, 2), chunk_size=600)
    parts = decoder.prefill(TOKENS, cache, logits="all", hidden=(0, 2), chunk_size=chunk_size)
    assert relative(parts.logits, whole.logits) < 5e-6
    assert relative(parts.logits[-1], whole.logits[-1]) < 1e-5
    margin = np.diff(np.sort(whole.logits, axis=1)[:, -2:], axis=1)[:, 0]
    clear = margin > 1e-4 * np.abs(whole.logits).max()
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(parts.logits.argmax(1)[clear], whole.logits.argmax(1)[clear])
    for layer in (0, 2):
        assert relative(parts.hidden[layer], whole.hidden[layer]) < 5e-6
    assert cache.positions == whole_cache.positions == 600
    for mine, other in zip(rows_of(cache), rows_of(whole_cache), strict=True):
        assert relative(mine, other) < 5e-6


@pytest.mark.parametrize("split", [(3, 3), (5, 1), (4, 2), (2, 2, 2), (1, 5)])
def test_prefills_in_a_row_equal_one(decoder, split):
    """Faults 1 and 3: key j is visible iff j <= start + i, and the cache owns the start."""
    whole = decoder.prefill(TOKENS[:6], decoder.new_cache(), logits="all").logits
    cache, logits, at = decoder.new_cache(), [], 0
    for n in split:
        logits.append(decoder.prefill(TOKENS[at : at + n], cache, logits="all", start=at).logits)
        at += n
    assert relative(np.concatenate(logits), whole) < 1e-5


def test_decode_is_a_prefill_of_one(decoder):
    cache, other = decoder.new_cache(), decoder.new_cache()
    decoder.prefill(TOKENS[:9], cache)
    decoder.prefill(TOKENS[:9], other)
    one = decoder.decode(int(TOKENS[9]), cache, start=9)
    np.testing.assert_array_equal(one.logits, decoder.prefill(TOKENS[9:10], other).logits)
    assert one.logits.shape == (80,)
    assert cache.positions == 10


def test_all_logits_end_with_the_last_logits(decoder):
    """Fault 11: one path for both."""
    every = decoder.prefill(TOKENS[:50], decoder.new_cache(), logits="all").logits
    assert every.shape == (50, 80)
    assert every.dtype == np.float32
    for n in (1, 2, 17, 50):
        last = decoder.prefill(TOKENS[:n], decoder.new_cache(), logits="last").logits
        assert last.shape == (80,)
        assert relative(every[n - 1], last) < 1e-5


def test_no_logits_fill_the_cache_all_the_same(decoder):
    silent, loud = decoder.new_cache(), decoder.new_cache()
    out = decoder.prefill(TOKENS[:20], silent, logits=None)
    decoder.prefill(TOKENS[:20], loud)
    assert out.logits is None
    assert out.hidden == {}
    for mine, other in zip(rows_of(silent), rows_of(loud), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_hidden_states_are_what_each_layer_hands_on(open_decoder, decoder):
    """The last layer's, normed and multiplied, are the logits; a model of fewer layers ends with an inner layer's."""
    out = decoder.prefill(TOKENS[:30], decoder.new_cache(), logits="all", hidden=(2, 0, 1, 0))
    assert list(out.hidden) == [0, 1, 2]
    assert all(state.shape == (30, 64) and state.dtype == np.float32 for state in out.hidden.values())
    model = decoder.model
    x = out.hidden[2].astype(np.float64)
    normed = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + model.hyper.norm_eps) * model.output_norm
    assert relative(out.logits, normed @ model.weights.get(model.output).astype(np.float64).T) < 1e-6

    file = content(VARIANTS["llama_grouped"])
    file.metadata["llama.block_count"] = 2
    file.tensors = {name: tensor for name, tensor in file.tensors.items() if not name.startswith("blk.2.")}
    short = open_decoder(file)
    np.testing.assert_array_equal(short.prefill(TOKENS[:30], short.new_cache(), hidden=(1,)).hidden[1], out.hidden[1])


def test_asking_for_hidden_states_changes_nothing(decoder):
    plain = decoder.prefill(TOKENS[:30], decoder.new_cache(), logits="all")
    asked = decoder.prefill(TOKENS[:30], decoder.new_cache(), logits="all", hidden=range(3))
    np.testing.assert_array_equal(plain.logits, asked.logits)


def test_two_runs_are_bitwise_equal(decoder):
    one, two = (decoder.prefill(TOKENS[:200], decoder.new_cache(), logits="all").logits for _ in range(2))
    np.testing.assert_array_equal(one, two)


def test_an_answer_is_the_callers_own(decoder):
    cache = decoder.new_cache()
    first = decoder.prefill(TOKENS[:20], cache, logits="all", hidden=(0, 2))
    kept = first.logits.copy(), first.hidden[0].copy(), first.hidden[2].copy()
    decoder.prefill(TOKENS[20:40], cache, logits="all", hidden=(0, 2))
    np.testing.assert_array_equal(first.logits, kept[0])
    np.testing.assert_array_equal(first.hidden[0], kept[1])
    np.testing.assert_array_equal(first.hidden[2], kept[2])


def test_a_weight_budget_of_nothing_gives_the_same_answer(save, backends, monkeypatch):
    path = save("llama_quantized")
    with load(path) as model:
        usual = Decoder(model, backends).prefill(TOKENS[:40], KVCache(model.layers, 64), logits="all").logits
    monkeypatch.setenv("FRINK_HOST_WEIGHTS", "1")
    with load(path) as model:
        decoder = Decoder(model, backends)
        cache = decoder.new_cache()
        tight = decoder.prefill(TOKENS[:40], cache, logits="all").logits
        assert relative(decoder.decode(1, cache).logits, tight[0]) > 0
        assert model.weights.used_bytes == 0
    assert relative(tight, usual) < 1e-6


def test_a_float16_cache_costs_little(decoder):
    cache = decoder.new_cache(64, dtype=np.float16)
    half = decoder.prefill(TOKENS[:40], cache, logits="all", chunk_size=7).logits
    full = decoder.prefill(TOKENS[:40], decoder.new_cache(), logits="all").logits
    assert 1e-6 < relative(half, full) < 2e-3


# Failures


def fail_at_chunk(monkeypatch, owner, name, chunk, calls_a_chunk, error):
    """Make the first call of `owner.name` in chunk number `chunk` raise."""
    real, calls = getattr(owner, name), [0]

    def failing(*arguments, **keywords):
        calls[0] += 1
        if calls[0] == chunk * calls_a_chunk + 1:
            raise error
        return real(*arguments, **keywords)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize(
    ("owner", "name", "calls_a_chunk"),
    [
        (LayerKV, "write_tail", 3),
        (LayerKV, "check_rows", 3),
        (WeightStore, "matmul", 1),
        (parts_module, "embed", 1),
    ],
)
def test_a_failed_chunk_leaves_the_cache_at_the_last_whole_one(decoder, monkeypatch, owner, name, calls_a_chunk):
    """R10, fault 4: memory runs out in the third chunk; all layers stand at the second, and a retry is a clean run."""
    clean_cache, cache = decoder.new_cache(), decoder.new_cache()
    clean = decoder.prefill(TOKENS[:60], clean_cache, logits="all", chunk_size=16)
    with monkeypatch.context() as patch:
        patch.setattr(LayerKV, "wrote", lambda *_: False)  # rows are copied, as those of any other backend
        fail_at_chunk(patch, owner, name, 2, calls_a_chunk, MemoryError("told to fail"))
        with pytest.raises(MemoryError, match="told to fail"):
            decoder.prefill(TOKENS[:60], cache, logits="all", chunk_size=16)
    assert cache.positions == 32
    assert [layer.positions for layer in cache] == [32] * 3
    for mine, other in zip(rows_of(cache), rows_of(clean_cache), strict=True):
        np.testing.assert_array_equal(mine, other[:, :32])
    rest = decoder.prefill(TOKENS[32:60], cache, logits="all", chunk_size=16, start=32)
    np.testing.assert_array_equal(rest.logits, clean.logits[32:])
    for mine, other in zip(rows_of(cache), rows_of(clean_cache), strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_failure_inside_a_layer_leaves_no_trace(decoder, monkeypatch, layer):
    """Fault 4, at each layer of the second chunk."""
    down = decoder.model.layers[layer].ffn.experts[0].down
    real, calls = WeightStore.product, [0]

    def failing(store, x, *matrices, **how):
        calls[0] += down in matrices
        if down in matrices and calls[0] == 2:  # the layer's last projection: its K/V rows are written by then
            raise MemoryError("told to fail")
        return real(store, x, *matrices, **how)

    cache, clean_cache = decoder.new_cache(), decoder.new_cache()
    clean = decoder.prefill(TOKENS[:32], clean_cache, chunk_size=16)
    with monkeypatch.context() as patch:
        patch.setattr(WeightStore, "product", failing)
        with pytest.raises((MemoryError, BackendError), match="told to fail"):  # BackendError: no host in the order
            decoder.prefill(TOKENS[:32], cache, chunk_size=16)
    assert (cache.positions, [kv.rows for kv in cache]) == (16, [16] * 3)
    again = decoder.prefill(TOKENS[16:32], cache, chunk_size=16)
    np.testing.assert_array_equal(again.logits, clean.logits)


def test_progress_is_told_after_each_chunk_and_may_cancel(decoder):
    seen = []
    decoder.prefill(TOKENS[:40], decoder.new_cache(), chunk_size=16, progress=lambda *done: seen.append(done))
    assert seen == [(16, 40), (32, 40), (40, 40)]
    cache = decoder.new_cache()
    with pytest.raises(Cancelled, match="after 32 of 40 tokens"):
        decoder.prefill(TOKENS[:40], cache, chunk_size=16, progress=lambda done, total: done < 32)
    assert cache.positions == 32
    out = decoder.prefill(TOKENS[32:40], cache, progress=lambda done, total: False)  # nothing is left to cancel
    assert out.logits is not None

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.prefill(TOKENS[:40], cache, chunk_size=16, progress=stop)
    assert cache.positions == 56


# What is refused


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "empty"),
        (np.array([], np.int64), "empty"),
        ([80], "token 80 is outside the vocabulary: ids are from 0 to 79"),
        ([0, -1], "token -1 is outside"),
        ([2**63], "token 9223372036854775808 is outside"),
        ([1.0], "flat list of token ids, not float64"),
        ([True], "flat list of token ids, not bool"),
        ([[1, 2]], r"flat list of token ids, not int64 of shape \[1, 2\]"),
        ("text", "the prompt is text"),
        (b"bytes", "the prompt is text"),
        ([None], "flat list"),
        (list(range(17)), "17 tokens do not fit behind the cache's 0: the context is 16 tokens"),
    ],
)
def test_a_bad_prompt_is_named_and_leaves_the_cache(decoder, tokens, words):
    """Fault 8."""
    cache = decoder.new_cache(16)
    with pytest.raises(PromptError, match=words):
        decoder.prefill(tokens, cache)
    assert cache.positions == 0
    assert cache.nbytes == 0


def test_ragged_tokens_are_no_prompt(decoder):
    with pytest.raises(PromptError, match="flat list"):
        decoder.prefill([[1], [2, 3]], decoder.new_cache())


def test_prompts_of_one_token_and_of_the_whole_context_run(decoder):
    """Fault 8: lengths 1 and n; one more is refused, before and behind a prefix."""
    cache = decoder.new_cache(16)
    decoder.prefill([5], cache)
    decoder.prefill(TOKENS[:15], cache)
    assert cache.positions == 16
    before = rows_of(cache)
    with pytest.raises(PromptError, match="1 tokens do not fit behind the cache's 16"):
        decoder.decode(5, cache)
    for mine, other in zip(rows_of(cache), before, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_a_cache_at_another_position_is_refused(decoder):
    cache = decoder.new_cache()
    decoder.prefill(TOKENS[:5], cache)
    with pytest.raises(CacheError, match="at position 5, not at 4"):
        decoder.prefill(TOKENS[5:7], cache, start=4)
    with pytest.raises(CacheError, match="at position 5, not at 0"):
        decoder.decode(1, cache, start=0)
    assert cache.positions == 5


def test_a_truncated_cache_goes_on_as_if_it_had_never_been_longer(decoder):
    cache = decoder.new_cache()
    decoder.prefill(TOKENS[:20], cache, logits=None)
    decoder.prefill(TOKENS[100:140], cache, logits=None)
    cache.truncate(20)
    whole = decoder.prefill(TOKENS[:30], decoder.new_cache(), logits="all").logits
    assert relative(decoder.prefill(TOKENS[20:30], cache, logits="all").logits, whole[20:]) < 1e-5


def test_evicted_rows_are_not_missed(open_decoder):
    """Fault 6: a window of 7, evicted again and again while tokens come."""
    decoder = open_decoder("mistral_window")
    whole = decoder.prefill(TOKENS[:60], decoder.new_cache(), logits="all").logits
    cache = decoder.new_cache()
    decoder.prefill(TOKENS[:40], cache)
    for at in range(40, 60, 4):
        assert cache.evict() > 0
        assert [layer.rows for layer in cache] == [6] * 3
        assert relative(decoder.prefill(TOKENS[at : at + 4], cache, logits="all").logits, whole[at : at + 4]) < 1e-5
    assert cache.positions == 60


# Life and sharing


def test_a_closed_decoder_says_so_and_the_model_lives_on(open_decoder, backends):
    first = open_decoder("llama_grouped")
    cache = first.new_cache()
    first.close()
    first.close()
    for call in (lambda: first.prefill([1], cache), lambda: first.plan(), lambda: first.new_cache()):
        with pytest.raises(FrinkError, match="decoder is closed"):
            call()
    with Decoder(first.model, backends) as second:
        assert second.prefill([1, 2], second.new_cache()).logits is not None


def test_closing_the_model_closes_its_decoders(open_decoder, backends):
    decoder = open_decoder("llama_grouped")
    cache = decoder.new_cache()
    decoder.model.close()
    with pytest.raises(FrinkError, match="is closed; load it again"):
        decoder.decode(1, cache)
    with pytest.raises(FrinkError, match="is closed"):
        Decoder(decoder.model, backends)
    with pytest.raises(FrinkError, match="is closed"):
        _ = decoder.model.layers
    with pytest.raises(GgufError, match="closed"):
        decoder.model.gguf.vector("output_norm.weight")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped")
def test_closing_the_model_unmaps_the_file(save, backends):
    path = save("llama_quantized")
    model = load(path)
    decoder = Decoder(model, backends)
    decoder.prefill([1, 2, 3, 4], decoder.new_cache())
    assert str(path) in Path("/proc/self/maps").read_text()
    model.close()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_an_unknown_backend_lists_the_known_ones(decoder):
    """R3."""
    with pytest.raises(BackendError, match=r"no backend 'tpu'; known: auto, .*host"):
        Decoder(decoder.model, "tpu")


def test_the_plan_covers_every_layer(decoder):
    """B4."""
    cache = decoder.new_cache()
    decoder.prefill(TOKENS[:9], cache)
    plan = decoder.plan(batch=7, cache=cache)
    assert (plan.batch, plan.start_pos) == (7, 9)
    assert all(plan.backend_of(layer) for layer in range(3))
    with pytest.raises(SettingError, match="batch=0"):
        decoder.plan(batch=0)


def test_each_step_counts_its_experts(decoder):
    """R22."""
    assert decoder.activations == [{}, {}, {}]
    cache = decoder.new_cache()
    decoder.prefill(TOKENS[:20], cache, chunk_size=8)
    decoder.decode(1, cache)
    assert decoder.activations == [{0: 4}] * 3


def test_threads_share_a_decoder_each_with_its_own_cache(decoder):
    prompts = [integers(f"thread {i}", (40,), 80) for i in range(8)]
    alone = [decoder.prefill(prompt, decoder.new_cache(), logits="all", chunk_size=8).logits for prompt in prompts]
    start = threading.Barrier(8)

    def run(prompt):
        start.wait()
        return decoder.prefill(prompt, decoder.new_cache(), logits="all", chunk_size=8).logits

    with ThreadPoolExecutor(8) as pool:
        for mine, other in zip(pool.map(run, prompts), alone, strict=True):
            np.testing.assert_array_equal(mine, other)
