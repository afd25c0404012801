"""Which backends exist, in what order they are asked, and how they are made (B2, B3, R3).

A backend comes from `register_backend`, from an installed package's entry point in the group `frink_numba.backends`,
or is built in (`cuda`). `host` is the engine's own: the engine hands its factory over, so any engine can have its own.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from frink_numba import settings
from frink_numba.backend import Backend
from frink_numba.errors import BackendError, BackendUnavailable, FrinkError, SettingError
from frink_numba.layer import Layer
from frink_numba.log import say_once, warn_once

if TYPE_CHECKING:
    from importlib import metadata

ENTRY_POINT_GROUP = "frink_numba.backends"
AUTO = "auto"
HOST = "host"
PLUGIN_PRIORITY = 50

PLUGIN_ERRORS = (Exception, SystemExit)
"""What a plugin may raise without taking the engine down (B2); KeyboardInterrupt is the user's, and passes."""

Factory = Callable[..., Backend]
"""`factory(layers)`, or `factory(layers, device="1")` for a name such as "cuda:1"; raises BackendUnavailable."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A backend by name; `source` is its factory, or where to import it from: "module:attribute" or an entry point."""

    name: str
    source: Factory | str | metadata.EntryPoint
    priority: int | None  # None: the factory's own attribute `priority`, read when it is imported

    def factory(self) -> Factory:
        loaded: object = self.source
        if isinstance(self.source, str):
            module, attribute = self.source.split(":")
            loaded = getattr(import_module(module), attribute)
        elif not callable(self.source):
            loaded = self.source.load()
        if not callable(loaded):
            raise BackendUnavailable(f"its factory is a {type(loaded).__name__}, not something to call")
        return loaded


_BUILT_IN = (Registered("cuda", "frink_numba.cuda.backend:create", 100),)

_lock = threading.Lock()
_registered: dict[str, Registered] = {entry.name: entry for entry in _BUILT_IN}
_entry_points_read = False


def register_backend(name: str, factory: Factory, *, priority: int = PLUGIN_PRIORITY, replace: bool = False) -> None:
    """Make `factory` known as `name` in this process (B2).

    Without an order of the user's, backends are asked by falling `priority`: cuda has 100, host always closes the list.
    BackendError when the name is malformed, reserved or taken (unless `replace`).
    """
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
        raise BackendError(f"backend name {name!r}: use lower-case letters, digits, '-' and '_', a letter first")
    if name in (AUTO, HOST):
        raise BackendError(f"backend name {name!r} is reserved; choose another")
    if not callable(factory):
        raise BackendError(f"backend {name!r}: the factory is a {type(factory).__name__}, not something to call")
    if not isinstance(priority, int):
        raise BackendError(f"backend {name!r}: priority {priority!r} is not a whole number")
    _read_entry_points()
    with _lock:
        if name in _registered and not replace:
            raise BackendError(f"backend {name!r} is registered already; choose another name or pass replace=True")
        _registered[name] = Registered(name, factory, priority)


def unregister_backend(name: str) -> None:
    """Forget `name`; BackendError when it is unknown."""
    with _lock:
        if _registered.pop(name, None) is None:
            raise BackendError(f"no backend named {name!r} is registered")


def known_backends() -> list[str]:
    """Names that may be given, sorted; entry points are read on the first call, and none is imported."""
    _read_entry_points()
    with _lock:
        return sorted([HOST, *_registered])


def _read_entry_points() -> None:
    global _entry_points_read
    with _lock:
        if _entry_points_read:
            return
        _entry_points_read = True
        from importlib import metadata  # who names what is built in does without it

        for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
            if point.name in (AUTO, HOST) or point.name in _registered:
                warn_once(f"backend plugin {point.value!r} is skipped: the name {point.name!r} is taken")
                continue
            _registered[point.name] = Registered(point.name, point, None)


@dataclass(frozen=True, slots=True)
class Order:
    """Backends in the order they are asked. `named`: those the user named, whose absence is worth a warning."""

    names: tuple[str, ...]
    named: frozenset[str]
    source: str  # for messages: who asked for this order

    @property
    def has_host(self) -> bool:
        return HOST in self.names


def resolve_order(backends: str | Sequence[str] | None = None) -> Order:
    """The order of B3: the argument, else FRINK_BACKEND, else priority; `auto` in a list stands for all the others.

    BackendError names an unknown backend and lists the known ones (R3); SettingError an empty list.
    """
    if backends is None:
        backends = settings.get("FRINK_BACKEND")
        source = f"FRINK_BACKEND={backends!r}"
    else:
        source = f"backends={backends!r}"
    asked = [word.strip() for word in _words(backends, source)]
    asked = [word for word in asked if word]
    if not asked:
        raise SettingError(f"{source}: names no backend; known: auto, {', '.join(known_backends())}")
    names: list[str] = []
    for word in asked:
        if word != AUTO:
            _check_known(word, source)
            names.append(word)
            continue
        taken = {name.partition(":")[0] for name in asked}
        names += [name for name in _by_priority() if name not in taken]
        if HOST not in asked:
            names.append(HOST)
    return Order(tuple(dict.fromkeys(names)), frozenset(asked) - {AUTO}, source)


def _words(backends: str | Sequence[str], source: str) -> Sequence[str]:
    words = backends.split(",") if isinstance(backends, str) else backends
    if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        raise SettingError(f"{source}={backends!r}: expected names of backends, as a list or with commas between them")
    return words


def _check_known(word: str, source: str) -> None:
    name, colon, device = word.partition(":")
    with _lock:
        known = name == HOST or name in _registered
    if not (known or name in known_backends()) or (colon and (name == HOST or not device)):
        raise BackendError(f"{source}: no backend {word!r}; known: auto, {', '.join(known_backends())}")


def _by_priority() -> list[str]:
    """Registered names by falling priority; a plugin that cannot be imported is reported once and left out (B2)."""
    _read_entry_points()
    with _lock:
        entries = list(_registered.values())
    ranked = []
    for entry in entries:
        priority = entry.priority
        if priority is None:
            try:
                priority = int(getattr(entry.factory(), "priority", PLUGIN_PRIORITY))
            except PLUGIN_ERRORS as error:
                warn_once(f"backend plugin {entry.name!r} is skipped: {describe(error)}")
                continue
        ranked.append((-priority, entry.name))
    return [name for _, name in sorted(ranked)]


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A backend of the order that cannot run here, and why."""

    name: str
    reason: str


def create_backends(
    order: Order, layers: Sequence[Layer], host: Factory | None, *, invariant: bool = False
) -> tuple[list[Backend], list[Unavailable]]:
    """Make the backends of `order` for one model's layers; `host` makes the engine's own.

    One that cannot run here, that does not promise `invariant` results where these are asked for, or that misbehaves,
    is reported once and left out: a warning when the user named it or the machine has what it needs, else an info line.
    BackendError when none is left.
    """
    made: list[Backend] = []
    missing: list[Unavailable] = []
    for name in order.names:
        try:
            backend = _create(name, layers, host)
            if invariant and getattr(backend, "invariant", False) is not True:
                backend.close()
                again = "; load the model again with it set" if name == HOST else ""
                raise BackendUnavailable(f"FRINK_INVARIANT=1, and its results may depend on how a text is cut{again}")
        except BackendUnavailable as error:
            reason, quiet = str(error), error.absent and name not in order.named
        except PLUGIN_ERRORS as error:
            reason, quiet = describe(error), False
        else:
            made.append(backend)
            continue
        missing.append(Unavailable(name, reason))
        say_once(logging.INFO if quiet else logging.WARNING, f"backend {name} is unavailable: {reason}")
    if not made:
        reasons = "; ".join(f"{entry.name}: {entry.reason}" for entry in missing)
        remedy = "" if HOST in order.names else "; add 'host' to the list"
        raise BackendError(f"{order.source}: no backend can run here ({reasons}){remedy}")
    return made, missing


def _create(name: str, layers: Sequence[Layer], host: Factory | None) -> Backend:
    if name == HOST:
        if host is None:
            raise BackendUnavailable("this engine has no host backend")
        return host(layers)
    base, _, device = name.partition(":")
    with _lock:
        entry = _registered.get(base)
    if entry is None:
        raise BackendUnavailable("it was unregistered")
    factory = entry.factory()
    backend = factory(layers, device=device) if device else factory(layers)
    for attribute in ("name", "can_serve", "run", "close"):
        if not hasattr(backend, attribute):
            raise BackendUnavailable(f"its factory made a {type(backend).__name__}, which has no {attribute!r}")
    if not isinstance(backend.name, str) or backend.name == HOST:
        raise BackendUnavailable(f"it calls itself {backend.name!r}; a backend's name is a text other than 'host'")
    return backend


def describe(error: BaseException) -> str:
    """An error as one line: our own by their message, others with their type."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # a plugin's error may fail to say what it is
        text = ""
    if isinstance(error, FrinkError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
