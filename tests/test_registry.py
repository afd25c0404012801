"""Names, order and making of backends (B2, B3, R3)."""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint

import pytest

from frink_numba import log, registry
from frink_numba.errors import BackendError, BackendUnavailable, SettingError
from frink_numba.registry import create_backends, known_backends, register_backend, resolve_order, unregister_backend
from tests.fakes import FakeBackend, make_layer


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry without plugins but `cuda`, that the test has for itself."""
    monkeypatch.setattr(registry, "_registered", {e.name: e for e in registry._BUILT_IN})
    monkeypatch.setattr(registry, "_entry_points_read", True)
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.delenv("FRINK_BACKEND", raising=False)


def factory(name: str):
    return lambda layers: FakeBackend(name, range(len(layers)))


def test_the_order_is_the_argument_else_the_variable_else_priority(monkeypatch: pytest.MonkeyPatch):
    """B3."""
    register_backend("slow", factory("slow"), priority=-5)
    register_backend("fast", factory("fast"), priority=200)
    assert resolve_order().names == ("fast", "cuda", "slow", "host")
    monkeypatch.setenv("FRINK_BACKEND", " slow , host ")
    assert resolve_order().names == ("slow", "host")
    assert resolve_order("fast").names == ("fast",)
    assert resolve_order(["host", "fast"]).names == ("host", "fast")
    assert resolve_order("slow,auto").names == ("slow", "fast", "cuda", "host")
    assert resolve_order("host,auto").names == ("host", "fast", "cuda", "slow")
    assert resolve_order("slow,slow").names == ("slow",)
    assert resolve_order("cuda:1,cuda,host").names == ("cuda:1", "cuda", "host")


@pytest.mark.parametrize("value", ["auto", "AUTO", ""])
def test_an_unset_or_empty_variable_is_auto(monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setenv("FRINK_BACKEND", value)
    if value == "AUTO":
        with pytest.raises(BackendError):
            resolve_order()
    else:
        assert resolve_order().names == ("cuda", "host")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "host:0", "hots"])
def test_an_unknown_name_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch, name: str):
    """R3, and where the name came from."""
    with pytest.raises(BackendError, match=rf"backends='{name}': no backend '{name}'; known: auto, cuda, host"):
        resolve_order(name)
    monkeypatch.setenv("FRINK_BACKEND", f"host,{name}")
    with pytest.raises(BackendError, match="FRINK_BACKEND="):
        resolve_order()


@pytest.mark.parametrize("nothing", ["", " , ", []])
def test_an_empty_list_is_an_error(nothing):
    with pytest.raises(SettingError, match="names no backend"):
        resolve_order(nothing)


@pytest.mark.parametrize("name", ["auto", "host", "Cuda", "a b", "", "x:1", "1x"])
def test_reserved_and_malformed_names_are_refused(name: str):
    with pytest.raises(BackendError):
        register_backend(name, factory("x"))


def test_a_name_is_taken_once_unless_replaced():
    register_backend("mine", factory("first"))
    with pytest.raises(BackendError, match="registered already"):
        register_backend("mine", factory("second"))
    register_backend("mine", factory("second"), replace=True)
    made, _ = create_backends(resolve_order("mine"), [make_layer()], None)
    assert made[0].name == "second"
    with pytest.raises(BackendError, match="not something to call"):
        register_backend("other", "text")  # type: ignore[arg-type]
    unregister_backend("mine")
    assert known_backends() == ["cuda", "host"]
    with pytest.raises(BackendError, match="no backend named 'mine'"):
        unregister_backend("mine")


def test_a_device_in_the_name_reaches_the_factory():
    seen = []
    register_backend("mine", lambda layers, device=None: seen.append(device) or FakeBackend("mine", [0]))
    create_backends(resolve_order("mine:3,mine"), [make_layer()], None)
    assert seen == ["3", None]


def unavailable(reason: str, absent: bool):
    def create(layers):
        raise BackendUnavailable(reason, absent=absent)

    return create


def test_an_unavailable_backend_is_said_once_and_quietly_only_when_nobody_asked(caplog: pytest.LogCaptureFixture):
    """B2, R23: absent hardware is an info line, unless the user named the backend; the rest are warnings."""
    register_backend("absent", unavailable("no such device", absent=True))
    register_backend("failing", unavailable("driver too old", absent=False))
    unregister_backend("cuda")
    host = factory("host")
    with caplog.at_level(logging.INFO, "frink_numba"):
        for _ in range(3):
            made, missing = create_backends(resolve_order("auto"), [], host)
    assert [b.name for b in made] == ["host"]
    assert [(m.name, m.reason) for m in missing] == [("absent", "no such device"), ("failing", "driver too old")]
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "backend absent is unavailable: no such device"),
        ("WARNING", "backend failing is unavailable: driver too old"),
    ]


def test_a_named_backend_that_is_absent_warns(caplog: pytest.LogCaptureFixture):
    register_backend("absent", unavailable("no such device", absent=True))
    with caplog.at_level(logging.INFO, "frink_numba"):
        create_backends(resolve_order("absent,host"), [], factory("host"))
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_a_list_in_which_nothing_can_run_is_an_error_with_every_reason():
    """B3: a named backend never falls back in silence."""
    register_backend("one", unavailable("no driver", absent=True))
    register_backend("two", lambda layers: 1 / 0)
    with pytest.raises(BackendError, match=r"one: no driver; two: ZeroDivisionError: division by zero\).*add 'host'"):
        create_backends(resolve_order("one,two"), [], factory("host"))
    with pytest.raises(BackendError, match="no host backend"):
        create_backends(resolve_order("host"), [], None)


@pytest.mark.parametrize("made", [object(), None, 3])
def test_a_factory_that_makes_no_backend_is_skipped(made: object):
    register_backend("odd", lambda layers: made)  # type: ignore[arg-type,return-value]
    backends, missing = create_backends(resolve_order("odd,host"), [], factory("host"))
    assert [b.name for b in backends] == ["host"]
    assert "which has no 'name'" in missing[0].reason


def test_entry_points_are_read_on_first_use_and_a_broken_one_is_skipped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """B2: names are known without importing; a plugin that cannot be imported warns once and the order goes on."""
    points = [
        EntryPoint("fine", "tests.test_registry:make_fine", registry.ENTRY_POINT_GROUP),
        EntryPoint("absent", "no_such_module:create", registry.ENTRY_POINT_GROUP),
        EntryPoint("cuda", "tests.test_registry:make_fine", registry.ENTRY_POINT_GROUP),
        EntryPoint("host", "tests.test_registry:make_fine", registry.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(registry, "_entry_points_read", False)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    assert known_backends() == ["absent", "cuda", "fine", "host"]
    with caplog.at_level(logging.INFO, "frink_numba"):
        assert resolve_order("auto").names == ("fine", "cuda", "host")
        resolve_order("auto")
        made, missing = create_backends(resolve_order("absent,fine"), [make_layer()], None)
    assert [b.name for b in made] == ["fine"]
    assert missing[0].reason.startswith("ModuleNotFoundError")
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == len(set(messages))
    for name in ("cuda", "host"):
        taken = f"backend plugin 'tests.test_registry:make_fine' is skipped: the name '{name}' is taken"
        assert taken in messages
    assert any(m.startswith("backend plugin 'absent' is skipped: ModuleNotFoundError") for m in messages)


def make_fine(layers):
    return FakeBackend("fine", range(len(layers)))


make_fine.priority = 300  # type: ignore[attr-defined]


def test_a_backend_unregistered_after_the_order_was_made_is_unavailable():
    register_backend("mine", factory("mine"))
    order = resolve_order("mine,host")
    unregister_backend("mine")
    _, missing = create_backends(order, [], factory("host"))
    assert missing[0].reason == "it was unregistered"
