"""README tells the truth: its Python runs as written, its tables are those of the settings and the receipts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.render_table import figures_table, rendered
from frink_numba import settings

_ROOT = Path(__file__).resolve().parents[1]
_README = (_ROOT / "README.md").read_text("utf-8")


def test_generated_parts_are_in_step() -> None:
    assert rendered(_README) == _README, "run `make readme`"
    for name in settings.SETTINGS:
        assert f"| `{name}` |" in _README


def test_a_stale_table_is_noticed() -> None:
    """The check above can fail: a changed default no longer renders to the same text."""
    assert rendered(_README.replace("| `auto` |", "| `host` |")) == _README


def test_missing_marks_are_an_error() -> None:
    with pytest.raises(ValueError, match="figures:begin"):
        rendered(_README.replace("<!-- figures:begin -->", ""))


def test_the_python_lines_run_as_written(smollm2_path: Path) -> None:
    """The README's one Python block: five lines load, prefill and generate; a fresh process runs them."""
    blocks = re.findall(r"```python\n(.*?)```", _README, re.DOTALL)
    assert len(blocks) == 1
    check = "\nassert logits.shape == (5, model.vocab_size) and logits.dtype == 'float32', logits.shape"
    done = subprocess.run(
        [sys.executable, "-c", blocks[0] + check], cwd=_ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_links_lead_to_files() -> None:
    """Every relative link of README and docs/ exists."""
    for page in (_ROOT / "README.md", *(_ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:\s]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^make ([a-z]+)", _README, re.MULTILINE))
    assert targets == {"demo", "test"}
    makefile = (_ROOT / "Makefile").read_text("utf-8")
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_a_receipt_becomes_a_row(tmp_path: Path) -> None:
    """Every cell comes from the receipt; a row without a baseline leaves its cells empty."""
    (tmp_path / "prefill.json").write_text(
        '{"machine": "A GPU", "rows": [{"case": "m pp512", "metric": "tok/s", "value": 12345.6, "p20": 12000.0,'
        ' "p80": 13000.0, "runs": 5, "backend": "cuda", "tier": "simt", "baseline": "torch", "baseline_value": 6172.8,'
        ' "ratio": 2.0}, {"case": "m open", "metric": "s", "value": 0.1234, "p20": 0.1, "p80": 0.2, "runs": 5,'
        ' "backend": "host"}]}'
    )
    link = "[prefill](benchmarks/receipts/prefill.json)"
    assert figures_table(tmp_path).splitlines()[2:] == [
        f"| m pp512 | 12,346 tok/s | 12,000 to 13,000 | cuda (simt) | torch: 6,173 | 2.00 | A GPU | {link} |",
        f"| m open | 0.123 s | 0.1 to 0.2 | host |  |  | A GPU | {link} |",
    ]
