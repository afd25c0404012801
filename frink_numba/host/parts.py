"""A part of a sequence of tokens that goes through the layers in one step, and where its results belong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from frink_numba.backend import Edges, Step
from frink_numba.host.edges import embed
from frink_numba.host.kv_cache import KVCache
from frink_numba.host.model import Model
from frink_numba.layer import Layer


@dataclass(slots=True)
class Output:
    """What a prefill or a decode answers.

    `logits` float32: [vocab] of the last token, [n, vocab] of all, or None. `hidden`: for each layer asked for the
    hidden batch that it hands on, float32 [n, hidden], before the final norm. `scores`: of each target that was given,
    the natural logarithm of its probability, float64 [n]. `tokens`: the likeliest one and those behind it, where these
    alone were asked for; none where the logits are not numbers.
    """

    logits: np.ndarray | None = None
    hidden: dict[int, np.ndarray] = field(default_factory=dict)
    scores: np.ndarray | None = None
    tokens: list[int] | None = None


@dataclass(slots=True)
class Part:
    """Tokens first .. last-1 of a sequence's `ids`, int64 [n], behind the rows of `cache`.

    `keep` False: they are the whole sequence, `cache` is empty and stays so. `stage`: their rows are written, and
    do not count. `targets`, int64 [n]: for each of `ids` the token whose probability behind it is asked for, in place
    of logits. `hands_over`: the last logits become `output.logits` as they were answered, without a copy. `ahead`: of
    one token, so many may be chosen among the first `choices`, as in `Step`: `chosen`.
    """

    ids: np.ndarray
    first: int
    last: int
    cache: KVCache
    hidden_after: frozenset[int]
    output: Output
    keep: bool = True
    stage: bool = False
    ahead: int = 0
    choices: int = 0
    chosen: np.ndarray | None = None
    targets: np.ndarray | None = None
    hands_over: bool = False

    @property
    def rows(self) -> int:
        """How many of its last tokens' logits are wanted."""
        if self.targets is not None:
            return self.last - self.first
        if self.hands_over:
            return int(self.last == len(self.ids))
        wanted = self.wanted()
        return 0 if wanted is None else len(wanted)

    def wanted(self) -> np.ndarray | None:
        """The rows of `output.logits` that this part fills, [rows, vocab]; None when it fills none."""
        logits = self.output.logits
        if logits is None:
            return None
        if logits.ndim == 2:
            return logits[self.first : self.last]
        return logits[None] if self.last == len(self.ids) else None

    def tokens(self) -> list[int]:
        """What was chosen, but what comes from logits that are no numbers: maybe none."""
        assert self.chosen is not None  # a backend has gone ahead
        unknown = np.flatnonzero(self.chosen < 0)
        tokens: list[int] = self.chosen[: unknown[0] if len(unknown) else None].tolist()
        return tokens

    def step(self, layers: Sequence[Layer], edges: Edges | None, model: Model) -> Step:
        """Its step."""
        tokens = self.ids[self.first : self.last]
        return Step(
            layers,
            self.cache,
            self.cache.positions,
            len(tokens),
            hidden_after=self.hidden_after,
            tokens=tokens,
            edges=edges,
            lookup=lambda: embed(model.embedding, tokens, model.hyper),
            logits=self.rows,
            targets=None if self.targets is None else self.targets[self.first : self.last],
            keep=self.keep,
            ahead=self.ahead,
            choices=self.choices,
        )
