"""README tells the truth: its Python runs as written, its tables are those of the settings and the receipts."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from benchmarks import RECEIPTS, chart
from benchmarks.render_table import (
    CHART,
    figures_table,
    pages,
    parts_of_readme,
    rendered,
    speed_table,
    timeline_table,
)
from frink_numba import settings

_ROOT = Path(__file__).resolve().parents[1]
_README = (_ROOT / "README.md").read_text("utf-8")


def test_generated_parts_are_in_step() -> None:
    for page, parts in pages().items():
        text = page.read_text("utf-8")
        assert rendered(text, parts) == text, f"{page.name}: run `make readme`"
    for name in settings.SETTINGS:
        assert f"| `{name}` |" in _README


def test_a_stale_table_is_noticed() -> None:
    """The check above can fail: a changed default no longer renders to the same text."""
    assert rendered(_README.replace("| `auto` |", "| `host` |"), parts_of_readme()) == _README


def test_the_chart_is_in_step() -> None:
    """Its points are those of the receipts and baselines as they lie here, every one of them and no other."""
    found = chart.points(RECEIPTS)
    assert CHART.read_text("utf-8") == chart.draw(found), "run `make readme`"
    document = json.loads((RECEIPTS / chart.BASELINES).read_text("utf-8"))
    rows = {(row["model"], row["test"]): row for row in document["rows"]}
    for point in found:
        if point.engine != chart.OURS:
            assert rows[point.model, f"pp{point.length}"][point.engine] == point.value
            continue
        receipt = json.loads((RECEIPTS / point.source).read_text("utf-8"))
        values = [row["value"] for row in receipt["rows"] if row["case"].endswith(f" pp{point.length}")]
        assert point.value in values
    assert {point.length for point in found} == {512, 2048, 8192}
    assert {point.engine for point in found} == {chart.OURS, *document["engines"]}


def receipt(folder: Path, name: str, date: str, rows: list[tuple[str, float, str]], machine: str = "A GPU") -> None:
    """A receipt of (case, tokens per second, tier)."""
    parts = [
        {"case": case, "metric": "tok/s", "value": value, "p20": value, "p80": value, "runs": 3, "backend": "cuda",
         "tier": tier}
        for case, value, tier in rows
    ]  # fmt: skip
    (folder / name).write_text(json.dumps({"machine": machine, "date": date, "rows": parts}))


def test_ours_are_the_newest_of_the_same_machine(tmp_path: Path) -> None:
    """Another machine, an older receipt, the tier without tensor cores, another length: none is in the chart."""
    model = "m Q4_K_M"
    rows = [{"model": model, "test": f"pp{n}", "llama.cpp": n, "torch bf16 graph": 2 * n} for n in (512, 2048)]
    rows += [{"model": "m Q8_0", "test": "pp512", "llama.cpp": 7}, {"model": model, "test": "tg128", "llama.cpp": 8}]
    engines = {"llama.cpp": "how", "torch bf16 graph": "that"}
    baselines = {"machine": "A GPU", "date": "2026-12-01", "engines": engines, "rows": rows}
    (tmp_path / chart.BASELINES).write_text(json.dumps(baselines))
    receipt(
        tmp_path, "a.json", "2026-12-03", [("m shape Q4_K_M pp512", 3000.0, "wgmma"), ("m Q4_K_M pp100", 1.0, "mma")]
    )
    receipt(tmp_path, "b.json", "2026-12-02", [("m Q4_K_M pp512", 2000.0, "wgmma"), ("m Q4_K_M pp2048", 5000.0, "mma")])
    receipt(tmp_path, "c.json", "2026-12-04", [("m Q4_K_M pp512", 9000.0, "wgmma")], machine="Another")
    receipt(tmp_path, "d.json", "2026-12-05", [("m Q4_K_M pp512", 100.0, "simt"), ("m Q4_K_M tg128", 9.0, "wgmma")])
    found = chart.points(tmp_path)
    ours = {(p.model, p.length): (p.value, p.source) for p in found if p.engine == chart.OURS}
    assert ours == {("m Q4_K_M", 512): (3000.0, "a.json"), ("m Q4_K_M", 2048): (5000.0, "b.json")}
    drawn = chart.draw(found)
    assert "frink_numba, 512 tokens: 3,000 tok/s" in drawn
    assert drawn.count("<circle") == 6
    xml.etree.ElementTree.fromstring(drawn)
    words = chart.caption(tmp_path)
    assert "[a](benchmarks/receipts/a.json), [b](benchmarks/receipts/b.json)" in words
    assert "llama.cpp: how; torch bf16 graph: that" in words


def test_other_engines_stand_beside_ours(tmp_path: Path) -> None:
    """One row for each test of the baselines that a receipt has, generation behind one token among them."""
    rows = [
        {"model": "m Q4_K_M", "test": "pp512", "llama.cpp": 1000, "torch": 4000},
        {"model": "m Q4_K_M", "test": "pp2048", "llama.cpp": 1100, "torch": 4100},
        {"model": "m Q4_K_M", "test": "tg128", "llama.cpp": 250},
    ]
    engines = {"llama.cpp": "how", "torch": "that"}
    baselines = {"machine": "A GPU", "date": "2026-12-01", "engines": engines, "rows": rows}
    (tmp_path / chart.BASELINES).write_text(json.dumps(baselines))
    receipt(tmp_path, "a.json", "2026-12-02", [("m shape Q4_K_M pp512", 5000.0, "wgmma")])
    tests = ("tg128 after 1, greedy", "tg128 after 1, one by one", "tg128 after 512, greedy")
    decode = [(f"m shape Q4_K_M {test}", 500.0 - 100 * number, "wgmma") for number, test in enumerate(tests)]
    receipt(tmp_path, "b.json", "2026-12-02", decode)
    assert speed_table(tmp_path).splitlines() == [
        "| model | test | frink_numba | llama.cpp | torch |",
        "| --- | --- | ---: | ---: | ---: |",
        "| m Q4_K_M | pp512 | [5,000](benchmarks/receipts/a.json) | 1,000 (5.0 times) | 4,000 (1.2 times) |",
        "| m Q4_K_M | tg128 | [500](benchmarks/receipts/b.json) | 250 (2.0 times) |  |",
    ]


def test_a_timeline_becomes_a_row(tmp_path: Path) -> None:
    """Gaps, and copies that nothing hides, are differences of the receipt's parts."""
    parts = {"step": 1300.0, "all launches": 1040.0, "without rows": 1180.0, "kernels alone": 1000.0,
             "step / kernels alone": 1.3, "host share": 4.6}  # fmt: skip
    rows = [{"case": f"m pp512: {part}", "value": value} for part, value in parts.items()]
    (tmp_path / "timeline-x.json").write_text(json.dumps({"machine": "A GPU", "rows": rows}))
    link = "A GPU, [timeline-x](benchmarks/receipts/timeline-x.json)"
    assert timeline_table(tmp_path).splitlines()[2:] == [
        f"| m pp512 | 1,300 | 1,000 | 1.30 | 40 | 120 | 4.6 % | {link} |"
    ]
    assert figures_table(tmp_path).count("\n") == 1, "they have a table of their own"


def test_missing_marks_are_an_error() -> None:
    with pytest.raises(ValueError, match="speed:begin"):
        rendered(_README.replace("<!-- speed:begin -->", ""), parts_of_readme())


def test_the_python_lines_run_as_written(smollm2_path: Path) -> None:
    """The README's Python blocks, one behind the other, in a fresh process: load, prefill, generate, texts at once."""
    blocks = re.findall(r"```python\n(.*?)```", _README, re.DOTALL)
    assert len(blocks) == 2
    check = "\nassert logits.shape == (5, model.vocab_size) and logits.dtype == 'float32', logits.shape"
    done = subprocess.run(
        [sys.executable, "-c", blocks[0] + check + "\n" + blocks[1]],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    answers = ast.literal_eval(done.stdout.splitlines()[-1])
    assert len(answers) == 2
    assert all(len(answer) > 5 for answer in answers)


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
