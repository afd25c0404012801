"""Groups of steps: one call where a backend takes them, one by one else, and answers that are looked at."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pytest

from frink_numba import log, registry
from frink_numba.backend import Run, Serve, Step
from frink_numba.dispatch import Dispatcher
from frink_numba.errors import BackendError, ShapeError
from tests.fakes import FakeBackend, make_step

LAYERS = 3


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(log, "_said", set())


class GroupBackend(FakeBackend):
    """A FakeBackend that takes groups; `answer(runs)` changes what it says."""

    def __init__(self, name: str, serves: Sequence[int] = range(LAYERS), answer=lambda runs: runs) -> None:
        super().__init__(name, serves)
        self.answer = answer
        self.groups: list[int] = []
        self.takes = True

    def serves_group(self, steps: Sequence[Step]) -> Serve | None:
        return Serve("together") if self.takes else None

    def run_group(self, steps: Sequence[Step]) -> list[Run] | None:
        self.groups.append(len(steps))
        made = [self.run(0, LAYERS, step) for step in steps]
        self.runs.clear()
        return self.answer(made)


def steps_of(*sizes: int, **fields) -> list[Step]:
    steps = [make_step(LAYERS, n, **fields) for n in sizes]
    for step in steps:
        step.layers = steps[0].layers
    return steps


def walk(step: Step, *backends: FakeBackend) -> Dispatcher:
    for backend in backends:
        registry.register_backend(backend.name, lambda layers, b=backend: b)
    return Dispatcher(step.layers, host=None, backends=[backend.name for backend in backends])


def test_a_group_is_one_call():
    steps, mine = steps_of(2, 5, 1), GroupBackend("mine")
    results = list(walk(steps[0], mine).run_group(steps))
    assert (mine.groups, mine.runs) == ([3], [])
    for step, result in zip(steps, results, strict=True):
        np.testing.assert_array_equal(result.hidden, step.hidden + np.float32(LAYERS))
        assert len(result.kv_rows) == LAYERS
        assert result.experts == [(0,)] * LAYERS
        assert [(s.backend, s.first, s.length) for s in result.served] == [("mine", 0, LAYERS)]


def test_who_takes_no_groups_runs_one_by_one():
    """Any backend, and mixtures of them, stay right."""
    steps = steps_of(2, 5)
    plain, rest = FakeBackend("plain", [0, 2]), FakeBackend("rest", range(LAYERS), amount=10)
    results = list(walk(steps[0], plain, rest).run_group(steps))
    assert plain.runs == [(0, 1), (2, 1)] * 2
    np.testing.assert_array_equal(results[1].hidden, steps[1].hidden + np.float32(12))
    declining = GroupBackend("declining")
    declining.takes = False
    list(walk(steps[0], declining).run_group(steps))
    assert (declining.groups, declining.runs) == ([], [(0, LAYERS)] * 2)


def test_a_hidden_state_in_between_cuts_the_runs():
    steps, mine = steps_of(2, 3, hidden_after=frozenset({1})), GroupBackend("mine")
    results = list(walk(steps[0], mine).run_group(steps))
    assert mine.groups == []
    assert sorted(results[0].hidden_states) == [1]
    last, again = steps_of(2, 3, hidden_after=frozenset({LAYERS - 1})), GroupBackend("again")
    results = list(walk(last[0], again).run_group(last))
    assert again.groups == [2]
    np.testing.assert_array_equal(results[1].hidden_states[LAYERS - 1], last[1].hidden + np.float32(LAYERS))


def fail(runs):
    raise RuntimeError("told to fail")


WRONG = {
    "nothing": lambda runs: None,
    "an error": fail,
    "too few": lambda runs: runs[:1],
    "no rows": lambda runs: [Run(run.hidden, []) for run in runs],
    "a short batch": lambda runs: [Run(run.hidden[:1], run.kv_rows) for run in runs],
    "scores that nobody asked for": lambda runs: [
        Run(run.hidden, run.kv_rows, scores=np.zeros(1, np.float32)) for run in runs
    ],
}


@pytest.mark.parametrize("what", WRONG)
def test_a_group_that_fails_falls_back_to_its_steps(what: str, caplog: pytest.LogCaptureFixture):
    """R21: said once; each step then runs alone, by the same backend first."""
    steps, mine = steps_of(2, 3), GroupBackend("mine", answer=WRONG[what])
    dispatcher = walk(steps[0], mine)
    with caplog.at_level(logging.WARNING, "frink_numba"):
        for _ in range(2):
            results = list(dispatcher.run_group(steps))
    np.testing.assert_array_equal(results[1].hidden, steps[1].hidden + np.float32(LAYERS))
    assert mine.groups == [2, 2]
    said = [record.message for record in caplog.records]
    assert len(said) == (0 if what == "nothing" else 1), said


def test_an_error_leaves_those_before_it_done():
    """R10: results come one by one, so that each can be pushed before the next runs."""
    steps, mine = steps_of(2, 3, 4), FakeBackend("mine", range(LAYERS))
    real = mine.run
    mine.run = lambda l, length, step: fail(None) if step.batch == 3 else real(l, length, step)  # type: ignore[method-assign]  # noqa: E741
    results = walk(steps[0], mine).run_group(steps)
    assert next(results).hidden.shape[0] == 2
    with pytest.raises(BackendError, match="told to fail"):
        next(results)


def test_rows_that_nobody_keeps_need_not_be_answered():
    steps = steps_of(2, 3, keep=False)
    mine = GroupBackend("mine", answer=WRONG["no rows"])
    results = list(walk(steps[0], mine).run_group(steps))
    assert mine.groups == [2]
    assert [len(result.kv_rows) for result in results] == [0, 0]
    assert mine.runs == []


def test_bad_steps_are_refused_before_anything_runs():
    steps, mine = steps_of(2, 3), GroupBackend("mine")
    steps[1].hidden = steps[1].hidden[:1]
    with pytest.raises(ShapeError):
        list(walk(steps[0], mine).run_group(steps))
    assert mine.groups == []


def test_no_steps_no_call():
    steps, mine = steps_of(1), GroupBackend("mine")
    assert list(walk(steps[0], mine).run_group([])) == []
    assert mine.groups == []
