"""Steps of a model: parts of sequences through the layers, then logits, scores and K/V rows to where they belong."""

from __future__ import annotations

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


class StepRunner:
    """Runs one model's steps, one at a time. `activations`: for each layer, how many steps used which expert (R22)."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._scratch = Scratch()
        self.edges: Edges | None = Edges(
            model.embedding, model.hyper.embedding_scale, model.output_norm, model.hyper.norm_eps, model.output
        )
        self.activations: list[dict[int, int]] = [{} for _ in model.layers]
        self._handed_over: list[tuple[weakref.ref[np.ndarray], int]] = []

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

    def _count(self, results: Sequence[StepResult]) -> None:
        """Count the experts of steps, those of a group's dense layers at once."""
        used: dict[int, tuple[list[tuple[int, ...]], int]] = {}  # experts, and in how many steps
        for result in results:
            times = 1 if result.tokens is None else len(result.tokens)
            before = used.get(id(result.experts))
            used[id(result.experts)] = result.experts, times + (before[1] if before else 0)
        for of_layers, times in used.values():
            for counts, experts in zip(self.activations, of_layers, strict=True):
                for expert in experts:
                    counts[expert] = counts.get(expert, 0) + times

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
        if self._handed_over and self._handed_over[-1][0]() is owner:  # of a group's member before this one
            return logits
        held = sum(nbytes for _, nbytes in self._handed_over)
        if held + owner.nbytes > HANDED_OVER_BYTES:
            self._handed_over = [entry for entry in self._handed_over if entry[0]() is not None]
            held = sum(nbytes for _, nbytes in self._handed_over)
            if held + owner.nbytes > HANDED_OVER_BYTES:
                return logits.copy()
        self._handed_over.append((weakref.ref(owner), owner.nbytes))
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
