"""Hostile templates: none reaches a Python object, runs for ever or eats the memory."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from frink_numba.errors import ChatTemplateError
from frink_numba.host.chat import ChatTemplate
from frink_numba.host.tokenizer import Tokenizer
from tests.vocabularies import sentencepiece

TOKENIZER = Tokenizer.from_metadata(sentencepiece())
MESSAGES = [{"role": "user", "content": "Hi"}]


def render(source: str) -> str:
    return ChatTemplate({"default": source}, TOKENIZER).render(MESSAGES)


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__",
        "messages.__class__.__base__.__subclasses__()",
        "messages[0].__init__.__globals__",
        "messages[0]['__class__'].mro()",
        "cycler.__init__.__globals__.os",
        "joiner.__init__.__globals__.os",
        "namespace.__init__.__globals__.os",
        "range.__self__.x",
        "raise_exception.__globals__.os",
        "strftime_now.__code__.co_code",
        "self.__init__.__globals__",
        "self._TemplateReference__context.environment",
        "(messages | map(attribute='__class__') | first).mro()",
        "(messages | groupby('__class__') | first).x.y",
        "messages.append(1)",
        "messages.clear()",
        "messages[0].update(a=1)",
        "messages[0].pop('role')",
        "messages[0].setdefault('a', 1)",
        "'{0.__class__}'.format('')",
        "'{0}'.format_map({})",
        "('%s' % messages)",
        "'a'.ljust(1000000000)",
        "'a'.encode()",
        "'a'.translate({})",
        "cycler('a').items[0]",
        "(1).bit_length()",
        "(1.5).hex()",
    ],
)
def test_objects_are_out_of_reach(expression: str) -> None:
    """Neither internals, nor methods that change or swell a value; not even where jinja's own sandbox allows it."""
    with pytest.raises(ChatTemplateError, match=r"may not|UndefinedError|has no attribute"):
        render("{{ " + expression + " }}")


@pytest.mark.parametrize("filter", ["attr('x')", "center(9)", "format", "pprint", "xmlattr", "urlize", "random"])
def test_filters_that_no_template_needs_are_not_there(filter: str) -> None:
    """Named when the template is compiled."""
    with pytest.raises(ChatTemplateError, match="No filter named"):
        render("{{ messages | " + filter + " }}")


def test_lipsum_is_not_there() -> None:
    """jinja's text generator is an entrance to its module."""
    with pytest.raises(ChatTemplateError, match="'lipsum' is undefined"):
        render("{{ lipsum() }}")


def doubling(step: str, start: str = "'ab'") -> str:
    return f"{{% set ns = namespace(x={start}) %}}{{% for i in range(80) %}}{step}{{% endfor %}}{{{{ ns.x | length }}}}"


# 100,000 texts of which each takes a millisecond to compare with b.
LONG = "{% set a = 'x' * 5000000 %}{% set x = [a ~ 'a'] * 100000 %}{% set b = a ~ 'b' %}"

HUGE = {
    "nested loops": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "loops over a list": (
        "{% set l = range(3000) | list %}"
        "{% for a in l %}{% for b in l %}{% for c in l %}{% endfor %}{% endfor %}{% endfor %}"
    ),
    "a long range": "{% for a in range(10 ** 9) %}{% endfor %}",
    "calls": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "endless calls": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive loop": (
        "{% for a in [1, 1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}"
    ),
    "blocks": "{% block a %}{{ self.a() }}{% endblock %}",
    "output": "{% set x = 'x' * 1000000 %}{% for a in range(90000) %}{{ x }}{% endfor %}",
    "times": "{{ 'a' * 10 ** 10 }}",
    "times, swapped": "{{ 10 ** 10 * 'a' }}",
    "times list": "{{ [1] * 10 ** 10 }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "large numbers": doubling("{% set ns.x = ns.x * ns.x %}", "3"),
    "plus": doubling("{% set ns.x = ns.x + ns.x %}"),
    "plus of lists": doubling("{% set ns.x = ns.x + ns.x %}", "[1]"),
    "tilde": doubling("{% set ns.x = ns.x ~ ns.x %}"),
    "set block": doubling("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + doubling("{% set ns.x = m(ns.x) %}"),
    "call block": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + doubling("{% set ns.x %}{% call m() %}{{ ns.x }}{% endcall %}{% endset %}"),
    "replace method": doubling("{% set ns.x = ns.x.replace('a', ns.x) %}"),
    "replace filter": doubling("{% set ns.x = ns.x | replace('a', ns.x) %}"),
    "join method": doubling("{% set ns.x = ns.x.join([ns.x, ns.x]) %}"),
    "join filter": doubling("{% set ns.x = [ns.x, ns.x] | join(ns.x) %}"),
    "join of an attribute": doubling("{% set ns.x = [{'a': ns.x}, {'a': ns.x}] | join(attribute='a') %}"),
    "shared lists": doubling("{% set ns.x = [ns.x, ns.x] %}"),
    "shared tuples": doubling("{% set ns.x = (ns.x, ns.x) %}"),
    "shared mappings": doubling("{% set ns.x = {'a': ns.x, 'b': ns.x} %}", "{}"),
    "shared by dict": doubling("{% set ns.x = dict(a=ns.x, b=ns.x) %}", "{}"),
    "shared arguments": "{% set ns = namespace(x=[]) %}{% macro m() %}{% set ns.x = varargs %}{% endmacro %}"
    "{% for i in range(80) %}{{ m(ns.x, ns.x) }}{% endfor %}",
    "list of a text": "{{ ('\U0001f999' * 60000000) | list | length }}",
    "list of a generator": "{{ ('\U0001f999' * 60000000) | select | list | length }}",
    "sorted text": "{{ ('\U0001f999' * 60000000) | sort | length }}",
    "grouped text": "{{ ('\U0001f999' * 60000000) | groupby(0) | length }}",
    "joined text": "{{ ''.join('\U0001f999' * 20000000) | length }}{{ ('\U0001f999' * 20000000) | join | length }}",
    "split": "{{ ('ab,' * 20000000).split(',') | length }}",
    "split at blanks": "{{ ('ab ' * 20000000).split() | length }}",
    "split lines": "{{ ('ab\u2028' * 20000000).splitlines() | length }}",
    "slices of a text": "{% set x = 'x' * 1000000 %}{% set ns = namespace(x=[]) %}"
    "{% for a in range(90000) %}{% set ns.x = ns.x + [x[1:]] %}{% endfor %}",
    "slices of a list": "{% set x = range(90000) | list %}{% set ns = namespace(x=[]) %}"
    "{% for a in range(90000) %}{% set ns.x = x[1:] %}{% endfor %}",
    "written out": "{% set x = ['a' * 10000] * 10000 %}{{ [x, x, x] }}",
    "as text": "{% set x = ['a' * 10000] * 10000 %}{{ x | string | length }}",
    "as JSON": "{% set x = ['a' * 10000] * 10000 %}{{ x | tojson | length }}",
    "joined": "{% set x = ['a' * 10000] * 10000 %}{{ x | join | length }}",
    "indent": "{{ 'a' | indent(10 ** 9, true) }}",
    "indent text": "{% set x = 'a\n' * 100000 %}{{ x | indent('a' * 100000) | length }}",
    "JSON indent": "{{ [1] | tojson(indent=10 ** 9) }}",
    "JSON separators": "{{ ([1] * 100000) | tojson(separators=['a' * 100000, ':']) | length }}",
    "in a long list": LONG + "{{ (b in x) ~ (b in x) }}",
    "a chain of comparisons": LONG + "{{ 1 < 2 != b in x }}",
    "in a generator": LONG + "{{ b in (x | select) }}",
    "in a text": "{% set x = 'a' * 30000000 %}" + "{{ 'b' in x }}" * 100,
    "equal texts": "{% set x = 'a' * 10000000 %}{% set y = 'a' * 10000000 %}" + "{{ x == y }}" * 1000,
    "equal lists": LONG + "{% set y = [b] * 100000 %}{{ x == y }}",
    "ordered lists": LONG + "{% set y = [b] * 100000 %}{{ x < y }}",
    "test of equality": LONG + "{% set y = [b] * 100000 %}{{ x is eq y }}",
    "test of membership": LONG + "{{ b is in x }}",
    "selection by a test": LONG + "{{ ([b] * 1000) | select('in', x) | list | length }}",
    "sort": LONG + "{{ x | sort | length }}",
    "unique": LONG + "{{ x | unique | list | length }}",
    "maximum": LONG + "{{ x | max | length }}",
    "count of a list": LONG + "{{ x.count(b) }}",
    "index of a list": LONG + "{{ x.index(b) }}",
    "round": "{{ 1.5 | round(10 ** 9, 'ceil') }}",
    "sum of lists": "{{ ([[1] * 1000] * 100000) | sum(start=[]) | length }}",
    "date format": "{{ strftime_now('%Y' * 100000) }}",
    "a long source": "x" * (1 << 20) + "y",
    "deep source": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep lists": "{{ " + "[" * 400 + "]" * 400 + " }}",
    "deep blocks": "{% if 1 %}" * 300 + "{% endif %}" * 300,
}


@pytest.mark.parametrize("name", list(HUGE))
def test_templates_end(name: str) -> None:
    """Within seconds and 400 MB, in a ChatTemplateError: its budget, or Python's own limits, stop it."""
    start = time.process_time()
    with pytest.raises(ChatTemplateError, match=r"may not|RecursionError|not valid|OverflowError|longer than"):
        render(HUGE[name])
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    "name",
    [
        "tilde",
        "replace method",
        "written out",
        "join filter",
        "output",
        "list of a generator",
        "split",
        "slices of a text",
    ],
)
def test_memory_is_bounded(name: str) -> None:
    """The peak of what Python allocates stays under 400 MB."""
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError):
            render(HUGE[name])
        assert tracemalloc.get_traced_memory()[1] < 400e6
    finally:
        tracemalloc.stop()


def test_a_budget_is_per_rendering() -> None:
    """One that was refused leaves the next one whole; a large but honest prompt passes."""
    template = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"}, TOKENIZER)
    text = "x" * 1000
    for _ in range(3):
        assert len(template.render([{"role": "user", "content": text}] * 5000)) == 5_000_000
    with pytest.raises(ChatTemplateError, match="characters of text"):
        template.render([{"role": "user", "content": "x" * 1_000_000}] * 100)
    assert template.render(MESSAGES) == "Hi"


def test_honest_uses_of_what_is_bounded() -> None:
    """The guarded filters and operators do what jinja's do."""
    assert render("{{ 'a-b'.replace('-', '+') }} {{ 'a-b' | replace('-', '+') }}") == "a+b a+b"
    assert render("{{ ', '.join(['a', 'b']) }} {{ [1, none, 'x'] | join('|') }}") == "a, b 1|None|x"
    assert render("{{ 'a\nb' | indent }}|{{ 'a\nb' | indent(2, true) }}") == "a\n    b|  a\n  b"
    assert render("{{ [1, 2.5] | sum }} {{ 2.567 | round(1) }} {{ 7.2 | round(0, 'ceil') }}") == "3.5 2.6 8.0"
    assert render("{{ [1, 'a', {'b': [none, true]}] | string }}") == "[1, 'a', {'b': [None, True]}]"
    assert render("{{ {'a': '<é>'} | tojson }}{{ [1, 2] | tojson(separators=(',', ':')) }}") == '{"a": "<é>"}[1,2]'
    assert render("{{ 3 * 4 }} {{ 'ab' * 2 }} {{ [1] * 2 + [3] }} {{ 2 ** 10 }} {{ 7 % 4 }}") == (
        "12 abab [1, 1, 3] 1024 3"
    )
    assert render("{% for a, b in [(1, 2), (3, 4)] %}{{ a ~ b }}{{ loop.length }}{% endfor %}") == "122342"
    assert render("{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}") == "123"
    assert render("{% for i in range(9) %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "0123"
    assert render("{{ 1 < 2 < 3 }} {{ 3 > 2 >= 4 }} {{ 'a' in 'cab' }} {{ 'a' not in ['b'] }} {{ x is eq none }}") == (
        "True False True True False"
    )
    assert render(
        "{{ 1 in {1: 2} }} {{ 2 in (1, 2) }} {{ 'x' in nothing }} {{ nothing == 1 }} {{ [1, {}] == [1, {}] }}"
    ) == ("True True False False True")
    assert render("{{ 1 in (range(3) | map('int')) }} {{ range(3) | select('in', [0, 2]) | list }}") == "True [0, 2]"
    assert render(
        "{{ ['b', 'a', 'b'] | sort | unique | join }} {{ [2, 3] | max }} {{ {'b': 1, 'a': 2} | dictsort }}"
    ) == ("ab 3 [('a', 2), ('b', 1)]")
    assert render("{% for m in messages | selectattr('role', 'eq', 'x') %}{% else %}none{% endfor %}") == "none"


def test_a_text_of_many_digits_makes_no_number():
    """Arithmetic on numbers of millions of digits is one step that no deadline interrupts."""
    for base in ("", "(0, 16)"):
        text = "{% set x = ('f'*20000000)|int" + base + " %}{% set y = ('9'*9999999)|int %}{{ x % (y or 1) }}"
        with pytest.raises(ChatTemplateError):
            render(text)
