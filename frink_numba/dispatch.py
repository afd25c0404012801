"""The walk over the layers: ask, take the longest run of the best backend, go on (R6, R7, R10, R21, B3).

The dispatcher never touches a cache: it answers every layer's K/V rows, and the caller pushes all or none (R10).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter

import numpy as np

from frink_numba import settings
from frink_numba.backend import Backend, Decline, Edges, Run, Serve, Step
from frink_numba.errors import BackendError, ShapeError
from frink_numba.layer import Layer
from frink_numba.log import warn_once
from frink_numba.plan import Memory, Plan, PlanRow, fold
from frink_numba.registry import HOST, PLUGIN_ERRORS, Factory, create_backends, describe, resolve_order
from frink_numba.step_checks import check_hidden, check_run, check_step


@dataclass(frozen=True, slots=True)
class Served:
    """One run as it happened."""

    backend: str
    first: int
    length: int


@dataclass(slots=True)
class StepResult:
    """A step's outcome over all layers.

    `hidden` float32 [batch, hidden_dim], or None where a backend made the `logits` of the step's last rows or nobody
    wants any; `kv_rows` and `experts` one entry a layer; `hidden_states` the hidden batch after each layer of
    `step.hidden_after`. `tokens` where a backend went ahead (see `Step`), None where the step was an ordinary one.
    """

    hidden: np.ndarray | None
    kv_rows: Sequence[tuple[np.ndarray, np.ndarray]]
    experts: list[tuple[int, ...]]
    hidden_states: dict[int, np.ndarray]
    served: list[Served]
    logits: np.ndarray | None = None
    tokens: np.ndarray | None = None
    scores: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Who serves a layer, and what those asked before said."""

    backend: Backend | None
    note: str
    declined: tuple[tuple[str, str], ...]


class Dispatcher:
    """Backends over one model's layers; `backends` as in `resolve_order`, `host` the engine's own factory."""

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        host: Factory | None,
        backends: str | Sequence[str] | None = None,
    ) -> None:
        self.layers = layers
        self.order = resolve_order(backends)
        self._invariant: bool = settings.get("FRINK_INVARIANT")
        self.backends, self.unavailable = create_backends(self.order, layers, host, invariant=self._invariant)

    def close(self) -> None:
        """Close every backend; may be called twice."""
        for backend in self.backends:
            try:
                backend.close()
            except PLUGIN_ERRORS as error:
                warn_once(f"backend {backend.name} failed to close: {describe(error)}")

    def expect(self, edges: Edges | None) -> None:
        """Steps over all layers, between `edges`, are about to come: the first backend may begin what it can."""
        expect = getattr(self.backends[0], "expect", None) if self.backends else None
        if expect is not None:
            try:
                expect(edges)
            except PLUGIN_ERRORS as error:
                warn_once(f"backend {self.backends[0].name}: it cannot begin ahead: {describe(error)}")

    @property
    def chunk_size(self) -> int:
        """Rows of a step that suit the first backend, which may say so (`chunk_size`); 0 where it says nothing."""
        wanted = getattr(self.backends[0], "chunk_size", 0) if self.backends else 0
        return wanted if isinstance(wanted, int) and wanted > 0 else 0

    @property
    def scores(self) -> bool:
        """Whether the first backend may answer how likely given tokens are, so that no logits need be held."""
        return bool(self.backends) and bool(getattr(self.backends[0], "scores", False))

    def run(self, step: Step) -> StepResult:
        """Take `step.hidden`, or what `step.lookup` makes of its tokens, through every layer.

        A backend that fails after admission is reported once, and the next in the order serves its layers (R21);
        an error of `host` itself is raised. BackendError names the first layer that nobody serves, with every reason.
        """
        check_step(step)
        hidden, step = step.hidden, _shown(step, step.hidden)  # the one that backends are asked about
        barred: dict[int, list[tuple[str, str]]] = {}  # layer -> backends that failed there in this step
        known = self._knows(step)
        if known is not None and _takes(known, step):
            run, failure = self._try_run(known, 0, len(self.layers), step, hidden)
            if run is not None:
                return _whole_result(known, run, step, [(0,)] * len(self.layers))
            barred = {layer: [(known.name, failure)] for layer in range(len(self.layers))}
        result = StepResult(hidden, [], [], {}, [])
        l = 0  # noqa: E741
        while l < len(self.layers):
            verdicts = self._longest_run(l, step, barred)
            backend, length = verdicts[0].backend, len(verdicts)
            if step.ahead and not (length == len(self.layers) and getattr(backend, "goes_ahead", False)):
                step = replace(step, ahead=0)  # an ordinary step, which others may serve
                continue
            if backend is None:
                raise BackendError(self._nobody(l, verdicts[0]))
            _say_declines(verdicts, barred.get(l, ()))
            if result.hidden is None and not getattr(backend, "takes_tokens", False):
                assert step.lookup is not None  # `check_step` has seen it, and a run before has answered its batch
                result.hidden = step.lookup()
                check_hidden(result.hidden, step)
            run, failure = self._try_run(backend, l, length, step, result.hidden)
            if run is None:
                for layer in range(l, l + length):
                    barred.setdefault(layer, []).append((backend.name, failure))
                continue
            result.hidden, result.logits, result.tokens, result.scores = run.hidden, run.logits, run.tokens, run.scores
            # Rows that a cache has lent as a whole are pushed as a whole.
            result.kv_rows = run.kv_rows if length == len(self.layers) else [*result.kv_rows, *run.kv_rows]
            result.experts += [tuple(map(int, used)) for used in run.experts] if run.experts else [(0,)] * length
            result.served.append(Served(backend.name, l, length))
            l += length  # noqa: E741
            if l - 1 in step.hidden_after and run.hidden is not None:  # `check_run` has seen that it is there
                result.hidden_states[l - 1] = run.hidden
        return result

    def run_group(self, steps: Sequence[Step]) -> Iterator[StepResult]:
        """The results of several steps, each over a cache of its own, in their order.

        One call where the first backend serves all layers of all of them at once (`serves_group`, `run_group`). Else,
        or when that fails, each step runs by itself as in `run` when its result is asked for, so that an error leaves
        those before it done and those behind it untouched.
        """
        for step in steps:
            check_step(step)
        results = self._at_once(steps)
        yield from map(self.run, steps) if results is None else results

    def _at_once(self, steps: Sequence[Step]) -> list[StepResult] | None:
        """What the first backend makes of the whole group; None when it does not serve it, or failed."""
        backend = self.backends[0] if self.backends else None
        serves, run = getattr(backend, "serves_group", None), getattr(backend, "run_group", None)
        if not steps or backend is None or serves is None or run is None:
            return None
        layers = len(self.layers)
        if any(step.hidden_after - {layers - 1} for step in steps):
            return None  # its runs would end in between
        try:
            if not isinstance(serves(steps), Serve):
                return None
            runs = run([_begun(step, getattr(backend, "takes_tokens", False)) for step in steps])
            if runs is None:  # it has said why
                return None
            if len(runs) != len(steps):
                raise ShapeError(f"it answered {len(runs)} runs for {len(steps)} steps")
            for step, made in zip(steps, runs, strict=True):
                check_run(made, self.layers, 0, layers, step)
        except PLUGIN_ERRORS as error:
            if backend.name != HOST:  # what is wrong with a step shows when the host runs it alone
                warn_once(f"backend {backend.name}: a group failed: {describe(error)}; its steps run one by one")
            return None
        dense: list[tuple[int, ...]] = [(0,)] * layers
        return [_whole_result(backend, made, step, dense) for step, made in zip(steps, runs, strict=True)]

    def few_rows(self, step: Step) -> tuple[int, float]:
        """How many of the step's rows cost what one does and give what steps of one row each give, and how nearly.

        See `Backend`. (1, 0.0) where no backend that says so serves all layers.
        """
        backend = self._knows(step)
        if backend is None:
            verdicts = self._longest_run(0, step, {})
            backend = verdicts[0].backend if len(verdicts) == len(self.layers) else None
        ask = getattr(backend, "few_rows", None)
        if backend is None or ask is None:
            return 1, 0.0
        try:
            rows, rounding = ask(step)
            rows, rounding = int(rows), float(rounding)
        except PLUGIN_ERRORS as error:
            warn_once(f"backend {backend.name}: few_rows failed: {describe(error)}")
            return 1, 0.0
        return (min(rows, step.batch), rounding) if rows > 1 and 0 <= rounding < 1 else (1, 0.0)

    def host_bytes(self, nbytes: int) -> np.ndarray:
        """Memory for a cache's rows, uint8 [nbytes], from the first backend that has a kind of its own to give."""
        for backend in self.backends:
            lend = getattr(backend, "host_bytes", None)
            if lend is not None and nbytes:
                try:
                    block = lend(nbytes)
                    if isinstance(block, np.ndarray) and block.dtype == np.uint8 and block.shape == (nbytes,):
                        return block
                except PLUGIN_ERRORS as error:
                    warn_once(f"backend {backend.name}: its memory for caches failed: {describe(error)}")
        return np.empty(nbytes, np.uint8)

    def plan(self, step: Step) -> Plan:
        """Who would serve which layer of `step`, without running anything (B4); `step.hidden` may be None."""
        rows = []
        for l in range(len(self.layers)):  # noqa: E741
            verdict = self._verdict(l, step, {})
            name = verdict.backend.name if verdict.backend else None
            rows.append(PlanRow(l, l, name, verdict.note, verdict.declined))
        folded = fold(rows, step.hidden_after)
        memory = filter(None, (self._memory(backend, folded, step) for backend in self.backends))
        return Plan(step.batch, step.start_pos, folded, tuple(self.unavailable), tuple(memory))

    def _memory(self, backend: Backend, rows: Sequence[PlanRow], step: Step) -> Memory | None:
        """What a backend says that its share of a plan takes; None where it serves nothing or says nothing."""
        runs = [(row.first, row.last - row.first + 1) for row in rows if row.backend == backend.name]
        ask = getattr(backend, "memory", None)
        if not runs or ask is None:
            return None
        try:
            said = ask(runs, step)
        except PLUGIN_ERRORS as error:
            warn_once(f"backend {backend.name}: its memory is not known: {describe(error)}")
            return None
        return said if isinstance(said, Memory) else None

    def _verdict(self, l: int, step: Step, barred: dict[int, list[tuple[str, str]]]) -> _Verdict:  # noqa: E741
        """The first backend of the order that serves `l`, and why those before it do not.

        With FRINK_INVARIANT nobody takes the place of one that serves the layer in other steps.
        """
        declined: list[tuple[str, str]] = list(barred.get(l, ()))
        failed = {name for name, _ in declined}
        if failed and self._invariant:
            return _Verdict(None, "", tuple(declined))
        for backend in self.backends:
            if backend.name in failed:
                continue
            answer = _ask(backend, l, step)
            if isinstance(answer, Serve):
                return _Verdict(backend, answer.note, tuple(declined))
            declined.append((backend.name, answer.reason))
            if answer.passing and self._invariant:
                break
        return _Verdict(None, "", tuple(declined))

    def _longest_run(self, l: int, step: Step, barred: dict[int, list[tuple[str, str]]]) -> list[_Verdict]:  # noqa: E741
        """The verdicts of the longest run of layers from `l` that one backend wins (R6).

        It ends after a layer whose hidden state is asked for.
        """
        run = [self._verdict(l, step, barred)]
        for end in range(l + 1, len(self.layers)):
            if end - 1 in step.hidden_after:
                break
            verdict = self._verdict(end, step, barred)
            if verdict.backend is not run[0].backend:
                break
            run.append(verdict)
        return run

    def _knows(self, step: Step) -> Backend | None:
        """The first backend, where it knows by itself that it serves all layers of the step (`serves_all`).

        Between steps that are like the ones before, layers need not be asked about, and the device waits the less.
        """
        backend = self.backends[0] if self.backends and self.layers and not step.hidden_after else None
        serves_all = getattr(backend, "serves_all", None)
        if backend is None or serves_all is None:
            return None
        try:
            answer = serves_all(step)
        except PLUGIN_ERRORS:
            return None  # what is wrong shows when it is asked about a layer
        return backend if isinstance(answer, Serve) and isinstance(answer.note, str) else None

    def _try_run(
        self,
        backend: Backend,
        l: int,  # noqa: E741
        length: int,
        step: Step,
        hidden: np.ndarray | None,
    ) -> tuple[Run | None, str]:
        """The run, checked; or None and why. What a backend gets to see cannot be written to."""
        if backend.name == HOST:
            run = backend.run(l, length, _shown(step, hidden))
            check_run(run, self.layers, l, length, step)
            return run, ""
        try:
            run = backend.run(l, length, _shown(step, hidden))
            if run is not None:
                check_run(run, self.layers, l, length, step)
                return run, ""
            return None, "its run failed"  # it has said why
        except PLUGIN_ERRORS as error:
            failure = f"its run failed: {describe(error)}"
            warn_once(f"backend {backend.name}: {failure}; the next in the order takes over")
            return None, failure

    def _nobody(self, l: int, verdict: _Verdict) -> str:  # noqa: E741
        reasons = [f"{name}: {reason}" for name, reason in verdict.declined]
        reasons += [f"{entry.name}: {entry.reason}" for entry in self.unavailable]
        remedy = "" if self.order.has_host else "; add 'host' to the list"
        if self._invariant and self.order.has_host:
            remedy = "; with FRINK_INVARIANT=1 no other backend may go on in its place: try FRINK_BACKEND=host"
        return f"{self.order.source}: no backend serves layer {l} ({'; '.join(reasons)}){remedy}"


_STEP_FIELDS = tuple(field.name for field in fields(Step))
_fields = attrgetter(*_STEP_FIELDS)


def _ask(backend: Backend, l: int, step: Step) -> Serve | Decline:  # noqa: E741
    """`can_serve`, with a plugin's misbehaviour turned into a reason (B2)."""
    if backend.name == HOST:
        return backend.can_serve(l, step)
    before = _fields(step)
    try:
        answer = backend.can_serve(l, step)
    except PLUGIN_ERRORS as error:
        answer = Decline(f"can_serve failed: {describe(error)}")
    # The step itself, and no copy, is what is asked about: a backend may keep what it found out about it.
    if any(now is not then for now, then in zip(_fields(step), before, strict=True)):
        for name, value in zip(_STEP_FIELDS, before, strict=True):
            setattr(step, name, value)
        return Decline("can_serve changed the step, which is not its own")
    if isinstance(answer, Serve) and isinstance(answer.note, str):
        return answer
    if isinstance(answer, Decline) and isinstance(answer.reason, str):
        return answer
    return Decline(f"can_serve answered {type(answer).__name__} instead of Serve or Decline")


def _takes(backend: Backend, step: Step) -> bool:
    """Whether a backend that serves all layers takes the step as it is: tokens in place of rows, tokens to choose."""
    if step.hidden is None and not getattr(backend, "takes_tokens", False):
        return False
    return not step.ahead or bool(getattr(backend, "goes_ahead", False))


def _whole_result(backend: Backend, run: Run, step: Step, dense: list[tuple[int, ...]]) -> StepResult:
    """The result of a step that one run served; `dense`: the experts of layers that have one."""
    count = len(dense)
    return StepResult(
        run.hidden,
        run.kv_rows,
        dense if run.experts is None else [tuple(map(int, used)) for used in run.experts],
        {count - 1: run.hidden} if count - 1 in step.hidden_after and run.hidden is not None else {},
        [Served(backend.name, 0, count)],
        run.logits,
        run.tokens,
        run.scores,
    )


def _shown(step: Step, hidden: np.ndarray | None) -> Step:
    """A copy of the step with a view of `hidden` that cannot be written to by mistake."""
    shown = Step(*_fields(step))  # `dataclasses.replace` takes five times as long
    shown.hidden = hidden
    if hidden is not None:
        shown.hidden = hidden.view()
        shown.hidden.flags.writeable = False
    return shown


def _begun(step: Step, from_tokens: bool) -> Step:
    """The step as a backend gets it at layer 0."""
    if step.hidden is None and not from_tokens:
        assert step.lookup is not None  # `check_step` has seen it
        hidden = step.lookup()
        check_hidden(hidden, step)
        return _shown(step, hidden)
    return step if step.hidden is None else _shown(step, step.hidden)


def _say_declines(verdicts: Sequence[_Verdict], said: Sequence[tuple[str, str]]) -> None:
    """One line for each distinct reason per process (R23); failures in `said` were reported when they happened."""
    alike = dict.fromkeys(verdict.declined for verdict in verdicts)
    for name, reason in dict.fromkeys(pair for declined in alike for pair in declined):
        if (name, reason) not in said:
            warn_once(f"backend {name} declines: {reason}")
