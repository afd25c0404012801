"""What a chat template may do with text and lists, each paid for from the budget of its rendering.

A budget has steps (loop rounds, calls, nested containers), characters or items that are made, and a deadline. Filters
that could make much out of little say beforehand how much it will be.
"""

from __future__ import annotations

import json
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import Environment, TemplateError, Undefined, filters, pass_environment
from jinja2.nodes import EvalContext
from jinja2.sandbox import SecurityError

MAX_STEPS = 400_000
MAX_CHARACTERS = 1 << 26
MAX_SECONDS = 20.0

_PER_ITEM = 16  # what an item of a container costs, in characters
_BLANKS = "".join(chr(code) for code in range(0x3001) if chr(code).isspace())  # what splits texts and lines

# jinja's own filters that make no more than they take.
_MODEST = (
    *("abs", "capitalize", "count", "d", "default", "e", "escape", "first", "float"),
    *("items", "last", "length", "lower", "map", "reject", "rejectattr", "reverse", "safe"),
    *("select", "selectattr", "title", "trim", "upper"),
)
_COMPARING = ("dictsort", "groupby", "max", "min", "sort", "unique")


class Refused(TemplateError):
    """The template called `raise_exception`."""


class Budget:
    """What one rendering may still do; SecurityError when it is spent."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._characters = MAX_CHARACTERS
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        """Pay for one loop round or call."""
        self._steps -= 1
        if self._steps < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS:,} steps")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"it takes more than {MAX_SECONDS:g} seconds")

    def charge(self, size: int) -> None:
        """Pay for `size` characters or items, before they are made where that is possible."""
        self._characters -= size
        if self._characters < 0:
            raise SecurityError(f"it makes more than {MAX_CHARACTERS:,} characters of text")


current: ContextVar[Budget] = ContextVar("budget")


def concat(parts: Iterable[str]) -> str:
    """Joins what a block, a macro or the template wrote."""
    charge = current.get().charge
    kept = []
    for part in parts:
        charge(len(part))
        kept.append(part)
    return "".join(kept)


def joined(parts: Sequence[Any]) -> str:
    """The operator `~`."""
    return concat([_text(part) for part in parts])


def shown(value: Any) -> Any:
    """What an output expression prints: text and numbers as they are, containers only within the budget."""
    return value if isinstance(value, str | int | float | Undefined | None) else _text(value)


def _text(value: Any) -> str:
    if not isinstance(value, str | int | float | Undefined | None):
        _charge_deep(value, 0)
    return str(value)


def _charge_deep(value: Any, per_item: int) -> None:
    """Charge what a written form of nested plain data takes at most, item by item; SecurityError for other objects."""
    charge = current.get().charge
    if isinstance(value, str):
        charge(10 * len(value))  # each character may be escaped as \U0001F600
    elif isinstance(value, Mapping):
        charge(per_item + 2)
        for key, item in value.items():
            _charge_deep(key, per_item)
            _charge_deep(item, per_item)
    elif isinstance(value, list | tuple):
        charge(per_item + 2)
        for item in value:
            _charge_deep(item, per_item)
    elif value is None or isinstance(value, int | float | Undefined):
        charge(per_item + 24)
    else:
        raise SecurityError(f"it writes out a {type(value).__name__}")


def weighed(value: Any) -> Any:
    """Pay a step for each container in `value`, counted anew wherever it is shared.

    Without it, `[x, x]` forty times over would be a small object that takes for ever to compare.
    """
    budget, containers = current.get(), (dict, list, tuple)
    left = [value] if isinstance(value, containers) else []
    while left:
        container = left.pop()
        budget.step()
        budget.charge(_PER_ITEM * len(container))
        items = container.values() if isinstance(container, dict) else container
        left += [item for item in items if isinstance(item, containers)]
    return value


def paid(value: Any) -> Any:
    """Pay for a slice."""
    if isinstance(value, str):
        current.get().charge(len(value))
    return weighed(value)


def as_list(value: Iterable[Any]) -> Sequence[Any]:
    """The items of `value`, paid one by one: of a text or a generator there may be millions."""
    if isinstance(value, list | tuple):
        return value
    charge = current.get().charge
    items = []
    for item in value:
        charge(_PER_ITEM)
        items.append(item)
    return items


def charge_tree(value: Any) -> None:
    """Pay for all text and items in `value`, counted anew wherever they are shared: what comparing it may take."""
    charge, left = current.get().charge, [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            charge(len(item))
        elif isinstance(item, dict | list | tuple):
            charge(_PER_ITEM * len(item))
            left += item
            if isinstance(item, dict):
                left += item.values()


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda item, container: item in container,
    "notin": lambda item, container: item not in container,
}


def compared(left: Any, *rest: Any) -> Any:
    """left op right, or a chain of them: (operator, operand) one behind the other. A step each, and paid for."""
    result: Any = True
    for name, right in zip(rest[::2], rest[1::2], strict=True):
        if name in ("in", "notin"):
            right = _searchable(left, right)
        else:
            _charge_comparison(left, right)
        current.get().step()
        result = _COMPARISONS[name](left, right)
        if not result:
            return result
        left = right
    return result


def _charge_comparison(left: Any, right: Any) -> None:
    if isinstance(left, str) and isinstance(right, str):
        current.get().charge(min(len(left), len(right)))
    elif isinstance(left, dict | list | tuple) and isinstance(right, dict | list | tuple):
        charge_tree(left)
        charge_tree(right)


def _searchable(item: Any, container: Any) -> Any:
    """`container` after payment for a search through it; the items of an iterator as a list."""
    if isinstance(container, str):
        current.get().charge(len(container))
        return container
    if isinstance(container, Mapping | Undefined):
        charge_tree(item)
        return container
    container = as_list(container)
    charge = current.get().charge
    for other in container:
        charge(1)
        _charge_comparison(item, other)
    return container


def charge_split(text: str, separator: str | None) -> None:
    """Pay for the parts of `text`, at most one more than it has separators; None: blanks and line ends."""
    signs = sum(map(text.count, _BLANKS)) if separator is None else text.count(separator)
    current.get().charge(_PER_ITEM * (signs + 1))


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        value = map(filters.make_attrgetter(environment, attribute), value)
    d, parts = _text(d), [_text(part) for part in as_list(value)]
    charge_join(d, parts)
    return d.join(parts)


def charge_join(separator: str, parts: Sequence[str]) -> None:
    current.get().charge(len(separator) * len(parts) + sum(map(len, parts)))


def _replace(s: Any, old: str, new: str, count: int | None = None) -> str:
    text, old, new = _text(s), _text(old), _text(new)
    charge_replace(text, old, new)
    return text.replace(old, new, -1 if count is None else count)


def charge_replace(text: str, old: str, new: str) -> None:
    current.get().charge(len(text) + text.count(old) * len(new))


def _int(value: Any, default: int = 0, base: int = 10) -> int:
    """A whole number of at most 64 characters: arithmetic on longer ones runs where no budget is looked at."""
    if isinstance(value, str) and len(value) > 64:
        raise SecurityError("a whole number has at most 64 characters")
    return filters.do_int(value, default, base)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, str) else " " * _small(width, "the width of indent")
    current.get().charge(len(s) + (len(s.splitlines()) + 1) * len(margin))
    return filters.do_indent(s, margin, first, blank)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    return filters.do_round(value, _small(precision, "the precision of round"), method)


def _sum(iterable: Iterable[float], start: float = 0) -> float:
    total = start
    for number in iterable:
        if not isinstance(total, int | float) or not isinstance(number, int | float):
            raise SecurityError("it sums up what is no number")
        total += number
    return total


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the models' own templates expect it: nothing escaped for HTML."""
    width = 0 if indent is None else _small(indent, "the indent of tojson")
    _charge_deep(x, 32 * width + sum(map(len, separators or ())))
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _small(number: int, what: str) -> int:
    if not isinstance(number, int) or not 0 <= number <= 64:
        raise SecurityError(f"{what} is not a number from 0 to 64")
    return number


def _guarded(function: Callable[..., Any], lists: bool = False, compares: bool = False) -> Callable[..., Any]:
    """A filter that is a step and pays for its result. jinja's marks on `function` are kept.

    One that `lists` makes a list of its value, the first argument behind what jinja passes by those marks; one that
    `compares` does too, and pays for all that is in it.
    """

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        budget = current.get()
        budget.step()
        if lists or compares:
            place = int(isinstance(args[0], Environment | EvalContext))
            value = args[place] if isinstance(args[place], dict) else as_list(args[place])
            args = (*args[:place], value, *args[place + 1 :])
            if compares:
                charge_tree(value)
        result = function(*args, **kwargs)
        if isinstance(result, str):
            budget.charge(len(result))
        elif isinstance(result, list | tuple):
            budget.charge(_PER_ITEM * len(result))
        return result

    return guarded


def raise_exception(message: Any) -> None:
    raise Refused(_text(message))


def strftime_now(format: str) -> str:
    if len(format) > 256:
        raise SecurityError("the format of strftime_now is longer than 256 characters")
    return datetime.now().strftime(format)


def all_filters() -> dict[str, Callable[..., Any]]:
    """The filters of a chat template, by name, and the sandbox's own: `compared`, `joined`, `paid` and `weighed`."""
    own: dict[str, Callable[..., Any]] = {
        "indent": _indent,
        "int": _int,
        "join": _join,
        "replace": _replace,
        "round": _round,
        "string": _text,
        "sum": _sum,
        "tojson": _tojson,
        "joined": joined,
        "compared": compared,
    }
    modest = {name: filters.FILTERS[name] for name in _MODEST}
    guarded = {name: _guarded(function) for name, function in (modest | own).items()}
    guarded["list"] = _guarded(filters.FILTERS["list"], lists=True)
    comparing = {name: _guarded(filters.FILTERS[name], compares=True) for name in _COMPARING}
    return guarded | comparing | {"weighed": weighed, "paid": paid}


def all_tests() -> dict[str, Callable[..., Any]]:
    """The tests that compare, under all of jinja's names for them; they are paid for like operators."""
    names = {
        "eq": ("eq", "equalto", "=="),
        "ne": ("ne", "!="),
        "lt": ("lt", "lessthan", "<"),
        "lteq": ("le", "<="),
        "gt": ("gt", "greaterthan", ">"),
        "gteq": ("ge", ">="),
        "in": ("in",),
    }
    return {name: _test(operation) for operation, all_names in names.items() for name in all_names}


def _test(operation: str) -> Callable[[Any, Any], Any]:
    return lambda value, other: compared(value, operation, other)
