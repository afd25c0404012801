"""Steps of a model: parts of sequences through the layers, then logits, scores and K/V rows to where they belong."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import numpy as np

from frink_numba.backend import Edges
from frink_numba.dispatch import Dispatcher, StepResult
from frink_numba.host.aligned import aligned, padded
from frink_numba.host.edges import bend_logits
from frink_numba.host.likelihood import log_softmax_at
from frink_numba.host.model import Model
from frink_numba.host.parts import Part
from frink_numba.host.rms_norm import rms_norm
from frink_numba.host.scratch import Scratch

SCORED_ROWS = 256
"""Tokens whose logits are held at once where targets are scored: 50 MB at a vocabulary of 50,000."""


HANDED_OVER_BYTES = 256 << 20
"""Of answered logits that callers still have. They may lie in page-locked memory, of which a machine has little."""


_MOST_NOTED = 64  # sets of experts, of which a mixture has many


class StepRunner:
    """Runs one model's steps, one at a time."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._scratch = Scratch()
        self.edges: Edges | None = Edges(
            model.embedding, model.hyper.embedding_scale, model.output_norm, model.hyper.norm_eps, model.output
        )
        self._activations: list[dict[int, int]] = [{} for _ in model.layers]
        self._used: dict[tuple[tuple[int, ...], ...], int] = {}  # experts of all layers, and in how many steps since
        self._counting = threading.Lock()  # who looks at the counts waits for no step
        self._handed_over: list[weakref.ref[np.ndarray]] = []
        self._handed_bytes = 0

    def close(self) -> None:
        """Let go of what looks into the mapped file."""
        self.edges = None

    def run(self, dispatcher: Dispatcher, parts: Sequence[Part]) -> None:
        """Take parts of different sequences through the layers, fill their outputs, and push their rows.

        All or nothing for each: what fails before its push leaves no trace.
        """
        steps = [part.step(dispatcher.layers, self.edges, self._model) for part in parts]
        if len(parts) == 1 and parts[0].keep and parts[0].targets is None:
            results = iter((dispatcher.run(steps[0]),))
        else:
            results = dispatcher.run_group(steps)
        done: list[StepResult] = []
        try:
            for part, result in zip(parts, results, strict=True):
                self._finish(part, result)
                done.append(result)
        finally:
            self._count(done)

    @property
    def activations(self) -> list[dict[int, int]]:
        """For each layer, how many steps used which expert (R22)."""
        with self._counting:
            for of_layers, times in self._used.items():
                for counts, experts in zip(self._activations, of_layers, strict=True):
                    for expert in experts:
                        counts[expert] = counts.get(expert, 0) + times
            self._used.clear()
            return [dict(counts) for counts in self._activations]

    def _count(self, results: Sequence[StepResult]) -> None:
        """Note the experts of steps: those of dense layers are always the same, and counted when somebody looks."""
        for result in results:
            key = tuple(result.experts)
            times = 1 if result.tokens is None else len(result.tokens)
            with self._counting:
                self._used[key] = self._used.get(key, 0) + times
        if len(self._used) > _MOST_NOTED:
            _ = self.activations

    def _finish(self, part: Part, result: StepResult) -> None:
        """Take what a step answered; the push comes last."""
        if part.targets is not None:
            assert part.output.scores is not None  # it was asked for
            part.output.scores[part.first : part.last] = self._scores(part, result)
        wanted = None if part.targets is not None else part.wanted()
        if part.hands_over and part.rows and result.tokens is None:
            if result.logits is not None:
                part.output.logits = self._callers(result.logits)[0]
                bend_logits(part.output.logits, self._model.hyper)
            else:
                part.output.logits = np.empty(self._model.vocab_size, np.float32)
                wanted = part.output.logits[None]
        for layer in part.hidden_after:
            part.output.hidden[layer][part.first : part.last] = result.hidden_states[layer]
        part.chosen = result.tokens
        if result.tokens is not None:
            wanted = None
        if wanted is not None and result.logits is not None:
            np.copyto(wanted, result.logits)
            bend_logits(wanted, self._model.hyper)
        elif wanted is not None:
            assert result.hidden is not None  # the dispatcher answers one of the two
            after = part.cache.positions + part.last - part.first  # the push comes later
            self._logits(result.hidden[-len(wanted) :], after - len(wanted), wanted)
        if part.stage:
            part.cache.stage(result.kv_rows)
        elif part.keep:
            part.cache.push(result.kv_rows)

    def _callers(self, logits: np.ndarray) -> np.ndarray:
        """Answered logits, or a copy where callers hold on to too many of those before, or could not change them."""
        if logits.dtype != np.float32 or not logits.flags.writeable:
            return np.array(logits, np.float32)
        owner = logits
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if self._handed_over and self._handed_over[-1]() is owner:  # of a group's member before this one
            return logits
        if self._handed_bytes + owner.nbytes > HANDED_OVER_BYTES:
            held = {id(array): array for ref in self._handed_over if (array := ref()) is not None}
            self._handed_over = list(map(weakref.ref, held.values()))
            self._handed_bytes = sum(array.nbytes for array in held.values())
            if self._handed_bytes + owner.nbytes > HANDED_OVER_BYTES:
                return logits.copy()
        self._handed_over.append(weakref.ref(owner))
        self._handed_bytes += owner.nbytes
        return logits

    def _scores(self, part: Part, result: StepResult) -> np.ndarray:
        """How likely the part's targets are, float64 [n]."""
        hyper = self._model.hyper
        if result.scores is not None and hyper.logit_divisor == 1 and not hyper.logit_softcap:
            return result.scores.astype(np.float64)
        assert part.targets is not None  # they are asked about
        targets, start = part.targets[part.first : part.last], part.cache.positions
        scores = []
        for first in range(0, len(targets), SCORED_ROWS):
            last = min(first + SCORED_ROWS, len(targets))
            if result.logits is not None:
                logits = result.logits[first:last].copy()
                bend_logits(logits, hyper)
            else:
                assert result.hidden is not None  # the dispatcher answers one of the two
                logits = np.empty((last - first, self._model.vocab_size), np.float32)
                self._logits(result.hidden[first:last], start + first, logits)
            scores.append(log_softmax_at(logits, targets[first:last]))
        return np.concatenate(scores)

    def _logits(self, hidden: np.ndarray, start: int, out: np.ndarray) -> None:
        """Final norm and output matrix over `hidden` [n, hidden] of positions from `start` on into `out` [n, vocab].

        NaN and infinity show there.
        """
        model = self._model
        weight = model.output_norm[:, None]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            if model.weights.invariant:
                for a, b, columns in aligned(start, len(hidden)):
                    x = padded(hidden[a:b], columns)
                    rms_norm(x, weight, model.hyper.norm_eps, x, self._scratch)
                    y = self._scratch.array("logits", model.vocab_size, x.shape[1])
                    out[a:b] = model.weights.product(x, model.output, out=y)[:, columns].T
                bend_logits(out, model.hyper)
                return
            normed = np.empty_like(hidden)
            rms_norm(hidden.T, weight, model.hyper.norm_eps, normed.T, self._scratch)
            model.weights.matmul(normed, model.output, out=out)
            bend_logits(out, model.hyper)
