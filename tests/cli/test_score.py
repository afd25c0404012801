"""`frink-numba score` on the real model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from frink_numba.cli.main import main
from frink_numba.host import score
from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from tests.cli.runner import frink, frink_json, one_line_error
from tests.golden.tiny import VARIANTS
from tests.golden.tiny_gguf import content, write
from tests.vocabularies import sentencepiece

_TEXT = "The capital of France is Paris."


def test_each_token_has_its_own_probability(smollm2_path: Path, tmp_path: Path) -> None:
    """Against a plain softmax over all logits in float64: the score at i belongs to token i, given those before it."""
    (tmp_path / "text.txt").write_text(_TEXT)
    document = frink_json("score", "smollm2-135m", "--file", str(tmp_path / "text.txt"))
    with load(smollm2_path) as model, Decoder(model, backends="host") as decoder:
        ids = model.tokenizer.encode(_TEXT)
        logits = decoder.prefill(ids, decoder.new_cache(), logits="all").logits
    assert logits is not None
    probabilities = np.exp(logits.astype(np.float64))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    wanted = [math.log(probabilities[i - 1, ids[i]]) for i in range(1, len(ids))]
    assert [entry["id"] for entry in document["tokens"]] == ids
    assert "".join(entry["text"] for entry in document["tokens"]) == _TEXT
    assert document["tokens"][0]["log_probability"] is None
    found = [entry["log_probability"] for entry in document["tokens"][1:]]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert document["log_probability"] == pytest.approx(sum(found))
    assert document["perplexity"] == pytest.approx(math.exp(-sum(found) / len(found)))


def test_the_texts_of_tokens_make_up_the_text(tmp_path: Path) -> None:
    """SentencePiece's blanks stand where the text has them; a character of several tokens comes with its last."""
    metadata = sentencepiece()
    tokens = metadata["tokenizer.ggml.tokens"]
    file = content(replace(VARIANTS["llama_grouped"], vocab=len(tokens)))
    file.metadata |= metadata
    path = write(file, tmp_path / "sentencepiece.gguf")
    text = "hello world \u00e9\U0001f999 x"
    document = frink_json("score", str(path), text)
    pieces = [entry["text"] for entry in document["tokens"]]
    assert "".join(pieces).removeprefix("<s>") == text
    assert "" in pieces


def test_a_perplexity_beyond_floats_is_null_in_json(
    monkeypatch: pytest.MonkeyPatch, capsys, smollm2_path: Path
) -> None:
    monkeypatch.setattr(score, "token_log_probabilities", lambda decoder, tokens, **_: np.full(len(tokens) - 1, -1e4))
    assert main(["score", str(smollm2_path), "a b c", "--json", "--backend", "host"]) == 0
    assert json.loads(capsys.readouterr().out)["perplexity"] is None
    assert main(["score", str(smollm2_path), "a b c", "--backend", "host"]) == 0
    assert capsys.readouterr().out.endswith("perplexity beyond floating-point numbers\n")


def test_lines_and_summary(smollm2_path: Path) -> None:
    done = frink("score", "smollm2-135m", stdin=_TEXT)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 8
    assert lines[0].split() == ["0", "504", "-", "'The'"]
    assert lines[-1].startswith("6 tokens scored, log-probability -")
    summary = frink("score", "smollm2-135m", _TEXT, "--summary")
    assert summary.stdout.splitlines() == lines[-1:]


def test_a_text_of_one_token_is_one_line(smollm2_path: Path) -> None:
    assert "at least two tokens, got 1" in one_line_error(frink("score", "smollm2-135m", "The"))


def test_a_file_that_is_a_dash_is_stdin(smollm2_path: Path) -> None:
    """As for other programs; a file of that name is ./-."""
    done = frink("score", "smollm2-135m", "--summary", "--file", "-", stdin=_TEXT)
    assert done.stdout == frink("score", "smollm2-135m", "--summary", _TEXT).stdout
    missing = one_line_error(frink("score", "smollm2-135m", "--file", "./-", stdin=_TEXT))
    assert missing == "cannot read ./-: No such file or directory"
    message = one_line_error(frink("score", "smollm2-135m", "--file", "-", stdin=b"caf\xe9 "))
    assert message.startswith("stdin is not UTF-8 text")


def test_a_missing_file_is_one_line(smollm2_path: Path, tmp_path: Path) -> None:
    message = one_line_error(frink("score", "smollm2-135m", "--file", str(tmp_path / "absent.txt")))
    assert message == f"cannot read {tmp_path / 'absent.txt'}: No such file or directory"


def test_every_line_is_a_text(smollm2_path: Path, tmp_path: Path) -> None:
    """--lines: as each line alone, and the totals of all; blank lines are none."""
    lines = [_TEXT, "Two and two make four.", "A sentence that is a little longer than the others, for a change."]
    (tmp_path / "text.txt").write_text("\n".join([lines[0], "", *lines[1:], "  "]))
    document = frink_json("score", "smollm2-135m", "--lines", "--file", str(tmp_path / "text.txt"))
    assert [entry["text"] for entry in document["texts"]] == lines
    alone = [frink_json("score", "smollm2-135m", "--summary", line) for line in lines]
    for entry, one in zip(document["texts"], alone, strict=True):
        assert entry["scored"] == one["scored"]
        assert entry["log_probability"] == pytest.approx(one["log_probability"], abs=1e-2)
    assert document["scored"] == sum(one["scored"] for one in alone)
    assert document["log_probability"] == pytest.approx(sum(one["log_probability"] for one in alone), abs=1e-2)
    shown = frink("score", "smollm2-135m", "--lines", "--file", str(tmp_path / "text.txt")).stdout.splitlines()
    assert len(shown) == len(lines) + 1
    assert shown[0].endswith(repr(_TEXT))


def test_a_line_of_one_token_is_named(smollm2_path: Path, tmp_path: Path) -> None:
    """By its number in the file, before anything is scored."""
    (tmp_path / "text.txt").write_text("The first line.\n\nx\n")
    message = one_line_error(frink("score", "smollm2-135m", "--lines", "--file", str(tmp_path / "text.txt")))
    assert message.startswith("line 3, 'x', is a single token")


def test_no_line_at_all_is_an_error(smollm2_path: Path) -> None:
    assert "no line" in one_line_error(frink("score", "smollm2-135m", "--lines", " \n "), 2)
