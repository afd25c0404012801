"""Drafts from the text so far: they never change a greedy answer, whatever the steps that verify them round."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from frink_numba.errors import FrinkError, SettingError
from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from frink_numba.host.speculation import Lookup, Speculative
from tests.golden.tiny_text import text_content

# --- finding drafts ---


def brute_force(tokens: list[int], length: int, most: int) -> list[int]:
    """What follows the latest earlier occurrence of the last tokens; behind the text's end, the draft goes on."""
    wanted = tokens[-length:]
    for end in range(len(tokens) - 2, length - 2, -1):
        if tokens[end + 1 - length : end + 1] == wanted:
            whole = tokens[end + 1 :]
            while len(whole) < most:
                whole = whole + whole
            return whole[:most]
    return []


@pytest.mark.parametrize("seed", range(6))
def test_a_draft_is_what_followed_the_latest_time(seed: int):
    rng = np.random.default_rng(seed)
    text, lookup = rng.integers(0, 2 + seed, 3).tolist(), Lookup()
    found = 0
    for _ in range(150):
        for length in (1, 2, 3):
            most = int(rng.integers(1, 12))
            draft = lookup.find(text, length, most)
            assert draft == brute_force(text, length, most)
            found += bool(draft)
        text += rng.integers(0, 2 + seed, int(rng.integers(1, 4))).tolist()
    assert found > 100


def test_a_text_that_repeats_itself_is_continued_without_end():
    assert Lookup().find([5, 1, 2, 1, 2], 2, 7) == [1, 2, 1, 2, 1, 2, 1]
    assert Lookup().find([1, 2, 3], 1, 4) == []
    assert Lookup().find([4], 3, 4) == []


# --- a model of a few numbers, whose steps of several rows round otherwise ---

VOCABULARY = 6
NOISE = 1e-3  # relative, of logits


class Rows:
    """A cache of one number a position, and whether it is what a step of one row makes of it."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, bool]] = []
        self.ready: list[tuple[int, bool]] = []

    @property
    def positions(self) -> int:
        return len(self.kept)

    def advance(self, n: int = 1) -> None:
        self.kept += self.ready[:n]
        del self.ready[:n]

    def truncate(self, n: int) -> None:
        del self.kept[n:]
        self.ready = []

    def push(self, rows) -> None:
        self.kept += [(int(k), bool(v)) for k, v in zip(*rows[0], strict=True)]

    def __iter__(self):
        numbers, exact = ([row[i] for row in self.kept] for i in (0, 1))
        return iter([SimpleNamespace(prefix=lambda: (np.array(numbers, int), np.array(exact, bool)))])


class Roundabout:
    """A decoder whose logits depend on the last tokens, with many near ties.

    The smallest differences are those that rounding makes. Rows are exact if a step of one row made them, behind rows
    that are exact; the logits of all others are off by up to NOISE in whatever direction.
    """

    def __init__(self, few: int, rounding: float = NOISE) -> None:
        self.few, self.rounding = few, rounding
        self.model = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=VOCABULARY))
        self.steps = 0
        self.fails_at = -1

    def few_rows(self, cache: Rows, most: int) -> tuple[int, float]:
        return min(self.few, most), self.rounding

    def truth(self, tokens: Sequence[int]) -> np.ndarray:
        """Sometimes two are first by less than what rounding makes up. Text comes again and again, for some time."""
        rng = np.random.default_rng([*(int(t) for t in tokens[-2:]), len(tokens) // 30])
        logits = rng.standard_normal(VOCABULARY)
        if rng.random() < 0.3:
            first, second = np.argsort(logits)[-2:][::-1]
            logits[second] = logits[first] - rng.uniform(0, 1.5) * NOISE * rng.choice([1e-3, 1.0])
        return logits

    def prefill(self, tokens, cache: Rows, *, logits="last", stage=False):
        self.steps += 1
        if self.steps == self.fails_at:
            raise MemoryError("on purpose")
        noise = np.random.default_rng(self.steps)
        rows, out = [], []
        for token in tokens:
            exact = len(tokens) == 1 and all(e for _, e in cache.kept)
            rows.append((int(token), exact))
            answer = self.truth([t for t, _ in cache.kept + rows])
            if not exact:
                answer = answer + noise.uniform(-1, 1, VOCABULARY) * NOISE * np.linalg.norm(answer) * 0.9
            out.append(answer.astype(np.float32))
        cache.ready = rows
        if not stage:
            cache.advance(len(rows))
        return SimpleNamespace(logits=None if logits is None else np.array(out) if logits == "all" else out[-1])

    def decode_ahead(self, token, cache: Rows, most: int, *, stage: bool):
        return [int(np.argmax(self.prefill([token], cache, stage=True).logits))]


def answer(decoder: Roundabout, prompt: list[int], n: int, speculate: bool) -> tuple[list[int], Speculative]:
    """As a `Generation` asks a source."""
    cache, tokens = Rows(), list(prompt)
    for token in prompt:
        logits = decoder.prefill([token], cache).logits
    source = Speculative(decoder, cache, 7)  # type: ignore[arg-type]
    tokens.append(source.first(prompt, logits))
    while len(tokens) < len(prompt) + n:
        most = len(prompt) + n - len(tokens)
        if speculate:
            new = list(source.more(tokens, most))
        else:
            new = decoder.decode_ahead(tokens[-1], cache, most, stage=True)
        assert 1 <= len(new) <= most
        for token in new:
            assert cache.ready, "a token without a row"
            cache.advance()
            tokens.append(token)
        assert [t for t, _ in cache.kept] == tokens[:-1]
    return tokens[len(prompt) :], source


@pytest.mark.parametrize("few", [2, 4, 8])
@pytest.mark.parametrize("seed", range(12))
def test_no_rounding_changes_an_answer(few: int, seed: int):
    """Ties are decided by the numbers that decide them without drafts, as the rows that they follow from."""
    prompt = np.random.default_rng(seed).integers(0, VOCABULARY, 4).tolist()
    plain, _ = answer(Roundabout(few), prompt, 120, speculate=False)
    drafted, _ = answer(Roundabout(few), prompt, 120, speculate=True)
    assert drafted == plain


def test_the_numbers_of_that_test_mean_something():
    """Drafts are accepted, ties are met, and a decoder that promises too much does change answers."""
    accepted = repeated = changed = 0
    for seed in range(12):
        prompt = np.random.default_rng(seed).integers(0, VOCABULARY, 4).tolist()
        plain, _ = answer(Roundabout(8), prompt, 120, speculate=False)
        _, source = answer(Roundabout(8), prompt, 120, speculate=True)
        accepted += source.accepted
        repeated += source.repeated
        wrong, _ = answer(Roundabout(8, rounding=0.0), prompt, 120, speculate=True)
        changed += wrong != plain
    assert accepted > 300
    assert repeated > 20
    assert changed > 5


def test_a_failure_leaves_the_rows_as_they_were():
    """Wherever a step fails, also while rows are made once more: what counted counts, and the answer goes on."""
    prompt = [1, 2, 1, 2]
    plain, _ = answer(Roundabout(8), prompt, 60, speculate=False)
    met = 0
    for fails_at in range(6, 60):
        decoder, cache, tokens = Roundabout(8), Rows(), list(prompt)
        decoder.fails_at = fails_at
        for token in prompt:
            logits = decoder.prefill([token], cache).logits
        source = Speculative(decoder, cache, 7)  # type: ignore[arg-type]
        tokens.append(source.first(prompt, logits))
        while len(tokens) < len(prompt) + 60:
            try:
                new = source.more(tokens, len(prompt) + 60 - len(tokens))
            except MemoryError:
                met += 1
                assert [t for t, _ in cache.kept] == tokens[:-1]
                continue
            for token in new:
                cache.advance()
                tokens.append(token)
        assert tokens[len(prompt) :] == plain
    assert met > 20


def test_text_that_does_not_repeat_itself_is_left_alone():
    """Drafts that never agree are soon not tried any more, and are tried again from time to time."""

    class Never(Roundabout):
        def truth(self, tokens):
            return np.eye(VOCABULARY)[np.random.default_rng([*tokens]).integers(VOCABULARY)]

    _, source = answer(Never(8, rounding=0.0), [1, 2, 3], 400, speculate=True)
    assert 5 < source.steps < 60


# --- real decoders ---


def tokens_of(decoder: Decoder, prompt, n: int, **more) -> list[int]:
    return [piece.token for piece in decoder.generate(prompt, max_new_tokens=n, **more)]


@pytest.mark.parametrize("invariant", ["0", "1"])
@pytest.mark.parametrize("most", [1, 3, 7, 30])
def test_answers_of_a_tiny_model(open_decoder, monkeypatch: pytest.MonkeyPatch, most: int, invariant: str):
    """With and without results that depend on the step; also where the context ends in a draft."""
    monkeypatch.setenv("FRINK_INVARIANT", invariant)
    decoder = open_decoder(text_content())
    for prompt in ("abcabcabcabc", "hello hello hello", "x", "The same again. The same again."):
        plain = tokens_of(decoder, prompt, 48)
        assert tokens_of(decoder, prompt, 48, speculate=most) == plain
    for cache in (decoder.new_cache(40), decoder.new_cache(40)):
        whole = decoder.generate("abcabcabcabc", cache=cache, speculate=most)
        made = [piece.token for piece in whole]
        assert whole.finish_reason == "context" or made[-1] in decoder.model.tokenizer.stop_ids
        assert made == tokens_of(decoder, "abcabcabcabc", len(made))


def test_a_cache_of_float16(open_decoder, monkeypatch: pytest.MonkeyPatch):
    """Its rounding is coarser than any bound on the logits: one row a step, unless rows have the same bits."""
    for invariant in ("0", "1"):
        monkeypatch.setenv("FRINK_INVARIANT", invariant)
        decoder = open_decoder(text_content())
        cache = decoder.new_cache(dtype=np.float16)
        assert decoder.few_rows(cache, 8) == ((4, 0.0) if invariant == "1" else (1, 0.0))
        plain = tokens_of(decoder, "abcabcabcabc", 40, cache=decoder.new_cache(dtype=np.float16))
        assert tokens_of(decoder, "abcabcabcabc", 40, cache=cache, speculate=7) == plain


def test_a_cache_that_is_changed_between_two_pieces(open_decoder):
    """What was staged is gone; the answer goes on from what is there."""
    decoder = open_decoder(text_content())
    made = decoder.generate("abcabcabcabc", max_new_tokens=30, speculate=7)
    first = [next(made).token for _ in range(5)]
    made.cache.push([tuple(part[-1:].copy() for part in layer.prefix()) for layer in made.cache])
    made.cache.truncate(made.cache.positions - 1)
    rest = [piece.token for piece in made]
    assert first + rest == tokens_of(decoder, "abcabcabcabc", 30)


@pytest.mark.parametrize(
    "arguments",
    [{"temperature": 0.7}, {"repetition_penalty": 1.1}, {"speculate": -1}, {"speculate": 1000}, {"speculate": "all"}],
)
def test_what_cannot_be_drafted_is_refused(open_decoder, arguments):
    """Before the first token, by name."""
    decoder = open_decoder(text_content())
    with pytest.raises(SettingError, match="speculate"):
        decoder.generate("abc", **{"speculate": 3, **arguments})


def test_logits_that_are_not_numbers(open_decoder, monkeypatch: pytest.MonkeyPatch):
    """They are told where they would be without drafts: at the first token that depends on them."""
    decoder = open_decoder(text_content())
    plain = tokens_of(decoder, "abcabcabcabc", 20)
    prefill = Decoder.prefill

    def spoilt(self, tokens, cache, **more):
        output = prefill(self, tokens, cache, **more)
        last = cache.positions + (len(tokens) if more.get("stage") else 0)
        if output.logits is not None and last > 24:
            np.atleast_2d(output.logits)[max(0, 24 - (last - len(np.atleast_2d(output.logits)))) :] = np.nan
        return output

    monkeypatch.setattr(Decoder, "prefill", spoilt)
    monkeypatch.setattr(
        Decoder,
        "decode_ahead",
        lambda self, token, cache, most, stage: [
            int(np.argmax(_checked(self.prefill((token,), cache, stage=True).logits)))
        ],
    )
    made = []
    with pytest.raises(FrinkError, match="not numbers"):
        made.extend(piece.token for piece in decoder.generate("abcabcabcabc", max_new_tokens=20, speculate=7))
    assert made == plain[: len(made)]
    assert len(made) >= 12


def _checked(logits: np.ndarray) -> np.ndarray:
    if np.isnan(logits).any():
        raise FrinkError("the logits are not numbers")
    return logits


PROMPTS = (
    "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return width * ",
    "The cat sat on the mat. The dog sat on the mat. The bird sat on the",
    "Once upon a time there was",
)


@pytest.mark.parametrize("most", [3])
def test_the_real_model(smollm2_path, backends: str, most: int):
    """SmolLM2: the same tokens, in far fewer steps where the text repeats itself."""
    with load(smollm2_path) as model, Decoder(model, backends) as decoder:
        for number, prompt in enumerate(PROMPTS):
            plain = tokens_of(decoder, prompt, 48)
            made = decoder.generate(prompt, max_new_tokens=48, speculate=most)
            assert [piece.token for piece in made] == plain
            assert number > 1 or made.source.accepted > 12  # type: ignore[attr-defined]
