"""`bench --compare`: llama-bench's options and answers, played by a script on the PATH; every failure is one line."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from tests.cli.runner import frink, frink_json, one_line_error

# A program with llama-bench's options; what it was asked goes to $ASKED. Fields as build 11434 writes them.
PROGRAM = """#!{python}
import argparse, json, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("-m", "--model", required=True)
parser.add_argument("-p", "--n-prompt", default="512")
parser.add_argument("-n", "--n-gen", default="128")
parser.add_argument("-r", "--repetitions", type=int, default=5)
parser.add_argument("-ngl", "--n-gpu-layers", default="-1")
parser.add_argument("-fa", "--flash-attn", default="auto")
parser.add_argument("-o", "--output", default="md")
asked = parser.parse_args()
with open(os.environ["ASKED"], "w") as file:
    json.dump(vars(asked), file)
print("ggml_init: found no devices", file=sys.stderr)
tests = [(int(n), 0) for n in asked.n_prompt.split(",") if int(n)]
tests += [(0, int(n)) for n in asked.n_gen.split(",") if int(n)]
assert asked.output == "json"
print(json.dumps([
    {{"build_commit": "8cf427ff", "build_number": 11434, "cpu_info": "a CPU", "gpu_info": "", "backends": "CPU",
      "model_filename": asked.model, "model_type": "llama ?B Q4_1", "model_size": 98000000, "model_n_params": 134515008,
      "n_batch": 2048, "n_ubatch": 512, "n_threads": 2, "n_prompt": p, "n_gen": g, "n_depth": 0,
      "test_time": "2026-12-02T07:00:00Z", "avg_ns": 1, "stddev_ns": 0, "avg_ts": 99.0, "stddev_ts": 1.0,
      "samples_ns": [1] * asked.repetitions, "samples_ts": [1000.0 * p + g + i for i in range(asked.repetitions)]}}
    for p, g in tests
]))
"""


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    return tmp_path / "asked.json"


def environment(tmp_path: Path, asked: Path, text: str = PROGRAM) -> dict[str, str]:
    """A PATH on which the script is llama-bench."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    script = folder / "llama-bench"
    script.write_text(text.format(python=sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "ASKED": str(asked)}


def test_both_are_measured_alike_and_their_ratio_is_told(smollm2_path: Path, tmp_path: Path, asked: Path) -> None:
    """The same file, lengths and repetitions; the baseline is the median of its samples, and goes into the receipt."""
    path = tmp_path / "receipt.json"
    arguments = ("bench", "smollm2-135m", "-p", "8,16", "-n", "2", "-r", "3", "--compare", "llama-bench -fa 1")
    document = frink_json(*arguments, "--receipt", str(path), environment=environment(tmp_path, asked))
    told = json.loads(asked.read_text())
    assert Path(told["model"]).samefile(smollm2_path)
    assert (told["n_prompt"], told["n_gen"], told["repetitions"]) == ("8,16", "2", 3)
    assert (told["n_gpu_layers"], told["flash_attn"]) == ("0", "1"), "the host is compared with a CPU"
    baselines = {row["case"].rpartition(" ")[2]: row["baseline_value"] for row in document["rows"]}
    assert baselines == {"pp8": 8001.0, "pp16": 16001.0, "tg2": 3.0}
    for row in document["rows"]:
        assert row["baseline"] == "llama.cpp 11434 (CPU)"
        assert row["ratio"] == pytest.approx(row["value"] / row["baseline_value"], rel=1e-3)
    assert json.loads(path.read_text("utf-8")) == document


def test_the_table_has_a_column_for_it(smollm2_path: Path, tmp_path: Path, asked: Path) -> None:
    arguments = ("bench", "smollm2-135m", "-p", "0", "-n", "2", "-r", "1", "--compare", "llama-bench")
    done = frink(*arguments, environment=environment(tmp_path, asked))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(asked.read_text())["n_prompt"] == "0", "no length of its own"
    for word in ("model", "size", "params", "backend", "tier", "test", "t/s", "p20", "p80", "ratio", "llama.cpp 11434"):
        assert word in done.stdout
    row = next(line for line in done.stdout.splitlines() if " tg2 " in line)
    assert "134.52 M" in row
    assert "92.10 MiB" in row


def test_a_missing_program_is_one_line(smollm2_path: Path) -> None:
    for program, words in (
        ("no-such-llama-bench", "no-such-llama-bench is not on the PATH"),
        ("/nowhere/llama-bench", "/nowhere/llama-bench is not on the PATH"),
        ("'", "cannot be read"),
        (" ", "needs a program"),
    ):
        message = one_line_error(frink("bench", "smollm2-135m", "-p", "4096", "-r", "1000", "--compare", program))
        assert words in message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import sys; print('error: failed to load model', file=sys.stderr); sys.exit(3)", "failed with 3: error"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by signal 9: it said nothing"),
        ("print('| model | t/s |')", "is not llama-bench's JSON"),
        ("print('')", "is not llama-bench's JSON"),
        ("print('[]')", "no figure for pp4"),
        ("print('[{{\"n_prompt\": 4}}]')", "is not llama-bench's JSON ('n_gen')"),
        ("print('[{{\"n_prompt\": 8, \"n_gen\": 0, \"avg_ts\": 3.0}}]')", "no figure for pp4"),
        ("print('[{{\"n_prompt\": 4, \"n_gen\": 0, \"avg_ts\": NaN}}]')", "no figure for pp4"),
        ("print('{{\"n_prompt\": 4}}')", "is not llama-bench's JSON"),
        ("print('[3]')", "is not llama-bench's JSON"),
    ],
)  # fmt: skip
def test_a_program_that_fails_is_one_line(
    body: str, words: str, smollm2_path: Path, tmp_path: Path, asked: Path
) -> None:
    """Whatever it does, before anything of ours is measured, with exit code 1 and no traceback."""
    arguments = ("bench", "smollm2-135m", "-p", "4", "-n", "0", "-r", "1000", "--compare", "llama-bench")
    message = one_line_error(frink(*arguments, environment=environment(tmp_path, asked, f"#!{{python}}\n{body}\n")))
    assert words in message


def test_a_file_that_is_no_program_is_one_line(smollm2_path: Path, tmp_path: Path, asked: Path) -> None:
    where = environment(tmp_path, asked, "#!/nowhere/python\n")
    arguments = ("bench", "smollm2-135m", "-p", "4", "-n", "0", "--compare", "llama-bench")
    assert "cannot be started" in one_line_error(frink(*arguments, environment=where))


def test_an_adapter_cannot_be_compared(smollm2_path: Path) -> None:
    done = frink("bench", "smollm2-135m", "--compare", "llama-bench", "--adapter", "lora.gguf")
    assert done.returncode == 2
    assert "exclude each other" in done.stderr
