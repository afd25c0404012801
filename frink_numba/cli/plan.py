"""tell which backend would serve which layer, and why not the others"""

from __future__ import annotations

import argparse

from frink_numba.cli import arguments as common
from frink_numba.cli import output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.engine(parser)
    parser.add_argument(
        "--batch", type=common.at_least(1), default=512, metavar="N", help="rows of the step; 1 asks about decode (512)"
    )


def run(arguments: argparse.Namespace) -> int:
    from frink_numba.cli.engine import label, open_engine

    with open_engine(arguments) as (model, decoder):
        plan = decoder.plan(batch=arguments.batch)
        name = label(model)
    if arguments.json:
        output.write_json({"model": name, **plan.as_dict()})
        return 0
    output.write_table(
        f"{name}: a step of {plan.batch} rows",
        ("layers", "backend", "how", "why not the others"),
        [(row.layers, row.backend or "nobody", row.note, row.why) for row in plan.rows],
    )
    for entry in plan.unavailable:
        output.write_text(f"{entry.name} is unavailable: {entry.reason}\n")
    return 0
