"""A tiny model that reads and writes bytes: token i is byte i; three control tokens and "qu" follow."""

from __future__ import annotations

from dataclasses import replace

from tests.golden.tiny import VARIANTS, Variant
from tests.golden.tiny_gguf import Content, content

BOS, EOS, END_OF_TURN, QU = 256, 257, 258, 259
TOKENS = 260
PADDED = 264  # rows of the embedding
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}<|eot_id|>{% endfor %}bot:"


def text_content(variant: Variant = VARIANTS["llama_grouped"]) -> Content:
    """The GGUF content of a variant with this vocabulary; BOS goes before a text."""
    file = content(replace(variant, vocab=PADDED))
    file.metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*byte_spellings(), "<s>", "</s>", "<|eot_id|>", "qu"],
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 3, 1],
        "tokenizer.ggml.merges": ["q u"],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": TEMPLATE,
    }
    return file


def byte_spellings() -> list[str]:
    """How GPT-2's vocabulary spells each byte: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
