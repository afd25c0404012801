"""measure prefill (pp) and decode (tg) in tokens per second"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frink_numba.cli import arguments as common
from frink_numba.cli import output

if TYPE_CHECKING:
    from frink_numba.host.decoder import Decoder
    from frink_numba.plan import Plan
    from frink_numba.receipt import Row

_SEED = 20240229


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.engine(parser)
    parser.add_argument(
        "-p", "--prompt", type=common.counts, default=[512], metavar="N,...", help="prompt lengths to prefill (512)"
    )
    parser.add_argument(
        "-n", "--generate", type=common.counts, default=[128], metavar="N,...", help="numbers of tokens to decode (128)"
    )
    parser.add_argument(
        "-r", "--repetitions", type=common.at_least(1), default=5, metavar="N", help="measured runs of each (5)"
    )
    parser.add_argument("--receipt", type=Path, metavar="FILE", help="write the figures to FILE as a JSON receipt")
    parser.epilog = (
        "ppN prefills N random tokens into an empty cache, logits of the last position included. tgN feeds N tokens, "
        "one by one, from an empty cache, logits after each and no sampling. Both as llama-bench counts them; one run "
        "of each before the measured ones is thrown away. Figures are the median, the 20th and the 80th percentile."
    )


def run(arguments: argparse.Namespace) -> int:
    from frink_numba.cli.engine import label, open_engine
    from frink_numba.receipt import check_place, receipt, write_receipt

    if not arguments.prompt and not arguments.generate:
        arguments.parser.error("nothing to measure: give -p or -n a number")
    if arguments.receipt:
        check_place(arguments.receipt)
    with open_engine(arguments) as (model, decoder):
        longest = max(arguments.prompt + arguments.generate)
        if longest > model.context_length:
            arguments.parser.error(f"{longest} tokens are beyond the context of {model.context_length}; see --context")
        with output.progress_bar() as progress:
            rows = _measure(arguments, decoder, label(model), model.vocab_size, progress)
    machine, driver = _machine(rows)
    command = shlex.join(["frink-numba", *(sys.argv[1:])])
    document = receipt("bench", command, rows, machine=machine, driver=driver)
    if arguments.receipt:
        write_receipt(arguments.receipt, document)
    if arguments.json:
        output.write_json(document)
    else:
        _write(document)
    return 0


def _measure(
    arguments: argparse.Namespace, decoder: Decoder, name: str, vocabulary: int, progress: output.Progress | None
) -> list[Row]:
    import numpy as np

    from frink_numba.receipt import Row

    tokens = np.random.default_rng(_SEED).integers(0, vocabulary, max(arguments.prompt + arguments.generate)).tolist()
    cases = [(f"pp{n}", n, _prefill, decoder.plan(batch=n)) for n in arguments.prompt]
    cases += [(f"tg{n}", n, _decode, decoder.plan(batch=1)) for n in arguments.generate]
    total, done = len(cases) * (arguments.repetitions + 1), 0
    rows = []
    for case, n, once, plan in cases:
        samples = []
        for repetition in range(arguments.repetitions + 1):
            seconds = once(decoder, tokens[:n])
            if repetition:  # the first run fills caches and compiles
                samples.append(n / seconds)
            done += 1
            if progress:
                progress(case, done, total)
        backend, tier = _served(plan)
        rows.append(Row.from_samples(f"{name} {case}", "tok/s", samples, backend, tier=tier))
    return rows


def _prefill(decoder: Decoder, tokens: list[int]) -> float:
    cache = decoder.new_cache()
    start = time.perf_counter()
    decoder.prefill(tokens, cache, logits="last")
    return time.perf_counter() - start


def _decode(decoder: Decoder, tokens: list[int]) -> float:
    cache = decoder.new_cache()
    start = time.perf_counter()
    for token in tokens:
        decoder.decode(token, cache)
    return time.perf_counter() - start


def _served(plan: Plan) -> tuple[str, str | None]:
    """The backends of a plan, joined, and what they say of how they serve; None where they say nothing."""
    backends = dict.fromkeys(row.backend or "nobody" for row in plan.rows)
    notes = dict.fromkeys(row.note for row in plan.rows if row.note)
    return "+".join(backends), "; ".join(notes) or None


def _machine(rows: list[Row]) -> tuple[str, str | None]:
    """The processor's name, or the GPU's and its driver's version when anything ran on cuda."""
    from frink_numba.driver import query_driver
    from frink_numba.receipt import cpu_name

    used = {name for row in rows for name in row.backend.split("+") if name.partition(":")[0] == "cuda"}
    if not used:
        return cpu_name(), None
    driver = query_driver()
    numbers = sorted({int(name.partition(":")[2] or 0) for name in used})
    names = [device.name for device in driver.devices if device.number in numbers]
    return ", ".join(names) or "unknown GPU", driver.version


def _write(document: dict[str, Any]) -> None:
    output.write_table(
        document["machine"],
        ("case", "tok/s", "p20", "p80", "runs", "backend", "how"),
        [
            (
                r["case"],
                f"{r['value']:.1f}",
                f"{r['p20']:.1f}",
                f"{r['p80']:.1f}",
                r["runs"],
                r["backend"],
                r.get("tier", ""),
            )
            for r in document["rows"]
        ],
        right=("tok/s", "p20", "p80", "runs"),
    )
