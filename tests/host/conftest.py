"""Models and decoders that the host's tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from frink_numba.host.model import Model
from tests.golden.tiny import VARIANTS
from tests.golden.tiny_gguf import Content, content, write
from tests.golden.tiny_text import text_content


@pytest.fixture(scope="session")
def backends() -> str:
    """FRINK_BACKEND when it is set, so that the suite can be sent through another backend; else the host alone."""
    return os.environ.get("FRINK_BACKEND") or "host"


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """save(variant name or content, edit) writes a tiny model's file, changed by edit(content)."""
    number = count()

    def save(what: str | Content, edit: Callable[[Content], object] = lambda file: None) -> Path:
        file = content(VARIANTS[what]) if isinstance(what, str) else what
        edit(file)
        return write(file, tmp_path / f"{next(number)}.gguf")

    return save


@pytest.fixture
def open_decoder(save: Callable[..., Path], backends: str) -> Iterator[Callable[..., Decoder]]:
    """open_decoder(variant name or content, **arguments of load) gives a decoder; all are closed at the end."""
    models: list[Model] = []

    def open_decoder(what: str | Content, **arguments: object) -> Decoder:
        models.append(load(save(what), **arguments))  # type: ignore[arg-type]
        return Decoder(models[-1], backends)

    yield open_decoder
    for model in models:
        model.close()


@pytest.fixture
def run(backends: str) -> Callable[..., np.ndarray]:
    """run(path, ids, context length or None) gives all logits of a prompt, float32 [len(ids), vocab]."""

    def run(path: Path, ids: np.ndarray, context: int | None = None) -> np.ndarray:
        with load(path, context_length=context) as model, Decoder(model, backends) as decoder:
            logits = decoder.prefill(ids, decoder.new_cache(), logits="all").logits
            assert logits is not None
            return logits

    return run


@pytest.fixture
def text_decoder(open_decoder: Callable[..., Decoder]) -> Decoder:
    """A tiny model that reads and writes single bytes."""
    return open_decoder(text_content())
