"""The walk over the layers: longest runs, reasons, failures, plans."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from frink_numba import log, registry
from frink_numba.backend import Decline, Run, Serve
from frink_numba.dispatch import Dispatcher
from frink_numba.errors import BackendError, ShapeError
from tests.fakes import HEAD_DIM, HEADS, FakeBackend, make_step


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry and a memory of said lines that the test has for itself."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.delenv("FRINK_BACKEND", raising=False)


def dispatcher(step, *backends: FakeBackend, host: FakeBackend | None = None, order=None) -> Dispatcher:
    for backend in backends:
        registry.register_backend(backend.name, lambda layers, b=backend: b)
    names = order or [b.name for b in backends] + (["host"] if host else [])
    return Dispatcher(step.layers, host=(lambda layers: host) if host else None, backends=names)


def test_a_run_is_the_longest_sequence_from_its_first_layer():
    """R6: served layers 1-3 and 5 of 7 are two runs; the host takes the rest."""
    step = make_step(7)
    mine, host = FakeBackend("mine", [1, 2, 3, 5]), FakeBackend("host", range(7), amount=100)
    result = dispatcher(step, mine, host=host).run(step)
    assert mine.runs == [(1, 3), (5, 1)]
    assert host.runs == [(0, 1), (4, 1), (6, 1)]
    np.testing.assert_array_equal(result.hidden, step.hidden + np.float32(304))
    assert [int(k[0, 0, 0]) for k, _ in result.kv_rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [(s.backend, s.first, s.length) for s in result.served] == [
        ("host", 0, 1),
        ("mine", 1, 3),
        ("host", 4, 1),
        ("mine", 5, 1),
        ("host", 6, 1),
    ]


def test_the_first_of_the_order_wins_and_a_later_one_gives_way_where_it_serves_again():
    """B3: `second` serves everything, yet only where `first` does not."""
    step = make_step(6)
    first, second = FakeBackend("first", [0, 1, 4]), FakeBackend("second", range(6))
    dispatcher(step, first, second).run(step)
    assert first.runs == [(0, 2), (4, 1)]
    assert second.runs == [(2, 2), (5, 1)]


def test_a_run_ends_where_a_hidden_state_is_asked_for():
    """Hidden states of layers 1 and 3 cut the run in three, and hold what stood there."""
    step = make_step(6, hidden_after=frozenset({1, 3}))
    mine = FakeBackend("mine", range(6))
    result = dispatcher(step, mine).run(step)
    assert mine.runs == [(0, 2), (2, 2), (4, 2)]
    assert sorted(result.hidden_states) == [1, 3]
    np.testing.assert_array_equal(result.hidden_states[1], step.hidden + np.float32(2))
    np.testing.assert_array_equal(result.hidden_states[3], step.hidden + np.float32(4))


def test_the_experts_of_dense_layers_are_recorded_as_index_zero():
    """R22: what a backend does not name is expert 0, and what it names is kept."""
    step = make_step(3)
    mine, host = FakeBackend("mine", [0, 1]), FakeBackend("host", range(3))
    plain = host.run
    host.run = lambda l, length, step: _with_experts(plain(l, length, step))  # type: ignore[method-assign]  # noqa: E741
    assert dispatcher(step, mine, host=host).run(step).experts == [(0,), (0,), (4, 2)]


def _with_experts(run: Run | None) -> Run:
    assert run is not None
    run.experts = [[4, 2]]
    return run


def test_each_distinct_reason_is_said_once_per_process(caplog: pytest.LogCaptureFixture):
    """R23: two reasons over many layers and steps are two lines, without the layer's number."""
    step = make_step(6)
    mine, host = FakeBackend("mine", [2]), FakeBackend("host", range(6))
    plain = mine.can_serve

    def can_serve(l, step):  # noqa: E741
        mine.reason = "odd layer" if l % 2 else "even layer"
        return plain(l, step)

    mine.can_serve = can_serve  # type: ignore[method-assign]
    d = dispatcher(step, mine, host=host)
    with caplog.at_level(logging.INFO, "frink_numba"):
        d.run(step)
        d.run(step)
        Dispatcher(step.layers, host=lambda layers: host, backends="mine,host").run(step)
    assert sorted(r.getMessage() for r in caplog.records) == [
        "backend mine declines: even layer",
        "backend mine declines: odd layer",
    ]


def test_a_failed_run_goes_to_the_next_in_the_order_and_is_reported_once(caplog: pytest.LogCaptureFixture):
    """R21: an exception and the answer None both leave the layers to the host, within the same step."""
    for failure in (RuntimeError("out of memory"), None):
        step = make_step(4)
        before = step.hidden.copy()
        mine, host = FakeBackend("mine", [0, 1, 3]), FakeBackend("host", range(4), amount=10)
        working = mine.run

        def run(l, length, step, failure=failure, working=working):  # noqa: E741
            if l == 0 and isinstance(failure, Exception):
                raise failure
            return None if l == 0 else working(l, length, step)

        mine.run = run  # type: ignore[method-assign]
        registry._registered.pop("mine", None)
        with caplog.at_level(logging.INFO, "frink_numba"):
            result = dispatcher(step, mine, host=host).run(step)
        assert host.runs == [(0, 3)]
        assert mine.runs == [(3, 1)], "a later run is tried again"
        np.testing.assert_array_equal(result.hidden, before + np.float32(31))
        np.testing.assert_array_equal(step.hidden, before)
    said = [r.getMessage() for r in caplog.records]
    assert said == [
        "backend mine: its run failed: RuntimeError: out of memory; the next in the order takes over",
        "backend mine declines: not mine",
    ]


@pytest.mark.parametrize(
    "fault", ["hidden", "dtype", "rows", "row dtype", "missing", "experts", "nested experts", "answer"]
)
def test_a_run_of_the_wrong_shape_counts_as_a_failure(fault: str):
    """B2: a plugin that answers nonsense never reaches the caller."""
    step = make_step(2)
    mine, host = FakeBackend("mine", range(2)), FakeBackend("host", range(2), amount=10)
    working = mine.run

    def run(l, length, step):  # noqa: E741
        answer = working(l, length, step)
        if fault == "hidden":
            answer.hidden = answer.hidden[:, :-1]
        elif fault == "dtype":
            answer.hidden = answer.hidden.astype(np.float64)
        elif fault == "rows":
            answer.kv_rows[1] = (np.zeros((step.batch, HEADS, HEAD_DIM + 1), np.float32), answer.kv_rows[1][1])
        elif fault == "row dtype":
            answer.kv_rows[1] = tuple(rows.astype(np.float64) for rows in answer.kv_rows[1])
        elif fault == "missing":
            answer.kv_rows.pop()
        elif fault == "experts":
            answer.experts = [0] * length
        elif fault == "nested experts":
            answer.experts = [[[0]]] * length
        else:
            return "done"
        return answer

    mine.run = run  # type: ignore[method-assign]
    result = dispatcher(step, mine, host=host).run(step)
    np.testing.assert_array_equal(result.hidden, step.hidden + np.float32(20))
    assert len(result.kv_rows) == 2


def test_a_backend_cannot_write_to_the_hidden_batch_it_is_shown():
    """R21: a half-done run leaves the hidden batch as it was, even when the plugin tries to work in place."""
    step = make_step(2)
    before = step.hidden.copy()
    rude, host = FakeBackend("rude", range(2)), FakeBackend("host", range(2))

    def run(l, length, step):  # noqa: E741
        step.hidden += 1

    rude.run = run  # type: ignore[method-assign]
    dispatcher(step, rude, host=host).run(step)
    np.testing.assert_array_equal(step.hidden, before)


@pytest.mark.parametrize("answer", [ValueError("no idea"), True, None, Decline(["a"])])  # type: ignore[arg-type]
def test_a_misbehaving_can_serve_is_a_decline_with_its_reason(answer: object):
    """B2: an exception or a wrong answer is said in the plan, and the host serves."""
    step = make_step(2)
    mine, host = FakeBackend("mine", range(2)), FakeBackend("host", range(2))

    def can_serve(l, step):  # noqa: E741
        if isinstance(answer, Exception):
            raise answer
        return answer

    mine.can_serve = can_serve  # type: ignore[method-assign]
    d = dispatcher(step, mine, host=host)
    assert d.plan(step).rows[0].declined[0][1].startswith("can_serve ")
    assert d.run(step).served[0].backend == "host"


class _Meddler(FakeBackend):
    """Changes the step that it is asked about."""

    def can_serve(self, l, step):  # noqa: E741
        step.start_pos, step.hidden_after, step.hidden, step.caches = 9, frozenset({0}), None, []
        return super().can_serve(l, step)


def test_a_backend_that_changes_the_step_is_declined_and_harms_nobody():
    """B1: asking has no side effect, so that one that has is no answer; the step stands as it was."""
    step = make_step(3)
    fields = (step.start_pos, step.hidden_after, step.hidden, step.caches)
    meddler, host = _Meddler("meddler", range(3)), FakeBackend("host", range(3))
    engine = dispatcher(step, meddler, host=host)
    plan = engine.plan(step)
    assert plan.rows[0].declined == (("meddler", "can_serve changed the step, which is not its own"),)
    assert engine.run(step).served[0].backend == "host"
    assert (host.runs, meddler.runs) == ([(0, 3)], [])
    assert all(
        a is b for a, b in zip((step.start_pos, step.hidden_after, step.hidden, step.caches), fields, strict=True)
    )


def test_the_hidden_batch_of_a_question_cannot_be_written_to():
    step = make_step(1)

    class Writer(FakeBackend):
        def can_serve(self, l, step):  # noqa: E741
            step.hidden[0, 0] = 99
            return Serve()

    host = FakeBackend("host", [0])
    result = dispatcher(step, Writer("writer", [0]), host=host).run(step)
    np.testing.assert_array_equal(result.hidden, step.hidden + np.float32(1))
    assert step.hidden[0, 0] == 0


@pytest.mark.parametrize("where", ["can_serve", "run", "close"])
def test_an_interrupt_of_the_user_passes_through_a_plugin(where: str):
    step = make_step(1)
    mine = FakeBackend("mine", [0])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    setattr(mine, where, interrupted)
    engine = dispatcher(step, mine, host=FakeBackend("host", [0]))
    with pytest.raises(KeyboardInterrupt):
        engine.close() if where == "close" else engine.run(step)


def test_an_error_of_the_host_is_raised():
    step = make_step(1)
    host = FakeBackend("host", range(1))
    host.run = lambda *_: (_ for _ in ()).throw(MemoryError("host"))  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        dispatcher(step, host=host).run(step)


def test_a_list_without_host_makes_an_unserved_layer_an_error_with_every_reason():
    """B3: the error names the layer, the order's source and what each backend said."""
    step = make_step(3)
    one, two = FakeBackend("one", [0, 1], reason="no kernel"), FakeBackend("two", [0], reason="no memory")
    host = FakeBackend("host", range(3))
    d = dispatcher(step, one, two, order=["one", "two"])
    with pytest.raises(BackendError, match=r"no backend serves layer 2 \(one: no kernel; two: no memory\).*'host'"):
        d.run(step)
    assert host.runs == []


def test_a_plan_tells_runs_and_reasons_without_running():
    """B4: folded rows, notes, reasons; nothing runs and nothing is logged."""
    step = make_step(6)
    step.hidden = None
    mine, host = FakeBackend("mine", [1, 2, 3]), FakeBackend("host", range(6))
    plan = dispatcher(step, mine, host=host).plan(step)
    assert [(r.first, r.last, r.backend) for r in plan.rows] == [(0, 0, "host"), (1, 3, "mine"), (4, 5, "host")]
    assert plan.rows[0].declined == (("mine", "not mine"),)
    assert plan.rows[1].note == "mine's note"
    assert plan.backend_of(2) == "mine"
    assert plan.backend_of(5) == "host"
    with pytest.raises(IndexError):
        plan.backend_of(6)
    assert "layers 4-5: host" in str(plan)
    assert plan.as_dict()["runs"][1] == {
        "first": 1,
        "last": 3,
        "backend": "mine",
        "note": "mine's note",
        "declined": [],
    }
    assert not mine.runs
    assert not host.runs


def test_a_plan_shows_where_hidden_states_end_a_run():
    step = make_step(4, hidden_after=frozenset({1}))
    plan = dispatcher(step, FakeBackend("mine", range(4))).plan(step)
    assert [(r.first, r.last) for r in plan.rows] == [(0, 1), (2, 3)]


def test_a_plan_agrees_with_the_run():
    """B4: on random maps of served layers, what the plan says is what happens."""
    rng = np.random.default_rng(5)
    for trial in range(30):
        step = make_step(9, hidden_after=frozenset(rng.integers(0, 9, 2).tolist()))
        a = FakeBackend(f"a{trial}", np.flatnonzero(rng.random(9) < 0.6))
        b = FakeBackend(f"b{trial}", np.flatnonzero(rng.random(9) < 0.6))
        d = dispatcher(step, a, b, host=FakeBackend("host", range(9)))
        plan = d.plan(step)
        served = d.run(step).served
        assert [plan.backend_of(layer) for layer in range(9)] == [s.backend for s in served for _ in range(s.length)]


def test_a_step_whose_shapes_disagree_is_refused_before_any_backend_is_asked():
    """R20: a named error, never a read out of range."""
    mine = FakeBackend("mine", range(2))
    step = make_step(2)
    d = dispatcher(step, mine)
    for hidden in (None, step.hidden[:, :-1], step.hidden.astype(np.float64), step.hidden[:, ::2].repeat(2, 1)[::-1]):
        bad = make_step(2)
        bad.hidden = hidden
        with pytest.raises(ShapeError):
            d.run(bad)
    assert mine.asked == 0


def test_closing_closes_every_backend_even_when_one_fails(caplog: pytest.LogCaptureFixture):
    step = make_step(1)
    bad, good = FakeBackend("bad", [0]), FakeBackend("good", [0])
    bad.close = lambda: (_ for _ in ()).throw(RuntimeError("stuck"))  # type: ignore[method-assign]
    d = dispatcher(step, bad, good)
    with caplog.at_level(logging.WARNING, "frink_numba"):
        d.close()
    assert good.closed == 1
    assert "backend bad failed to close: RuntimeError: stuck" in caplog.text


def test_serve_is_an_answer_and_needs_no_note():
    assert Serve().note == ""


class PassingBackend(FakeBackend):
    """Declines batches of more than three rows, and says that this is no matter of the layer."""

    invariant = True

    def can_serve(self, l: int, step) -> Serve | Decline:  # noqa: E741
        return Decline("too many rows", passing=True) if step.batch > 3 else super().can_serve(l, step)


class InvariantBackend(FakeBackend):
    invariant = True


@pytest.mark.parametrize("invariant", [False, True])
def test_nobody_takes_a_place_for_one_step_where_results_may_not_depend_on_it(
    invariant: bool, monkeypatch: pytest.MonkeyPatch
):
    """FRINK_INVARIANT: a passing decline is an error that names its reason; a lasting one sends to the next backend."""
    monkeypatch.setenv("FRINK_INVARIANT", str(int(invariant)))
    small, large = make_step(2, batch=3), make_step(2, batch=5)
    mine, host = PassingBackend("mine", [0]), InvariantBackend("host", range(2))
    both = dispatcher(small, mine, host=host)
    assert [s.backend for s in both.run(small).served] == ["mine", "host"]
    large.layers = small.layers
    if not invariant:
        assert [s.backend for s in both.run(large).served] == ["host"]
        return
    with pytest.raises(
        BackendError, match=r"layer 0 \(mine: too many rows\); with FRINK_INVARIANT=1.*FRINK_BACKEND=host"
    ):
        both.run(large)
    assert [row.backend for row in both.plan(large).rows] == [None]


def test_a_failed_run_is_an_error_where_results_may_not_depend_on_it(monkeypatch: pytest.MonkeyPatch):
    """FRINK_INVARIANT: the host's bits would be others (R21 without it)."""
    monkeypatch.setenv("FRINK_INVARIANT", "1")
    step = make_step(2)
    mine, host = InvariantBackend("mine", range(2)), InvariantBackend("host", range(2))
    monkeypatch.setattr(mine, "run", lambda *_: None)
    with pytest.raises(BackendError, match="its run failed"):
        dispatcher(step, mine, host=host).run(step)
    assert host.runs == []


def test_a_backend_that_promises_nothing_is_not_asked(monkeypatch: pytest.MonkeyPatch):
    """FRINK_INVARIANT: a plugin without the attribute is closed and left out, with the reason."""
    monkeypatch.setenv("FRINK_INVARIANT", "1")
    step = make_step(2)
    mine, host = FakeBackend("mine", range(2)), InvariantBackend("host", range(2))
    both = dispatcher(step, mine, host=host)
    assert [s.backend for s in both.run(step).served] == ["host"]
    assert mine.closed == 1
    assert mine.asked == 0
    assert "may depend on how a text is cut" in both.unavailable[0].reason
    with pytest.raises(BackendError, match="may depend on how a text is cut"):
        dispatcher(step, FakeBackend("other", range(2)), order=["other"])
