"""tell which backend would serve which layer, why not the others, and the memory that takes"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from frink_numba.cli import arguments as common
from frink_numba.cli import output

if TYPE_CHECKING:
    from frink_numba.plan import Memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.engine(parser)
    parser.add_argument(
        "--batch",
        type=common.at_least(1),
        metavar="N",
        help="rows of the step; 1 asks about decode (512, or the context)",
    )
    parser.add_argument(
        "--length", type=common.at_least(1), metavar="N", help="positions of the text at the step's end (--batch)"
    )
    parser.epilog = (
        "Nothing runs and nothing is allocated. Memory is that of a device after the step: to the byte with --json. "
        "FRINK_CUDA_MEMORY is the budget; without it, nine tenths of what is free."
    )


def run(arguments: argparse.Namespace) -> int:
    from frink_numba.cli.engine import label, open_engine

    batch, length = arguments.batch, arguments.length
    if batch is not None and length is not None and length < batch:
        arguments.parser.error(f"a text of {length} positions cannot end with a step of {batch} rows")
    with open_engine(arguments) as (model, decoder):
        context = model.context_length
        for option, number in (("--batch", batch), ("--length", length)):
            if number is not None and number > context:
                arguments.parser.error(f"{option} {number} is beyond the context of {context} positions")
        if batch is None:
            batch = min(512, context if length is None else length)
        plan = decoder.plan(batch=batch, length=batch if length is None else length)
        name = label(model)
    if arguments.json:
        output.write_json({"model": name, **plan.as_dict()})
        return 0
    output.write_table(
        f"{name}: a step of {plan.batch} rows from position {plan.start_pos}",
        ("layers", "backend", "how", "why not the others"),
        [(row.layers, row.backend or "nobody", row.note, row.why) for row in plan.rows],
    )
    for memory in plan.memory:
        _write_memory(memory)
    for entry in plan.unavailable:
        output.write_text(f"{entry.name} is unavailable: {entry.reason}\n")
    return 0


def _write_memory(memory: Memory) -> None:
    from frink_numba.plan import in_units

    parts = [
        ("weights of the layers", memory.weights),
        ("embedding and output", memory.edges),
        ("scratch", memory.scratch),
        ("K/V rows", memory.kv_rows),
        ("other models and caches", memory.others),
        ("in all", memory.total),
        ("budget", memory.budget),
    ]
    if memory.page_locked:
        parts.append(("page-locked host memory", memory.page_locked))
    rows = [(what, in_units(nbytes), f"{nbytes:,}") for what, nbytes in parts]
    output.write_table(f"memory of {memory.backend}", ("what", "size", "bytes"), rows, right=("size", "bytes"))
