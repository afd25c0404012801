"""`frink-numba bench`: what it measures, and the receipt that it writes. Its speed is no test's business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frink_numba.cli.main import build_parser
from frink_numba.receipt import cpu_name
from tests.cli.runner import frink, frink_json, one_line_error
from tests.golden.tiny import VARIANTS
from tests.golden.tiny_gguf import content, write


def test_a_receipt_is_what_json_says(smollm2_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "receipts" / "bench.json"
    arguments = ("bench", "smollm2-135m", "-p", "8,16", "-n", "2", "-r", "2", "--receipt", str(path))
    document = frink_json(*arguments)
    assert json.loads(path.read_text("utf-8")) == document
    assert document["benchmark"] == "bench"
    assert document["machine"] == cpu_name()
    name = "SmolLM2-135M-Instruct.Q4_1"
    assert document["model"] == {"name": name, "bytes": 96576768, "parameters": 134515008}
    assert document["command"].startswith("frink-numba bench smollm2-135m -p 8,16 -n 2 -r 2 --receipt ")
    rows = document["rows"]
    assert [row["case"].rpartition(" ")[2] for row in rows] == ["pp8", "pp16", "tg2"]
    for row in rows:
        assert (row["metric"], row["runs"], row["backend"]) == ("tok/s", 2, "host")
        assert 0 < row["p20"] <= row["value"] <= row["p80"]
        assert "baseline" not in row


def test_a_receipt_that_cannot_be_written_is_told_before_anything_is_measured(
    smollm2_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for place, words in ((tmp_path, "is a folder"), (tmp_path / "file" / "a.json", "no receipt can be written to")):
        message = one_line_error(frink("bench", "smollm2-135m", "-p", "4096", "-r", "1000", "--receipt", str(place)))
        assert words in message


def test_a_model_without_a_tokenizer_is_measured_too(tmp_path: Path) -> None:
    """Tokens are drawn from the rows of its embedding."""
    path = write(content(VARIANTS["llama_grouped"]), tmp_path / "bare.gguf")
    assert [row["case"] for row in frink_json("bench", str(path), "-p", "4", "-n", "2", "-r", "1")["rows"]] == [
        "bare pp4",
        "bare tg2",
    ]


def test_the_table_shows_the_figures(smollm2_path: Path) -> None:
    done = frink("bench", "smollm2-135m", "-p", "4", "-n", "0", "-r", "1")
    assert (done.returncode, done.stderr) == (0, "")
    (row,) = [line for line in done.stdout.splitlines() if "SmolLM2-135M-Instruct.Q4_1" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")][1:6] == ["92.10 MiB", "134.52 M", "host", "", "pp4"]
    assert "tg" not in done.stdout


def test_more_than_the_context_is_wrong_usage(smollm2_path: Path) -> None:
    done = frink("bench", "smollm2-135m", "--context", "32", "-p", "33", "-n", "0")
    assert done.returncode == 2
    assert "33 tokens are beyond the context of 32" in done.stderr


@pytest.mark.parametrize(("text", "counts"), [("512", [512]), ("1,2", [1, 2]), ("0", []), ("", []), ("0,4", [4])])
def test_counts_are_lists(text: str, counts: list[int]) -> None:
    assert build_parser().parse_args(["bench", "m", "-p", text]).prompt == counts
