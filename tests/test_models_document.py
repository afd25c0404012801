"""docs/models.md tells the truth: its tables are those of the package and the goldens, its Python runs as written."""

from __future__ import annotations

import re
from typing import Any

import pytest

from frink_numba.host.architectures import ARCHITECTURES
from frink_numba.host.pre_tokenizers import SPLITTINGS
from tests.golden.render_models import DOCUMENT, rendered
from tests.golden.tiny import VARIANTS
from tests.golden.tiny_gguf import adapter_content, content, write

TEXT = DOCUMENT.read_text("utf-8")


def test_the_tables_are_in_step() -> None:
    assert rendered(TEXT) == TEXT, "run `python -m tests.golden.render_models`"
    assert all(f"| `{name}` |" in TEXT for name in (*ARCHITECTURES, *SPLITTINGS))
    assert all(f"`{name}`" in TEXT for name in VARIANTS)


def test_a_stale_table_is_noticed() -> None:
    """The check above can fail: another answer of the device no longer renders to the same text."""
    assert "| no: " in TEXT
    assert rendered(TEXT.replace("| no: ", "| yes, but not ")) == TEXT


def test_no_reason_tells_the_size_of_a_tiny_model() -> None:
    """It would read like a limit: the device declines every mixture, not those of so many experts alone."""
    (table,) = re.findall(r"architectures:begin -->(.*?)<!-- architectures:end", TEXT, re.DOTALL)
    devices = [row.split(" | ")[3] for row in table.strip().splitlines()[2:]]
    assert len(devices) == len(ARCHITECTURES)
    assert sum("several experts a token" in device for device in devices) == 5
    assert not [device for device in devices if re.search(r"\d", device)]


def test_missing_marks_are_an_error() -> None:
    with pytest.raises(ValueError, match="scalings:begin"):
        rendered(TEXT.replace("<!-- scalings:end -->", ""))


def test_tests_that_are_named_exist() -> None:
    root = DOCUMENT.parents[1]
    named = re.findall(r"`((?:tests/host/)?test_\w+\.py)(?:::(\w+))?`", TEXT)
    assert len(named) >= 5
    for path, function in named:
        source = (root / "tests" / "host" / path.removeprefix("tests/host/")).read_text("utf-8")
        assert f"def {function}" in source


def test_the_adapters_of_the_example_are_attached(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = VARIANTS["llama_lora"]
    write(content(variant), tmp_path / "model.gguf")
    for name in ("adapter", "other"):
        write(adapter_content(variant), tmp_path / f"{name}.gguf")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(block, names)
    with names["model"] as model:
        assert [len(layer.lora) for layer in model.layers] == [14] * 3
