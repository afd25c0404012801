"""From logits to the next token: repetition penalty, temperature, top-k, top-p, min-p, in this order, then one draw.

The order and each step's meaning are those of transformers' logits processors. Temperature 0 is greedy: the most likely
token after the penalty, the lowest id among equals. All steps work on whole vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from frink_numba.errors import FrinkError, SettingError
from frink_numba.host.integers import checked_integer, shown


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; SettingError for a value out of its range. The defaults are greedy.

    temperature: logits are divided by it; 0 is greedy. top_k: keep the k most likely tokens, and those equal to the
    k-th; 0 keeps all. top_p: keep the fewest most likely tokens whose probabilities sum to at least this; 1 keeps all.
    min_p: keep tokens at least this times as likely as the most likely one. repetition_penalty: of tokens that the
    prompt or the answer holds already, positive logits are divided by it and negative ones multiplied; 1 is none.
    seed: equal seeds choose equal tokens; None draws a new one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        checked_integer("top_k", self.top_k, 0)
        if self.seed is not None:
            checked_integer("seed", self.seed, 0)
        self._check("temperature", lambda t: 0 <= t < math.inf, "a number from 0 up")
        self._check("top_p", lambda p: 0 < p <= 1, "a number above 0, at most 1")
        self._check("min_p", lambda p: 0 <= p <= 1, "a number from 0 to 1")
        # Of float32 logits, those times or by such a penalty are still finite.
        self._check("repetition_penalty", lambda r: 1e-6 <= r <= 1e6, "a number from 0.000001 to 1000000")

    def _check(self, name: str, good: Callable[[float], bool], what: str) -> None:
        """Keep the field as float; NumPy's numbers are numbers, too."""
        value = getattr(self, name)
        try:
            if isinstance(value, str | bytes | bool | np.bool_):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise SettingError(f"{name}={shown(value)}: expected {what}") from None
        if not good(number):
            raise SettingError(f"{name}={shown(value)}: expected {what}")
        object.__setattr__(self, name, number)


NOT_NUMBERS = "the logits are not numbers: the model's weights or a backend are at fault"


def are_numbers(logits: np.ndarray) -> bool:
    """Whether none of the logits is NaN."""
    return not math.isnan(logits.max())


def check_logits(logits: np.ndarray) -> None:
    """FrinkError for logits with NaN."""
    if not are_numbers(logits):
        raise FrinkError(NOT_NUMBERS)


def most_likely(logits: np.ndarray) -> int:
    """The token of the largest of `logits` float32 [vocab], the lowest id among equals. FrinkError for NaN."""
    check_logits(logits)
    return int(np.argmax(logits))


class Sampler:
    """Chooses one token after the other under one `Sampling`; it holds the random state and which tokens were seen."""

    def __init__(self, sampling: Sampling, vocab: int) -> None:
        self.sampling = sampling
        self._random = np.random.default_rng(sampling.seed)
        self._seen = np.zeros(vocab, dtype=bool)

    def see(self, tokens: Iterable[int]) -> None:
        """Count `tokens` as seen, for the repetition penalty."""
        self._seen[np.fromiter(tokens, np.int64)] = True

    def choose(self, logits: np.ndarray) -> int:
        """The next token for `logits` float32 [vocab]; it is seen from now on. FrinkError for logits with NaN."""
        check_logits(logits)
        if self.sampling.temperature == 0:
            token = int(np.argmax(self._penalized(logits)))
        else:
            ids, probabilities = self.distribution(logits)
            token = int(ids[_draw(probabilities, self._random.random())])
        self._seen[token] = True
        return token

    def distribution(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that may be chosen, int64 [n], and their probabilities, float64 [n], which sum to 1.

        The temperature must not be 0. Nothing is drawn.
        """
        s = self.sampling
        scores = self._penalized(logits)
        ids = np.arange(len(scores))
        if 0 < s.top_k < len(scores):
            ids = np.flatnonzero(scores >= np.partition(scores, -s.top_k)[-s.top_k])
            scores = scores[ids]
        peak = scores.max()
        if np.isinf(peak):  # those at infinity share all there is
            weights = (scores == peak).astype(np.float64)
        else:
            with np.errstate(over="ignore"):  # of a tiny temperature: minus infinity, which is no weight
                weights = np.exp((scores.astype(np.float64) - float(peak)) / s.temperature)
        p = weights / weights.sum()
        if s.top_p < 1:
            ids, p = _nucleus(ids, p, s.top_p)
        if s.min_p:
            kept = p >= s.min_p * p.max()
            ids, p = ids[kept], p[kept]
        return ids, p / p.sum()

    def _penalized(self, logits: np.ndarray) -> np.ndarray:
        penalty = self.sampling.repetition_penalty
        if penalty == 1:
            return logits
        with np.errstate(over="ignore"):
            scaled = np.where(logits > 0, logits / penalty, logits * penalty)
        return np.where(self._seen, scaled, logits)


def _nucleus(ids: np.ndarray, p: np.ndarray, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """The fewest most likely of `ids` whose probabilities `p` sum to `top_p` or more, most likely first.

    All tokens under (1 - top_p) / n together weigh less than 1 - top_p, so none of them is among these: the sort is
    spared most of the vocabulary.
    """
    candidates = np.flatnonzero(p >= (1 - top_p) / len(p))
    order = candidates[np.argsort(-p[candidates], kind="stable")]
    before = np.cumsum(p[order]) - p[order]
    kept = order[before < top_p]
    return ids[kept], p[kept]


def _draw(probabilities: np.ndarray, uniform: float) -> int:
    """The index whose share of the unit interval holds `uniform`."""
    ends = np.cumsum(probabilities)
    return int(np.searchsorted(ends, uniform * ends[-1], side="right"))
