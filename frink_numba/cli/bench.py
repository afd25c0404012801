"""measure prefill (pp) and decode (tg) in tokens per second"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frink_numba.cli import arguments as common
from frink_numba.cli import output

if TYPE_CHECKING:
    from frink_numba.cli.compare import Compared
    from frink_numba.host.decoder import Decoder
    from frink_numba.host.model import Model
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
    parser.add_argument(
        "--compare",
        metavar="PROGRAM",
        help='also run llama-bench of llama.cpp, by name or path, with options of its own: "llama-bench -fa 1"',
    )
    parser.add_argument("--receipt", type=Path, metavar="FILE", help="write the figures to FILE as a JSON receipt")
    parser.epilog = (
        "ppN prefills N random tokens into an empty cache, logits of the last position included. tgN feeds N tokens, "
        "one by one, from an empty cache, logits after each and no sampling. Both as llama-bench counts them; one run "
        "of each before the measured ones is thrown away. Figures are the median, the 20th and the 80th percentile. "
        "--compare runs before them, with the same file, lengths and repetitions; a ratio above 1 means that "
        "frink-numba is faster."
    )


def run(arguments: argparse.Namespace) -> int:
    from frink_numba.cli import compare
    from frink_numba.cli.engine import label, open_engine
    from frink_numba.receipt import check_place, receipt, write_receipt

    if not arguments.prompt and not arguments.generate:
        arguments.parser.error("nothing to measure: give -p or -n a number")
    if arguments.compare is not None and arguments.adapters:
        arguments.parser.error("llama-bench takes no adapter: --compare and --adapter exclude each other")
    if arguments.receipt:
        check_place(arguments.receipt)
    program = compare.find(arguments.compare) if arguments.compare is not None else None
    with open_engine(arguments) as (model, decoder):
        longest = max(arguments.prompt + arguments.generate)
        if longest > model.context_length:
            arguments.parser.error(f"{longest} tokens are beyond the context of {model.context_length}; see --context")
        cases = [(f"pp{n}", n, _prefill, decoder.plan(batch=n)) for n in arguments.prompt]
        cases += [(f"tg{n}", n, _decode, decoder.plan(batch=1)) for n in arguments.generate]
        other = None
        if program:
            gpu = any(row.backend != "host" for *_, plan in cases for row in plan.rows)
            other = compare.run(
                program, model.gguf.paths[0], arguments.prompt, arguments.generate, arguments.repetitions, gpu
            )
        with output.progress_bar() as progress:
            rows = _measure(arguments, cases, decoder, label(model), model.vocab_size, other, progress)
        facts = _facts(model, label(model))
    machine, driver = _machine(rows)
    command = shlex.join(["frink-numba", *(sys.argv[1:])])
    document = receipt("bench", command, rows, machine=machine, driver=driver)
    document["model"] = facts
    if arguments.receipt:
        write_receipt(arguments.receipt, document)
    if arguments.json:
        output.write_json(document)
    else:
        _write(document)
    return 0


def _facts(model: Model, name: str) -> dict[str, Any]:
    """A model's name, and the bytes and number of its weights."""
    tensors = model.gguf.tensors.values()
    return {
        "name": name,
        "bytes": sum(info.nbytes for info in tensors),
        "parameters": sum(math.prod(info.shape) for info in tensors),
    }


def _measure(
    arguments: argparse.Namespace,
    cases: list[Any],
    decoder: Decoder,
    name: str,
    vocabulary: int,
    other: Compared | None,
    progress: output.Progress | None,
) -> list[Row]:
    import numpy as np

    from frink_numba.receipt import Row

    tokens = np.random.default_rng(_SEED).integers(0, vocabulary, max(arguments.prompt + arguments.generate)).tolist()
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
        against = {} if other is None else {"baseline": other.name, "baseline_value": other.rates[case]}
        rows.append(Row.from_samples(f"{name} {case}", "tok/s", samples, backend, tier=tier, **against))
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
    """The backends of a plan, joined, and the tiers that they name; None where they name none."""
    backends = dict.fromkeys(row.backend or "nobody" for row in plan.rows)
    notes = (row.note.rpartition(", ")[2] for row in plan.rows)
    tiers = dict.fromkeys(note.removesuffix(" tier") for note in notes if note.endswith(" tier"))
    return "+".join(backends), "+".join(tiers) or None


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
    """A table as llama-bench's: a row a test."""
    from frink_numba.plan import in_units

    facts, rows = document["model"], document["rows"]
    what = (facts["name"], in_units(facts["bytes"], 2), output.in_thousands(facts["parameters"]))
    columns = ["model", "size", "params", "backend", "tier", "test", "t/s", "p20", "p80"]
    against = rows[0].get("baseline")
    if against:
        columns += [against, "ratio"]
    shown = []
    for row in rows:
        test = row["case"].rpartition(" ")[2]
        cells = [*what, row["backend"], row.get("tier", ""), test, *(f"{row[x]:.2f}" for x in ("value", "p20", "p80"))]
        if against:
            cells += [f"{row['baseline_value']:.2f}", f"{row['ratio']:.2f}"]
        shown.append(cells)
    figures = ("size", "params", "test", "t/s", "p20", "p80", against or "", "ratio")
    output.write_table(f"{document['machine']}, {rows[0]['runs']} runs", columns, shown, right=figures)
