"""Reads machine code for the hazard that no compiler message tells of (see gemm_emit.keep)."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

_WIDTH = re.compile(r"\.(64|128)\b")


def disassembler() -> str | None:
    """nvdisasm: from the package nvidia-cuda-nvdisasm, or on the path."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        for found in Path(root).glob("**/bin/nvdisasm"):
            return str(found)
    return shutil.which("nvdisasm")


def disassemble(tool: str, code: bytes, folder: Path) -> list[str]:
    """The instructions and labels (".L_x_1:") of a cubin, one a line, without addresses."""
    path = folder / "kernel.cubin"
    path.write_bytes(code)
    text = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True).stdout
    found = re.finditer(r"^(\.L_x_\d+:)|/\*[0-9a-f]{4,}\*/\s+(.*?);", text, re.MULTILINE)
    return [(m.group(1) or m.group(2)).strip() for m in found]


def _written(instruction: str) -> set[int]:
    """Registers that an instruction writes: its first operand, and what follows it in wide loads."""
    body = re.sub(r"^@!?U?P\w+\s+", "", instruction)
    opcode, _, operands = body.partition(" ")
    silent = ("ST", "RED", "BAR", "SYNCS", "BRA", "HGMMA", "WARPGROUP", "UT", "CALL", "MEMBAR")
    if body.endswith(":") or opcode.startswith(silent):
        return set()
    operand = re.match(r"\s*(?:P\w+,\s*)*R(\d+)\b", operands)
    if operand is None:
        return set()
    width = _WIDTH.search(opcode)
    count = int(width.group(1)) // 32 if width else 2 if ".WIDE" in opcode or opcode.startswith("CS2R") else 1
    first = int(operand.group(1))
    return set(range(first, first + count))


def operands_overwritten_in_flight(instructions: list[str]) -> list[str]:
    """Instructions that write a register which a multiplication in flight still reads as its A operand.

    Follows the code in a straight line, and each loop that multiplies twice around. HGMMA with gsb0 commits a group,
    WARPGROUP.DEPBAR.LE gsb0, N leaves N in flight.
    """
    faults = _follow(instructions)
    places = {line[:-1]: i for i, line in enumerate(instructions) if line.endswith(":")}
    for i, line in enumerate(instructions):
        branch = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
        if branch and places.get(branch.group(1), i) < i:
            body = instructions[places[branch.group(1)] : i + 1]
            if any("HGMMA" in inner for inner in body):
                faults += _follow(body + body)
    return faults


def _follow(instructions: list[str]) -> list[str]:
    groups: list[set[int]] = []
    current: set[int] = set()
    faults = []
    for instruction in instructions:
        multiply = re.search(r"HGMMA\S*\s+R\d+,\s*R(\d+),", instruction)
        if multiply:
            first = int(multiply.group(1))
            current |= set(range(first, first + 4))
            if "gsb0" in instruction:
                groups.append(current)
                current = set()
            continue
        wait = re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", instruction)
        if wait:
            left = int(wait.group(1), 16)
            groups = groups[len(groups) - left :] if left else []
            continue
        hit = _written(instruction) & set().union(current, *groups)
        if hit:
            faults.append(f"{instruction}  writes {sorted(hit)}")
    return faults
