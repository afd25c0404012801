"""Receipts: percentiles, ratios, and a document that says where a figure comes from."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path

import numpy as np
import pytest

from frink_numba import receipt
from frink_numba.errors import SettingError
from frink_numba.receipt import Row, check_place


def test_percentiles_are_numpys() -> None:
    samples = np.random.default_rng().lognormal(size=17).tolist()
    row = Row.from_samples("case", "tok/s", samples, "host")
    np.testing.assert_allclose((row.p20, row.value, row.p80), np.percentile(samples, (20, 50, 80)), rtol=1e-12)
    assert row.runs == 17
    single = Row.from_samples("case", "tok/s", [3.0], "host")
    assert (single.p20, single.value, single.p80) == (3.0, 3.0, 3.0)


@pytest.mark.parametrize(("metric", "ratio"), [("tok/s", 0.5), ("TFLOP/s", 0.5), ("s", 2.0), ("ms", 2.0), ("MB", 2.0)])
def test_a_ratio_above_one_means_better(metric: str, ratio: float) -> None:
    """Half the baseline is worse for a rate and better for a time or a size."""
    row = Row.from_samples("case", metric, [5.0], "host", baseline="other", baseline_value=10.0)
    assert row.as_dict()["ratio"] == ratio


def test_a_row_without_baseline_has_no_ratio() -> None:
    assert set(Row.from_samples("case", "s", [1.0], "host").as_dict()) == {
        "case", "metric", "value", "p20", "p80", "runs", "backend",
    }  # fmt: skip


def test_a_receipt_says_where_it_comes_from(tmp_path: Path) -> None:
    row = Row.from_samples("case", "tok/s", [1.0, 2.0], "cuda", tier="simt")
    path = tmp_path / "new" / "folder" / "bench.json"
    receipt.write_receipt(path, receipt.receipt("bench", "a command", [row], machine="A GPU", driver="580.1"))
    document = json.loads(path.read_text("utf-8"))
    assert list(document) == ["benchmark", "date", "commit", "command", "machine", "versions", "rows"]
    assert document["versions"]["python"] == platform.python_version()
    assert document["versions"]["numpy"] == np.__version__
    assert document["versions"]["driver"] == "580.1"
    figures = {"case": "case", "metric": "tok/s", "value": 1.5, "p20": 1.2, "p80": 1.8}
    assert document["rows"] == [{**figures, "runs": 2, "backend": "cuda", "tier": "simt"}]
    assert [entry.name for entry in path.parent.iterdir()] == ["bench.json"]


def test_a_figure_that_is_no_number_is_refused(tmp_path: Path) -> None:
    row = Row.from_samples("case", "tok/s", [float("nan")], "host")
    with pytest.raises(ValueError, match="JSON compliant"):
        receipt.write_receipt(tmp_path / "r.json", receipt.receipt("bench", "c", [row], machine="m"))
    assert not (tmp_path / "r.json").exists()


def test_the_commit_is_the_checkouts() -> None:
    root = Path(receipt.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        assert receipt.commit() is None
        return
    head = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert receipt.commit() in (head, f"{head}-dirty")


def test_the_processor_has_a_name() -> None:
    name, cores = receipt.cpu_name().rsplit(", ", 1)
    assert name
    assert int(cores.removesuffix(" cores")) >= 1


def test_a_place_for_a_receipt_is_tried_out(tmp_path: Path) -> None:
    check_place(tmp_path / "new" / "folder" / "receipt.json")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    with pytest.raises(SettingError, match="is a folder"):
        check_place(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        SettingError, match=r"no receipt can be written to .*receipt\.json: (Not a directory|File exists)"
    ):
        check_place(tmp_path / "file" / "receipt.json")
