"""Messages to a prompt, by the chat template that the model file carries.

A template is a jinja program that came with the weights; template_sandbox says what it may do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from frink_numba.errors import ChatTemplateError, GgufError
from frink_numba.host.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinja2 import Template

_KEY = "tokenizer.chat_template"
_DEFAULT = "default"
_TOOLS = "tool_use"


class ChatTemplate:
    """The templates of one file; most have one. Compiled at first use, so that a broken one only fails when used.

    `names`: the templates, "default" for the unnamed one. Safe to share between threads.
    """

    def __init__(self, sources: Mapping[str, str], tokenizer: Tokenizer) -> None:
        self._sources = dict(sources)
        self._tokenizer = tokenizer
        self._compiled: dict[str, Template] = {}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate:
        """The templates in a GGUF file's metadata. A file without one gives a ChatTemplate whose `render` fails.

        GgufError when a template is no text.
        """
        sources = {}
        for key in metadata:
            name = _DEFAULT if key == _KEY else key.removeprefix(f"{_KEY}.")
            if name == key:
                continue
            if not isinstance(metadata[key], str):
                raise GgufError(f"key {key} should hold a string, but holds {type(metadata[key]).__name__}")
            sources[name] = metadata[key]
        return cls(sources, tokenizer)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sources)

    def source(self, name: str | None = None) -> str:
        """The template's text; ChatTemplateError when there is no such template."""
        if not self._sources:
            raise ChatTemplateError(
                "the file has no chat template (key tokenizer.chat_template): write the prompt as plain text"
            )
        name = name or _DEFAULT
        if name not in self._sources:
            raise ChatTemplateError(f"the file has no chat template {name!r}. It has: {', '.join(self._sources)}")
        return self._sources[name]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **context: Any,
    ) -> str:
        """The prompt's text for `messages`, each {"role": ..., "content": ...} and what else the template knows.

        `add_generation_prompt` ends it where the answer begins. `template` chooses a named one; None takes "tool_use"
        when `tools` are given and there is one. `context` goes to the template: plain values only (text, numbers,
        lists, mappings). ChatTemplateError says what the template, or the messages, lack.
        """
        from frink_numba.host import template_sandbox

        if template is None and context.get("tools") and _TOOLS in self._sources:
            template = _TOOLS
        compiled = self._template(template or _DEFAULT)
        values: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens}
        values.update((key, _plain(value, key)) for key, value in context.items())
        values["messages"] = _plain_messages(messages)
        values["add_generation_prompt"] = add_generation_prompt
        try:
            return template_sandbox.render(compiled, values)
        except template_sandbox.Refused as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error
        except template_sandbox.SecurityError as error:
            raise ChatTemplateError(f"the chat template does what it may not: {error}") from error
        except Exception as error:  # a template can raise whatever Python can
            raise ChatTemplateError(
                f"the chat template failed on these messages: {type(error).__name__}: {str(error)[:500]}"
            ) from error

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **context: Any,
    ) -> list[int]:
        """Ids of `render`'s text: special tokens recognized, one BOS where the file's rule wants it, no EOS added."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt, template=template, **context)
        return self._tokenizer.encode(text, special=True, add_eos=False)

    def _template(self, name: str) -> Template:
        from frink_numba.host import template_sandbox

        source = self.source(name)
        if name not in self._compiled:
            if len(source) > template_sandbox.MAX_SOURCE:
                raise ChatTemplateError(
                    f"chat template {name!r} is longer than {template_sandbox.MAX_SOURCE:,} characters"
                )
            try:
                self._compiled[name] = template_sandbox.environment().from_string(source)
            except Exception as error:  # besides jinja's errors, whatever the compilation of hostile code raises
                where = f", line {error.lineno}" if isinstance(error, template_sandbox.TemplateSyntaxError) else ""
                raise ChatTemplateError(f"chat template {name!r} is not valid{where}: {str(error)[:500]}") from error
        return self._compiled[name]

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        ids = {"bos_token": self._tokenizer.bos_id, "eos_token": self._tokenizer.eos_id}
        return {name: self._tokenizer.token(i) for name, i in ids.items() if i is not None}


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[Any, Any]]:
    """Plain copies without the keys whose value is None: templates ask whether a key is there."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ChatTemplateError(f"messages are a list of mappings, got {type(messages).__name__}")
    if not messages:
        raise ChatTemplateError("there are no messages to render")
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatTemplateError(
                f'message {i} should be a mapping with a text "role", such as {{"role": "user", ...}}'
            )
        plain.append({key: _plain(value, f"message {i}") for key, value in message.items() if value is not None})
    return plain


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy out of exact str, int, float, bool, None, list and dict: no object of the caller meets the template."""
    if depth > 64:
        raise ChatTemplateError(f"{where} is nested deeper than 64 levels, or holds itself")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key, where, depth + 1): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1) for item in value]
    # Of a subclass (an enum, say) the plain value: its own methods stay outside.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise ChatTemplateError(f"{where} holds a {type(value).__name__}; templates take text, numbers, lists and mappings")
