"""Messages to prompts: the real file's template, what templates use, and what they lack."""

from __future__ import annotations

import enum
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frink_numba.errors import ChatTemplateError, GgufError
from frink_numba.host.chat import ChatTemplate
from frink_numba.host.gguf import GgufFile
from frink_numba.host.tokenizer import Tokenizer
from tests import transformers_oracle
from tests.vocabularies import CONTROL, byte_level, sentencepiece

USER = [{"role": "user", "content": "Hi there"}]
TALK = [
    {"role": "system", "content": 'Be <brief> & "kind".'},
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello!\n"},
    {"role": "user", "content": "  Привет 🦙 "},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "Ünï", "parameters": {"x": [1, 2.5, None, True], "<y>": {}}},
    }
]

# Written for these tests in the manner of published templates: what those use, these use.
TEMPLATES = {
    "turns": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + "
        "message['content'].strip() + ' [/INST]' }}{% elif message.role == 'assistant' %}"
        "{{ message.content + eos_token }}{% endif %}{% endfor %}"
    ),
    "strict": (
        "{%- if messages[0]['role'] == 'system' -%}\n    {%- set system = messages[0]['content'] | trim -%}\n"
        "    {%- set rest = messages[1:] -%}\n{%- else -%}\n    {%- set rest = messages -%}\n{%- endif -%}\n"
        "{%- for message in rest -%}\n"
        "    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}\n"
        "        {{ raise_exception('roles must alternate, but message ' ~ loop.index ~ ' is ' ~ message['role']) }}\n"
        "    {%- endif -%}\n"
        "    {{ '<|' ~ message.role ~ '|>' }}{% if loop.first and system is defined %}{{ system }}\n\n{% endif %}"
        "{{ message.content | trim }}{{ '' if loop.last else '\\n' }}\n{%- endfor -%}\n"
        "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "tools": (
        "{% macro show(tool, depth=0) %}{{ '  ' * depth }}{{ tool.name }}({{ tool.parameters | tojson }})"
        "{% endmacro %}\n"
        "{% set ns = namespace(system='none', count=0) %}\n"
        "{% for m in messages if m.role != 'tool' %}\n"
        "    {% if m.role == 'system' %}{% set ns.system = m.content %}{% continue %}{% endif %}\n"
        "    {% set ns.count = ns.count + 1 %}\n"
        "{% endfor %}\n"
        "{{ ns.system }}: {{ ns.count }}\n"
        "{% if tools is not none and tools %}\n"
        "{{ tools | tojson(indent=2) }}\n"
        "{% for tool in tools %}{{ show(tool.function, depth=1) }}{{ ', ' if not loop.last }}{% endfor %}\n"
        "{% endif %}\n"
        "{% for key, value in {'b': 1, 'a': [1, 2]} | dictsort %}"
        "{{ key }}={{ value | join('+') if value is iterable and value is not string else value }};{% endfor %}\n"
        "{{ messages | map(attribute='role') | join(',') }} "
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }} "
        "{{ messages | rejectattr('role', 'in', ['user']) | map(attribute='content') | first }}\n"
        "{% generation %}{{ messages[-1].content.split(' ')[-2] | upper }}{% endgeneration %}\n"
        "{{ 'x,y'.split(',') | last ~ 1 ~ none ~ true ~ 1.5 }} "
        "{{ undefined_thing | default('d') }} {{ 7 // 2 }} {{ 7 % 4 }}"
    ),
}


def chat(*sources: str, **named: str) -> ChatTemplate:
    tokenizer = Tokenizer.from_metadata(sentencepiece())
    return ChatTemplate(named | ({"default": sources[0]} if sources else {}), tokenizer)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> ChatTemplate:
    with GgufFile.open(smollm2_path) as file:
        return ChatTemplate.from_metadata(file.metadata, Tokenizer.from_metadata(file.metadata))


def test_smollm2(smollm2: ChatTemplate) -> None:
    """The file's template, with its own system message when there is none; markers become control tokens."""
    text = smollm2.render(USER)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm2.encode(USER)
    assert ids[:3] == [1, 9690, 198]
    assert ids[-8:] == [26843, 665, 2, 198, 1, 520, 9531, 198]
    assert smollm2.render(USER, add_generation_prompt=False) == text.removesuffix("<|im_start|>assistant\n")
    assert smollm2.names == ("default",)
    assert smollm2.source().startswith("{% for message in messages %}")


@pytest.mark.oracle
def test_smollm2_equals_transformers(smollm2: ChatTemplate, smollm2_path: Path) -> None:
    """Text and ids, through its tokenizer for the same file."""
    oracle = transformers_oracle.tokenizer(smollm2_path)
    for messages in (USER, TALK, TALK[:2]):
        for prompt in (True, False):
            want = oracle.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
            assert smollm2.render(messages, add_generation_prompt=prompt) == want
            assert smollm2.encode(messages, add_generation_prompt=prompt) == oracle.encode(want)


@pytest.mark.oracle
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_rendering_equals_transformers(name: str) -> None:
    """Templates of every style, with and without tools."""
    from transformers.utils.chat_template_utils import render_jinja_template

    for messages in (USER, TALK[1:], TALK):
        for tools in (None, TOOLS):
            for prompt in (True, False):
                [want], _ = render_jinja_template(
                    [messages],
                    tools=tools,
                    chat_template=TEMPLATES[name],
                    add_generation_prompt=prompt,
                    bos_token="<s>",
                    eos_token="</s>",
                )
                got = chat(TEMPLATES[name]).render(messages, tools=tools, add_generation_prompt=prompt)
                assert got == want


def test_what_templates_use() -> None:
    """Whitespace control, loop controls, macros, namespaces, filters, JSON that is not escaped for HTML."""
    assert chat(TEMPLATES["turns"]).render(TALK) == "<s>[INST] Hi there [/INST]Hello!\n</s>[INST] Привет 🦙 [/INST]"
    assert chat(TEMPLATES["strict"]).render(TALK) == (
        '<|user|>Be <brief> & "kind".\n\nHi there\n<|assistant|>Hello!\n<|user|>Привет 🦙<|assistant|>'
    )
    lines = chat(TEMPLATES["tools"]).render(TALK, tools=TOOLS).split("\n")
    assert lines[0] == 'Be <brief> & "kind".: 3'
    assert '      "description": "Ünï",' in lines
    assert lines[-2] == (
        '  f({"x": [1, 2.5, null, true], "<y>": {}})a=1+2;b=1;system,user,assistant,user 2 Be <brief> & "kind".'
    )
    assert lines[-1] == "🦙y1NoneTrue1.5 d 3 3"


def test_strftime_now() -> None:
    """Today's date, as templates that tell the date ask for it."""
    before = datetime.now()
    text = chat("{{ strftime_now('%Y-%m-%d') }}").render(USER)
    assert before.strftime("%Y-%m-%d") <= text <= datetime.now().strftime("%Y-%m-%d")


@pytest.mark.parametrize("bos", ["", "{{ bos_token }}"])
@pytest.mark.parametrize("rule", [True, False, None])
def test_bos_is_never_doubled(bos: str, rule: bool | None) -> None:
    """Fault 32: a template that writes BOS, a rule that adds it, both, or none; and no EOS is added to a prompt."""
    metadata = sentencepiece(add_bos_token=rule, add_eos_token=True)
    tokenizer = Tokenizer.from_metadata(metadata | {"tokenizer.chat_template": bos + "{{ messages[0].content }}"})
    template = ChatTemplate.from_metadata({"tokenizer.chat_template": bos + "{{ messages[0].content }}"}, tokenizer)
    ids = template.encode(USER)
    assert ids.count(1) == (bos != "" or rule is not False)
    assert 2 not in ids
    assert tokenizer.decode(ids, special=False) == "Hi there"


def test_special_tokens_of_the_template_are_parsed() -> None:
    """In byte-level vocabularies too."""
    tokenizer = Tokenizer.from_metadata(byte_level(special={"<|a|>": CONTROL, "<|b|>": CONTROL}, bos_token_id=700))
    template = ChatTemplate({"default": "<|a|>{{ messages[0].content }}<|b|>{{ bos_token }}"}, tokenizer)
    ids = template.encode([{"role": "user", "content": "é"}])
    assert (ids[0], ids[-2:]) == (700, [701, 700])


def test_context_overrides() -> None:
    """What the caller gives goes to the template, before its own special tokens and the empty tools."""
    template = chat("{{ bos_token }}|{{ eos_token }}|{{ mood }}|{{ tools }}|{{ documents is none }}")
    assert template.render(USER, mood="calm", bos_token="B") == "B|</s>|calm|None|True"


def test_named_templates() -> None:
    """By name; "tool_use" by itself when tools are given; the names are listed where one is not there."""
    metadata = {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_templates": ["tool_use", "rag"],
        "tokenizer.chat_template.tool_use": "{{ tools | length }} tools",
        "tokenizer.chat_template.rag": "rag",
    }
    template = ChatTemplate.from_metadata(metadata, Tokenizer.from_metadata(sentencepiece()))
    assert template.names == ("default", "tool_use", "rag")
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[]) == "plain"
    assert template.render(USER, tools=TOOLS) == "1 tools"
    assert template.render(USER, tools=TOOLS, template="rag") == "rag"
    assert template.source("rag") == "rag"
    with pytest.raises(ChatTemplateError, match=r"no chat template 'x'\. It has: default, tool_use, rag"):
        template.render(USER, template="x")


def test_a_file_without_a_template() -> None:
    """Loads; rendering is a named error that says what to do."""
    template = ChatTemplate.from_metadata({}, Tokenizer.from_metadata(sentencepiece()))
    assert template.names == ()
    for call in (template.render, template.encode):
        with pytest.raises(ChatTemplateError, match=r"no chat template .*write the prompt as plain text"):
            call(USER)


def test_a_template_that_is_no_text() -> None:
    """A damaged file is a GgufError that names the key."""
    with pytest.raises(GgufError, match=r"tokenizer\.chat_template\.x should hold a string, but holds int"):
        ChatTemplate.from_metadata({"tokenizer.chat_template.x": 3}, Tokenizer.from_metadata(sentencepiece()))


def test_refused_messages() -> None:
    """The template's own words are in the error."""
    with pytest.raises(ChatTemplateError, match="refuses these messages: roles must alternate, but message 1 is assis"):
        chat(TEMPLATES["strict"]).render([{"role": "assistant", "content": "x"}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% if %}", "'default' is not valid, line 2: Expected an expression"),
        ("{{ messages | no_such_filter }}", "is not valid, line 1: No filter named 'no_such_filter'"),
        ("{% for m in messages %}", "is not valid, line 1: Unexpected end of template"),
        ("{{ 1 / 0 }}", "failed on these messages: ZeroDivisionError"),
        ("{{ messages[0].nothing.more }}", "failed on these messages: UndefinedError: .*'nothing'"),
        ("{{ messages[0].role + 1 }}", "failed on these messages: TypeError"),
        ("{% include 'other' %}", "failed on these messages"),
    ],
)
def test_broken_templates(source: str, message: str) -> None:
    """Fail when used, not when the file is opened; the error says where."""
    template = chat(source)
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match=message):
            template.render(USER)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        ("hi", "a list of mappings, got str"),
        ({"role": "user"}, "a list of mappings, got dict"),
        (None, "a list of mappings, got NoneType"),
        ([*USER, "hi"], "message 1 should be a mapping"),
        ([{"content": "x"}], 'message 0 should be a mapping with a text "role"'),
        ([{"role": 1, "content": "x"}], "message 0 should be"),
        ([{"role": "user", "content": object()}], "message 0 holds a object"),
        ([{"role": "user", "content": [{"x": b"raw"}]}], "message 0 holds a bytes"),
    ],
)
def test_bad_messages(messages: Any, message: str) -> None:
    """Are named before the template sees them."""
    with pytest.raises(ChatTemplateError, match=message):
        chat("{{ messages }}").render(messages)


def test_messages_that_hold_themselves() -> None:
    """End in an error, not in a recursion."""
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ChatTemplateError, match="nested deeper than 64 levels"):
        chat("x").render([{"role": "user", "content": loop}])


def test_values_are_made_plain() -> None:
    """Enums, NumPy numbers and tuples become text, numbers and lists; keys without a value are left out."""

    class Role(enum.StrEnum):
        USER = "user"

    message = {"role": Role.USER, "content": (np.int64(3), np.float32(0.5), np.bool_(True)), "name": None}
    text = chat("{{ messages[0].role }} {{ messages[0].content }} {{ 'name' in messages[0] }}").render([message])
    assert text == "user [3, 0.5, True] False"


def test_messages_are_not_changed() -> None:
    """What the caller gave stays as it was, also the parts that are left out."""
    messages = [{"role": "user", "content": "x", "name": None}]
    chat("{{ messages[0].content }}").render(messages)
    assert messages == [{"role": "user", "content": "x", "name": None}]


def test_threads_share_a_template() -> None:
    """Renderings at once do not mix, and each has a budget of its own."""
    template = chat("{% for i in range(2000) %}{{ messages[0].content }}{% endfor %}")
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda i: template.render([{"role": "user", "content": str(i)}]), range(40)))
    assert texts == [str(i) * 2000 for i in range(40)]
