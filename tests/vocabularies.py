"""Small tokenizers as GGUF metadata: the vocabularies of the goldens, with special tokens where a test wants them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from frink_numba.host.vocabulary import TokenType
from tests.golden.tokenizer_cases import RUNS, load

_load = cache(load)

NORMAL, CONTROL, USER_DEFINED = int(TokenType.NORMAL), int(TokenType.CONTROL), int(TokenType.USER_DEFINED)


def keys(**values: Any) -> dict[str, Any]:
    """tokenizer.ggml.NAME for each; None leaves a key out."""
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}


def byte_level(pre: str | None = "gpt-2", special: Mapping[str, int] | None = None, **more: Any) -> dict[str, Any]:
    """The golden's byte-level vocabulary of 700 tokens, all bytes among them, then `special`: text -> type."""
    golden, special = _load("bpe"), special or {}
    tokens = golden["tokens"] + list(special)
    types = [NORMAL] * len(golden["tokens"]) + list(special.values())
    return keys(model="gpt2", pre=pre, tokens=tokens, merges=golden["merges"], token_type=types) | keys(**more)


def sentencepiece(special: Mapping[str, int] | None = None, pieces: str = "pieces", **more: Any) -> dict[str, Any]:
    """The golden's SentencePiece vocabulary: <unk> 0, <s> 1, </s> 2, bytes, pieces, then `special`: text -> type."""
    special = special or {}
    rows = _load("sentencepiece")[pieces] + [[text, -1000.0, kind] for text, kind in special.items()]
    texts, scores, types = (list(column) for column in zip(*rows, strict=True))
    ids = keys(bos_token_id=1, eos_token_id=2, unknown_token_id=0)
    return keys(model="llama", tokens=texts, scores=scores, token_type=types) | ids | keys(**more)


def with_runs() -> dict[str, Any]:
    """The SentencePiece vocabulary with the runs of `RUNS` as user-defined tokens, spelled as in the text."""
    metadata = sentencepiece(add_space_prefix=False)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    for run in RUNS:
        spelled = run.replace(" ", "\u2581")
        if spelled not in tokens:
            tokens.append(spelled)
            types.append(USER_DEFINED)
            metadata["tokenizer.ggml.scores"].append(0.0)
        at = tokens.index(spelled)
        tokens[at], types[at] = run, USER_DEFINED
    return metadata


def letters(merges: tuple[str, ...] = (), special: Mapping[str, int] | None = None, **more: Any) -> dict[str, Any]:
    """A byte-level vocabulary to count on fingers: the letters a to f, the blank, what `merges` make, `special`."""
    special = special or {}
    normal = [*"abcdef", "\u0120", *(merge.replace(" ", "") for merge in merges)]
    types = [NORMAL] * len(normal) + list(special.values())
    return keys(model="gpt2", pre="gpt-2", tokens=[*normal, *special], merges=list(merges), token_type=types) | keys(
        **more
    )
