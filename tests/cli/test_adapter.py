"""`--adapter` of the commands that run a model: the adapter reaches it, with its scale, or is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from frink_numba.cli.arguments import adapter
from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from tests.cli.runner import frink, frink_json, one_line_error
from tests.golden.tiny import VARIANTS
from tests.golden.tiny_gguf import adapter_content, write
from tests.golden.tiny_text import text_content


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(text_content(), tmp_path / "model.gguf")


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    variant = replace(VARIANTS["llama_grouped"], adapted=("q_proj", "o_proj", "down_proj"))
    return write(adapter_content(variant), tmp_path / "lora=1.gguf")


def test_the_text_is_the_librarys(model: Path, lora: Path) -> None:
    """Given twice, the updates add up; without it the text is another."""
    document = frink_json(
        *("generate", str(model), "quick", "--max-new-tokens", "12"),
        *("--adapter", f"{lora}=2.5", "--adapter", str(lora)),
    )
    with load(model, adapters=[(lora, 3.5)]) as opened, Decoder(opened, "host") as decoder:
        assert document["tokens"] == [piece.token for piece in decoder.generate("quick", max_new_tokens=12)]
    plain = frink_json("generate", str(model), "quick", "--max-new-tokens", "12")
    assert plain["tokens"] != document["tokens"]


def test_a_model_is_no_adapter(model: Path) -> None:
    error = one_line_error(frink("generate", str(model), "quick", "--adapter", str(model)))
    assert "not 'adapter' and 'lora'" in error


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.gguf", ("a.gguf", 1.0)),
        ("a.gguf=0.5", ("a.gguf", 0.5)),
        ("a.gguf=-2", ("a.gguf", -2.0)),
        ("a=1.gguf", ("a=1.gguf", 1.0)),
        ("a=1.gguf=3", ("a=1.gguf", 3.0)),
        ("=2", ("=2", 1.0)),
    ],
)
def test_scales_stand_behind_the_last_equals_sign(text: str, expected: tuple[str, float]) -> None:
    assert adapter(text) == expected
