"""`frink-numba generate` on the real model: the library's own answer, streamed, and clean ends."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from tests.cli.runner import ENVIRONMENT, ROOT, command, frink, frink_json, one_line_error

_PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def decoder(smollm2_path: Path) -> Iterator[Decoder]:
    """The same model in this process, on the host."""
    with load(smollm2_path) as model, Decoder(model, backends="host") as opened:
        yield opened


def _text(decoder: Decoder, *arguments: object, **options: object) -> str:
    return "".join(piece.text for piece in decoder.generate(*arguments, **options))  # type: ignore[arg-type]


def test_the_text_is_the_librarys(decoder: Decoder) -> None:
    done = frink("generate", "smollm2-135m", _PROMPT, "--max-new-tokens", "12")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == _text(decoder, _PROMPT, max_new_tokens=12) + "\n"
    assert "Paris" in done.stdout


def test_json_tells_the_text_and_how_it_ended(decoder: Decoder) -> None:
    document = frink_json("generate", "smollm2-135m", "--max-new-tokens", "6", stdin=_PROMPT)
    assert document["text"] == _text(decoder, _PROMPT, max_new_tokens=6)
    assert document["tokens"] == [piece.token for piece in decoder.generate(_PROMPT, max_new_tokens=6)]
    assert document["finish_reason"] == "length"
    assert document["stop_string"] is None
    assert document["prompt_tokens"] == len(decoder.model.tokenizer.encode(_PROMPT))
    assert document["tokens_per_second"] > 0


def test_drafts_do_not_change_the_text(decoder: Decoder) -> None:
    """And JSON tells how many were right."""
    prompt = "The cat sat on the mat. The dog sat on the mat. The bird sat on the"
    document = frink_json("generate", "smollm2-135m", prompt, "--max-new-tokens", "24", "--speculate", "3")
    assert document["text"] == _text(decoder, prompt, max_new_tokens=24)
    assert 6 < document["accepted_tokens"] <= document["drafted_tokens"]
    refused = frink("generate", "smollm2-135m", prompt, "--speculate", "3", "--temperature", "0.5")
    assert refused.returncode == 1
    assert "speculate=3" in one_line_error(refused)


def test_chat_goes_through_the_models_template(decoder: Decoder) -> None:
    """A user's turn, with a system message; the answer ends with the model's stop token, which is not shown."""
    question = "What is the capital of France? Answer with one word."
    document = frink_json("generate", "smollm2-135m", question, "--system", "You are brief.", "--max-new-tokens", "40")
    messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": question}]
    assert document["prompt_tokens"] == len(decoder.model.chat_template.encode(messages))
    assert document["text"] == _text(decoder, messages, max_new_tokens=40)
    plain = frink_json("generate", "smollm2-135m", question, "--chat", "--max-new-tokens", "1")
    assert plain["prompt_tokens"] == len(decoder.model.chat_template.encode(messages[1:]))


def test_sampling_follows_the_seed(decoder: Decoder, tmp_path: Path) -> None:
    """The options reach the sampler: the library with the same numbers says the same."""
    (tmp_path / "prompt.txt").write_text("Once upon a time")
    options = ["--temperature", "1.5", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.01", "--seed", "11"]
    options += ["--repetition-penalty", "1.2", "--max-new-tokens", "10", "--file", str(tmp_path / "prompt.txt")]
    document = frink_json("generate", "smollm2-135m", *options)
    sampling = {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 11, "repetition_penalty": 1.2}
    assert document["text"] == _text(decoder, "Once upon a time", max_new_tokens=10, **sampling)
    assert document["text"] != _text(decoder, "Once upon a time", max_new_tokens=10)


def test_a_stop_text_ends_it(decoder: Decoder) -> None:
    """Greedy text goes on beyond the stop text, which itself is not shown."""
    document = frink_json(
        "generate", "smollm2-135m", _PROMPT, "--stop", "is:", "--stop", "zebra", "--max-new-tokens", "30"
    )
    whole = _text(decoder, _PROMPT, max_new_tokens=30)
    assert document["text"] == whole[: whole.index("is:")]
    assert (document["finish_reason"], document["stop_string"]) == ("stop", "is:")


def test_a_prompt_beyond_the_context_is_one_line(smollm2_path: Path) -> None:
    message = one_line_error(frink("generate", "smollm2-135m", "word " * 50, "--context", "16"))
    assert "the context is 16 tokens" in message
    assert "Traceback" not in message


def test_an_empty_prompt_is_one_line(smollm2_path: Path) -> None:
    assert "empty" in one_line_error(frink("generate", "smollm2-135m", ""))


def test_bytes_that_are_no_text_are_one_line(smollm2_path: Path) -> None:
    assert "stdin is not UTF-8 text" in one_line_error(frink("generate", "smollm2-135m", stdin=b"caf\xe9 "))


def test_an_unknown_backend_is_one_line(smollm2_path: Path) -> None:
    message = one_line_error(frink("generate", "smollm2-135m", "x", "--backend", "abacus"))
    assert "no backend 'abacus'; known: auto," in message


def _start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command("generate", "smollm2-135m", _PROMPT, *arguments),
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_reader_that_leaves_ends_it_quietly(smollm2_path: Path) -> None:
    """As in `frink-numba generate ... | head -c 1`."""
    with _start("--max-new-tokens", "4000") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == b""


def test_control_c_ends_it_with_130(smollm2_path: Path) -> None:
    with _start("--max-new-tokens", "4000") as process:
        assert process.stdout is not None
        assert process.stdout.read(1)  # it is generating
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b"\nfrink-numba: interrupted\n"
