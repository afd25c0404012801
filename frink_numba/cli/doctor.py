"""tell what this machine has, what is missing, and the command that mends it"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from frink_numba.cli import output

if TYPE_CHECKING:
    from frink_numba.cli.checks import Check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exits 1 when something that the host engine needs is missing or broken; a missing GPU is no fault."


def run(arguments: argparse.Namespace) -> int:
    from frink_numba.cli import checks

    sections = checks.examine()
    found = [check for _, section in sections for check in section]
    healthy = not any(check.status == checks.BROKEN for check in found)
    if arguments.json:
        document: dict[str, Any] = {"healthy": healthy}
        for title, section in sections:
            document[title] = [check.as_dict() for check in section]
        output.write_json(document)
        return 0 if healthy else 1
    for title, section in sections:
        output.write_table(title, ("", "what", "found"), [(c.status, c.name, c.found) for c in section])
    remedies = [check for check in found if check.remedy]
    output.write_text(_verdict(healthy, remedies))
    return 0 if healthy else 1


def _verdict(healthy: bool, remedies: list[Check]) -> str:
    lines = ["The host engine can run." if healthy else "The host engine cannot run as things are."]
    lines += [f"  {check.name}: {check.remedy}" for check in remedies]
    return "\n".join(lines) + "\n"
