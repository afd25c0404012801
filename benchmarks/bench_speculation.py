"""Greedy answers with drafts from the text so far beside the same answers without: tokens per second, drafts that held.

    python -m benchmarks.bench_speculation --drafts 3 --receipt benchmarks/receipts/speculation-host.json

Questions whose answers repeat what was said (code with a name changed, a text copied, a list put in order), and one
whose answer does not. Both ways take turns, and must give the same tokens, or there is no figure. The prompt's time is
not counted.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.command import exit_with
from frink_numba.driver import query_driver
from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from frink_numba.host.speculation import Speculative
from frink_numba.receipt import Row, cpu_name, receipt, write_receipt

CODE = """def read_rows(path, limit):
    rows = []
    with open(path) as file:
        for line in file:
            total = line.strip().split(",")
            if len(total) < limit:
                continue
            rows.append([float(value) for value in total])
    return rows


def mean_of_rows(rows):
    total = 0.0
    for row in rows:
        total += sum(row) / len(row)
    return total / len(rows)
"""
TEXT = (
    "The harbour was built in 1874 by three brothers who had made their money in tin. It has two long walls of grey "
    "stone, a lighthouse at the end of the western one, and room for forty boats. In winter the sea breaks over the "
    "walls, and the boats are pulled up on the beach behind the church. The lighthouse was lit for the first time in "
    "1881 and has been dark since 1963."
)
QUESTIONS = {
    "code edit": f"Rename the variable total to amount in this code and print the whole code again.\n\n{CODE}",
    "copy": f"Write this text once more, word for word, with a headline.\n\n{TEXT}",
    "summary": f"Summarize this text in a few sentences, and quote its most important sentence.\n\n{TEXT}",
    "prose": "Tell a short story about a fox who wants to learn how to swim.",
}


def answer(decoder: Decoder, question: str, tokens: int, drafts: int) -> tuple[list[int], float, Speculative | None]:
    """(the answer's tokens, tokens per second behind the first, the source of drafts)."""
    made = decoder.generate(question, chat=True, max_new_tokens=tokens, speculate=drafts)
    ids = [next(made).token]
    start = time.perf_counter()
    ids += [piece.token for piece in made]
    seconds = time.perf_counter() - start
    return ids, (len(ids) - 1) / seconds, made.source if isinstance(made.source, Speculative) else None


def measure(decoder: Decoder, name: str, tokens: int, drafts: int, runs: int) -> list[Row]:
    """The rates of both ways by turns, and the share of drafted tokens that held."""
    rates: dict[int, list[float]] = {0: [], drafts: []}
    answers, source = set(), None
    for run in range(runs + 1):
        for most, kept in rates.items():
            ids, rate, made = answer(decoder, QUESTIONS[name], tokens, most)
            answers.add(tuple(ids))
            source = made or source
            if run:  # the first one warms up
                kept.append(rate)
    if len(answers) != 1:
        raise SystemExit(f"{name}: drafts changed the answer")
    assert source is not None  # drafts were asked for
    length = len(answers.pop())
    served = decoder.plan(batch=1).rows[0]
    tier = (served.note or "").rpartition(", ")[2].removesuffix(" tier") or None
    backend = served.backend or ""
    plain = Row.from_samples("", "tok/s", rates[0], backend).value
    case = f"SmolLM2-135M-Instruct.Q4_1 {name}, {length} tokens, drafts of {drafts}"
    more = {"tier": tier, "baseline": "no drafts", "baseline_value": plain}
    row = Row.from_samples(case, "tok/s", rates[drafts], backend, **more)
    held = 100 * source.accepted / max(1, source.drafted)
    print(
        f"{case}: {row.value:.1f} tok/s, {row.ratio:.2f} times {plain:.1f} without; {source.accepted} of "
        f"{source.drafted} drafted tokens held in {source.steps} steps, {source.repeated} steps again",
        flush=True,
    )
    shares = Row(f"{case}: share that held", "%", held, held, held, 1, backend, tier)
    return [row, shares]


def main() -> int:
    """Measure and print; write the receipt when asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--questions", default=",".join(QUESTIONS), help=f"of {', '.join(QUESTIONS)}")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--backend", default="host")
    parser.add_argument("--receipt", type=Path)
    arguments = parser.parse_args()
    rows: list[Row] = []
    with load(arguments.model) as model, Decoder(model, arguments.backend) as decoder:
        for name in arguments.questions.split(","):
            rows += measure(decoder, name, arguments.tokens, arguments.drafts, arguments.runs)
    if arguments.receipt is not None:
        driver = query_driver()
        on_gpu = bool(driver.devices) and arguments.backend != "host"
        machine = driver.devices[0].name if on_gpu else cpu_name()
        command = "python -m benchmarks.bench_speculation " + " ".join(
            f"--{name} {getattr(arguments, name)}" for name in ("drafts", "tokens", "runs", "backend")
        )
        version = driver.version if on_gpu else None
        write_receipt(arguments.receipt, receipt("speculation", command, rows, machine=machine, driver=version))
    return 0


if __name__ == "__main__":
    exit_with(main)
