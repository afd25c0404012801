"""Chat templates come with models, so they are hostile input: a jinja environment that bounds what one can do.

A template sees plain data only, reaches no attribute but those listed here, and pays for what it does from a budget
(template_filters). What it may use is what published templates use: jinja's statements, loop controls, those filters,
`raise_exception`, `strftime_now`, and `generation` blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Cycler, Namespace
from jinja2.visitor import NodeTransformer

from frink_numba.host.template_filters import (
    Budget,
    Refused,
    all_filters,
    all_tests,
    as_list,
    charge_join,
    charge_replace,
    charge_split,
    charge_tree,
    concat,
    current,
    raise_exception,
    shown,
    strftime_now,
    weighed,
)

__all__ = ["MAX_SOURCE", "Refused", "SecurityError", "TemplateSyntaxError", "environment", "render"]

MAX_SOURCE = 1 << 20  # characters; the longest published templates have some 30,000

_STRING_METHODS = (
    *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal"),
    *("isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition"),
    *("removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split"),
    *("splitlines", "startswith", "strip", "swapcase", "title", "upper"),
)
_LOOP_FIELDS = (
    *("changed", "cycle", "depth", "depth0", "first", "index", "index0", "last", "length", "nextitem", "previtem"),
    *("revindex", "revindex0"),
)
_ATTRIBUTES: tuple[tuple[type, frozenset[str]], ...] = (
    (str, frozenset(_STRING_METHODS)),
    (dict, frozenset({"get", "items", "keys", "values"})),
    (list, frozenset({"count", "index"})),
    (tuple, frozenset({"count", "index"})),
    (LoopContext, frozenset(_LOOP_FIELDS)),
    (Macro, frozenset({"arguments", "caller", "catch_kwargs", "catch_varargs", "name"})),
    (Cycler, frozenset({"current", "next", "reset"})),
)


def render(template: Template, context: Mapping[str, Any]) -> str:
    """The text of a template of `environment()`; raises what jinja and the template raise."""
    token = current.set(Budget())
    try:
        return concat(template.generate(context))
    finally:
        current.reset(token)


def environment() -> ImmutableSandboxedEnvironment:
    """A fresh environment; compile with `from_string`, render with `render`."""
    return _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=shown)


class _Counted:
    """An iterable of a `for` statement whose rounds are steps."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        step = current.get().step
        for item in self._items:
            step()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # of a generator a TypeError, as jinja expects


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks an answer for training; here it only is a scope."""

    tags = {"generation"}  # noqa: RUF012 - jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Rewrite(NodeTransformer):
    """Routes loops, `~`, comparisons, slices and the containers that a template writes through the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "joined")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        arguments: list[nodes.Expr] = []
        for operand in node.ops:
            arguments += [nodes.Const(operand.op), operand.expr]
        return nodes.Filter(node.expr, "compared", arguments, [], None, None, lineno=node.lineno)

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "weighed")

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "weighed") if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "paid") if isinstance(node.arg, nodes.Slice) else node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generator(CodeGenerator):
    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        _Rewrite().visit(node)
        super().visit_Template(node, frame)


def _paid_arguments(owner: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a text's method, after payment where the result may be larger than the text."""
    if method == "join" and args:
        args = (as_list(args[0]), *args[1:])
        charge_join(owner, args[0])
    elif method == "replace" and len(args) >= 2:
        charge_replace(owner, *args[:2])
    elif method in ("split", "rsplit"):
        charge_split(owner, args[0] if args else kwargs.get("sep"))
    elif method == "splitlines":
        charge_split(owner, None)
    return args


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    concat = staticmethod(concat)
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {**all_filters(), "counted": _Counted}
        self.tests = {**self.tests, **all_tests()}
        del self.globals["lipsum"]
        self.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr.startswith("_"):
            return False
        if type(obj) is Namespace:
            return True
        return any(isinstance(obj, kind) and attr in names for kind, names in _ATTRIBUTES)

    def wrap_str_format(self, value: Any) -> Any:
        if super().wrap_str_format(value) is not None:
            raise SecurityError("it formats text with format")
        return None

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = current.get()
        budget.step()
        weighed((args, kwargs))
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            budget.charge(len(owner))
            args = _paid_arguments(owner, obj.__name__, args, kwargs)
        elif isinstance(owner, list | tuple):  # its count and index compare
            charge_tree((owner, args))
        elif isinstance(obj, LoopContext) and args:  # a recursive loop's next level
            args = (_Counted(args[0]), *args[1:])
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise SecurityError("it formats text with %")
        if operator == "**" and not (abs(left) <= 1 << 64 and abs(right) <= 64):
            raise SecurityError("it raises to a large power")
        sized = (str, list, tuple)
        if operator == "+" and isinstance(left, sized) and isinstance(right, sized):
            current.get().charge(len(left) + len(right))
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, sized) and isinstance(other, int):
                    current.get().charge(len(one) * max(other, 0))
                elif isinstance(one, int) and one.bit_length() > 1024:
                    raise SecurityError("it multiplies large numbers")
        return weighed(super().call_binop(context, operator, left, right))
