"""give each token's log-probability and the perplexity of a text, or of every line"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from frink_numba.cli import arguments as common
from frink_numba.cli import output

if TYPE_CHECKING:
    from frink_numba.host.model import Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.engine(parser)
    parser.add_argument("text", metavar="TEXT", nargs="?", help='the text; "-" or nothing reads stdin')
    parser.add_argument("--file", metavar="FILE", help="read the text from a UTF-8 file, - is stdin")
    parser.add_argument("--lines", action="store_true", help="every line is a text of its own; empty ones are skipped")
    parser.add_argument("--summary", action="store_true", help="write the totals only, no line per token")


def run(arguments: argparse.Namespace) -> int:
    from frink_numba.cli.engine import label, open_engine
    from frink_numba.cli.prompt import read_text

    if arguments.text is not None and arguments.file is not None:
        arguments.parser.error("give a text or --file, not both")
    text = read_text(arguments.parser, arguments.text, arguments.file)
    if arguments.lines:
        return _run_lines(arguments, text)
    with open_engine(arguments) as (model, decoder):
        from frink_numba.host.score import perplexity, token_log_probabilities

        tokens = model.tokenizer.encode(text)
        with output.progress_bar() as bar:
            report = (lambda done, total: bar("score", done, total)) if bar else None
            scores = token_log_probabilities(decoder, tokens, progress=report)
        entries = [
            {"id": token, "text": piece, "log_probability": score}
            for token, piece, score in zip(tokens, _pieces(model, tokens), [None, *scores.tolist()], strict=True)
        ]
        document = {"model": label(model), **_totals(scores, perplexity), "tokens": entries}
    if arguments.summary:
        del document["tokens"]
    if arguments.json:
        output.write_json(document)
    else:
        _write(document)
    return 0


def _run_lines(arguments: argparse.Namespace, text: str) -> int:
    """Score every line by itself, many at a time; the totals are those of all tokens."""
    from frink_numba.cli.engine import label, open_engine

    numbered = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not numbered:
        arguments.parser.error("there is no line to score")
    with open_engine(arguments) as (model, decoder):
        import numpy as np

        from frink_numba.errors import PromptError
        from frink_numba.host.score import batch_log_probabilities, perplexity

        lines = [line for _, line in numbered]
        tokens = [model.tokenizer.encode(line) for line in lines]
        for (number, line), own in zip(numbered, tokens, strict=True):
            if len(own) < 2:
                raise PromptError(
                    f"line {number}, {line!r}, is a single token, and nothing before it tells how likely it is: "
                    "leave it out, or add to it"
                )
        with output.progress_bar() as bar:
            report = (lambda done, total: bar("score", done, total)) if bar else None
            scores = batch_log_probabilities(decoder, tokens, progress=report)
        document: dict[str, Any] = {"model": label(model), **_totals(np.concatenate(scores), perplexity)}
        document["texts"] = [
            {"text": line, **_totals(own, perplexity)} for line, own in zip(lines, scores, strict=True)
        ]
    if arguments.summary:
        del document["texts"]
    if arguments.json:
        output.write_json(document)
        return 0
    for entry in document.get("texts", []):
        output.write_text(f"{entry['log_probability']:12.4f} {_shown(entry['perplexity']):>12}  {entry['text']!r}\n")
    _write_totals(document)
    return 0


def _totals(scores: Any, perplexity: Any) -> dict[str, Any]:
    total = perplexity(scores)
    return {
        "scored": len(scores),
        "log_probability": float(scores.sum()),
        "perplexity": total if math.isfinite(total) else None,
    }


def _shown(perplexity: float | None) -> str:
    return "beyond floating-point numbers" if perplexity is None else f"{perplexity:.4f}"


def _pieces(model: Model, tokens: list[int]) -> list[str]:
    """The text that each token adds: together they are the text, blanks included; a character comes with its last."""
    stream = model.tokenizer.stream()
    pieces = [stream.push(token) for token in tokens]
    pieces[-1] += stream.flush()
    return pieces


def _write(document: dict[str, Any]) -> None:
    for position, entry in enumerate(document.get("tokens", [])):
        score = entry["log_probability"]
        shown = "-" if score is None else f"{score:.4f}"
        output.write_text(f"{position:6d} {entry['id']:8d} {shown:>10}  {entry['text']!r}\n")
    _write_totals(document)


def _write_totals(document: dict[str, Any]) -> None:
    output.write_text(
        f"{document['scored']} tokens scored, log-probability {document['log_probability']:.4f}, "
        f"perplexity {_shown(document['perplexity'])}\n"
    )
