"""Steps that may go on by themselves: who gets to, what is checked, and what happens when it goes wrong."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from frink_numba import registry
from frink_numba.backend import Run, Step
from frink_numba.dispatch import Dispatcher
from tests.fakes import HEAD_DIM, HEADS, WIDTH, FakeBackend, make_layer, make_step

LAYERS = 3


class AheadBackend(FakeBackend):
    """Chooses 7, 8, 9, ... where it may; `spoil` changes its answer."""

    takes_tokens = goes_ahead = True

    def __init__(self, serves=range(LAYERS), spoil=lambda run: run) -> None:
        super().__init__("fast", serves)
        self.spoil = spoil
        self.asked_ahead: list[int] = []

    def run(self, l: int, length: int, step: Step) -> Run | None:  # noqa: E741
        self.asked_ahead.append(step.ahead)
        rows = [np.full((max(1, step.ahead), HEADS, HEAD_DIM), layer, np.float32) for layer in range(l, l + length)]
        hidden = np.zeros((1, WIDTH), np.float32)
        if not step.ahead:
            return self.spoil(Run(hidden, [(row, row) for row in rows]))
        return self.spoil(Run(None, [(row, row) for row in rows], tokens=np.arange(7, 7 + step.ahead, dtype=np.int32)))


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


def walk(*backends: FakeBackend) -> Dispatcher:
    for backend in backends:
        registry.register_backend(backend.name, lambda layers, made=backend: made, replace=True)
    return Dispatcher([make_layer() for _ in range(LAYERS)], host=None, backends=[x.name for x in backends])


def step_ahead(dispatcher: Dispatcher, n: int = 4, **fields) -> Step:
    step = make_step(LAYERS, batch=1, tokens=np.array([3]), ahead=n, choices=20, **fields)
    step.layers, lookup = dispatcher.layers, step.hidden
    step.hidden, step.lookup, step.logits = None, (lambda: lookup), 1
    return step


def test_a_backend_that_runs_all_layers_goes_ahead():
    fast = AheadBackend()
    dispatcher = walk(fast)
    result = dispatcher.run(step_ahead(dispatcher))
    assert result.tokens.tolist() == [7, 8, 9, 10]
    assert result.hidden is result.logits is None
    assert [k.shape[0] for k, _ in result.kv_rows] == [4] * LAYERS
    assert fast.asked_ahead == [4]


def test_it_may_answer_fewer():
    def fewer(run: Run) -> Run:
        run.tokens, run.kv_rows = run.tokens[:2], [(k[:2], v[:2]) for k, v in run.kv_rows]
        return run

    dispatcher = walk(AheadBackend(spoil=fewer))
    assert dispatcher.run(step_ahead(dispatcher)).tokens.tolist() == [7, 8]


@pytest.mark.parametrize("serves", [range(LAYERS - 1), range(1, LAYERS)])
def test_a_run_over_some_layers_is_an_ordinary_one(serves: range):
    fast, slow = AheadBackend(serves), FakeBackend("slow", range(LAYERS))
    dispatcher = walk(fast, slow)
    result = dispatcher.run(step_ahead(dispatcher))
    assert result.tokens is None
    assert result.hidden.shape == (1, WIDTH)
    assert fast.asked_ahead == [0]
    assert [k.shape[0] for k, _ in result.kv_rows] == [1] * LAYERS


def test_others_get_the_step_without_it():
    slow = FakeBackend("slow", range(LAYERS))
    dispatcher = walk(slow)
    result = dispatcher.run(step_ahead(dispatcher))
    assert result.tokens is None
    assert result.hidden is not None


def test_a_wanted_hidden_state_makes_it_an_ordinary_one():
    fast = AheadBackend()
    dispatcher = walk(fast)
    result = dispatcher.run(step_ahead(dispatcher, hidden_after=frozenset({0})))
    assert result.tokens is None
    assert set(fast.asked_ahead) == {0}


def broken(**change):
    def spoil(run: Run) -> Run:
        for name, value in change.items():
            setattr(run, name, value)
        return run

    return spoil


ONE_ROW = [(np.zeros((1, HEADS, HEAD_DIM), np.float32),) * 2] * LAYERS
WRONG = {
    "no room for more": broken(tokens=np.arange(5, dtype=np.int32)),
    "none": broken(tokens=np.zeros(0, np.int32)),
    "of another kind": broken(tokens=np.zeros(4, np.float32)),
    "in a table": broken(tokens=np.zeros((1, 4), np.int32)),
    "beyond the choices": broken(tokens=np.array([1, 2, 3, 20], np.int32)),
    "below": broken(tokens=np.array([1, 2, -2, 3], np.int32)),
    "rows of one step": broken(kv_rows=ONE_ROW),
    "nothing": lambda run: None,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_or_a_failure_leaves_the_step_to_the_next(name: str, caplog: pytest.LogCaptureFixture):
    """R21: one token, by the next in the order; nothing of the answer is used."""
    fast, slow = AheadBackend(spoil=WRONG[name]), FakeBackend("slow", range(LAYERS))
    dispatcher = walk(fast, slow)
    with caplog.at_level(logging.WARNING, "frink_numba"):
        result = dispatcher.run(step_ahead(dispatcher))
    assert result.tokens is None
    assert [served.backend for served in result.served] == ["slow"]
    assert [k.shape[0] for k, _ in result.kv_rows] == [1] * LAYERS
    assert float(result.kv_rows[0][0][0, 0, 0]) == 1  # the slow one's
    assert fast.asked_ahead == [4]
