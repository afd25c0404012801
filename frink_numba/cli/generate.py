"""continue a prompt, or answer it with --chat; streams the text"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack

from frink_numba.cli import arguments as common
from frink_numba.cli import output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.engine(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help='the prompt; "-" or nothing reads stdin')
    parser.add_argument("--file", metavar="FILE", help="read the prompt from a UTF-8 file, - is stdin")
    parser.add_argument(
        "--chat", action="store_true", help="wrap the prompt in the model's chat template, as a user's turn"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt; implies --chat")
    parser.add_argument(
        "--max-new-tokens", type=common.at_least(1), default=256, metavar="N", help="stop after N tokens (256)"
    )
    parser.add_argument(
        "--temperature",
        type=common.within(0),
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token each time (0)",
    )
    parser.add_argument(
        "--top-k", type=common.at_least(0), default=0, metavar="K", help="choose among K tokens; 0: all (0)"
    )
    parser.add_argument(
        "--top-p",
        type=common.within(0, 1, above=True),
        default=1.0,
        metavar="P",
        help="choose among the likeliest tokens that make up P (1)",
    )
    parser.add_argument(
        "--min-p",
        type=common.within(0, 1),
        default=0.0,
        metavar="P",
        help="drop tokens less likely than P times the likeliest (0)",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=common.within(0, above=True),
        default=1.0,
        metavar="X",
        help="above 1 makes tokens that occurred already less likely (1)",
    )
    parser.add_argument("--seed", type=common.at_least(0), metavar="N", help="equal seeds give equal texts")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop before this text; may be given again"
    )
    parser.add_argument(
        "--speculate",
        type=common.at_least(0),
        default=0,
        metavar="N",
        help="draft up to N tokens, 63 at most, from the text so far; the answer stays the same (0; 3 suits the host)",
    )


def run(arguments: argparse.Namespace) -> int:
    from frink_numba.cli.engine import label, open_engine
    from frink_numba.cli.prompt import read_text
    from frink_numba.host.speculation import Speculative

    if arguments.prompt is not None and arguments.file is not None:
        arguments.parser.error("give a prompt or --file, not both")
    text = read_text(arguments.parser, arguments.prompt, arguments.file)
    with open_engine(arguments) as (model, decoder), ExitStack() as bar_shown:
        bar = bar_shown.enter_context(output.progress_bar())
        start = time.perf_counter()
        answer = decoder.generate(
            _messages(text, arguments.system) if arguments.chat or arguments.system is not None else text,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            min_p=arguments.min_p,
            repetition_penalty=arguments.repetition_penalty,
            seed=arguments.seed,
            stop=arguments.stop,
            speculate=arguments.speculate,
            progress=(lambda done, total: bar("prompt", done, total)) if bar else None,
        )
        texts: list[str] = []
        first = start
        for piece in answer:
            if not texts:
                first = time.perf_counter()
                bar_shown.close()  # the bar must be gone before text comes
            texts.append(piece.text)
            if not arguments.json:
                output.write_text(piece.text)
        after_first = len(answer.tokens) - 1
        document = {
            "model": label(model),
            "text": "".join(texts),
            "tokens": answer.tokens,
            "finish_reason": answer.finish_reason,
            "stop_string": answer.stop_string,
            "prompt_tokens": len(answer.prompt_tokens),
            "seconds_to_first_token": round(first - start, 4),
            "tokens_per_second": round(after_first / (time.perf_counter() - first), 2) if after_first else None,
        }
        if isinstance(answer.source, Speculative):
            document |= {"drafted_tokens": answer.source.drafted, "accepted_tokens": answer.source.accepted}
    if arguments.json:
        output.write_json(document)
    else:
        output.write_text("\n")
    return 0


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": text}]
