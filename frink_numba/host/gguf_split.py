"""Models split over several files, NAME-00001-of-0000N.gguf: find all parts from any one, and check that they fit.

Each part is a GGUF file of its own that says which part it is (`split.no`, from 0), how many there are (`split.count`)
and how many tensors they hold together (`split.tensors.count`). The metadata is in the first part; the others may
repeat some of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from frink_numba.errors import GgufError
from frink_numba.host.gguf_format import NUMBER_TYPES, SPLIT_KEYS, shown
from frink_numba.host.gguf_metadata import Metadata, StoredValue
from frink_numba.host.gguf_reader import GgufPart, read_part

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def open_parts(path: Path) -> list[GgufPart]:
    """The parts of the model that the file at `path` is, or is a part of; in order, all mapped and checked.

    GgufError names the part that is missing, foreign, damaged or there twice. Nothing stays mapped after an error.
    """
    parts = [read_part(path)]
    try:
        count = _split_number(parts[0], "split.count", default=1)
        name = _NAME.fullmatch(path.name)
        named_count = int(name["count"]) if name else 1
        if count <= 1 and named_count <= 1:
            return parts
        if name is None:
            raise GgufError(
                f"{path}: is one of {count} parts of a split model, but its name does not end in "
                f"-00001-of-{count:05d}.gguf, so the other parts cannot be found; give the parts their names back"
            )
        if count != named_count:
            raise GgufError(
                f"{path}: its name says that it is one of {named_count} parts, its key 'split.count' says {count}: "
                "a foreign part, or renamed"
            )
        if not 1 <= int(name["number"]) <= count:
            raise GgufError(f"{path}: its name says that it is part {int(name['number'])} of {count}")
        paths = [path.with_name(f"{name['stem']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
        missing = list(islice((p.name for p in paths if not p.exists()), 5))  # a hostile count is not searched through
        if missing:
            names = ", ".join(missing[:4]) + (" and more" if len(missing) > 4 else "")
            raise GgufError(f"{path}: of the {count} parts of this split model these are missing: {names}")
        parts.pop().close()
        for number, part_path in enumerate(paths):
            parts.append(read_part(part_path, number))  # one by one, so that an error finds all that are open
        _check(parts)
    except BaseException:
        for part in parts:
            part.close()
        raise
    return parts


def merged_values(parts: Sequence[GgufPart]) -> dict[str, StoredValue]:
    """Metadata of all parts; of a key that several have, the first part's value."""
    values: dict[str, StoredValue] = {}
    for part in parts:
        for key, value in part.values.items():
            values.setdefault(key, value)
    return values


def _split_number(part: GgufPart, key: str, default: int | None = None) -> int:
    value = part.values.get(key)
    if value is None:
        if default is None:
            raise GgufError(f"{part.path}: has no key {key!r}, so it is not a part of a split model")
        return default
    if value.item is not None or value.type not in NUMBER_TYPES or NUMBER_TYPES[value.type].kind not in "iu":
        raise GgufError(f"{part.path}: key {key!r} has the type {value.type.name.lower()}, it must be an integer")
    number: int = Metadata({key: value})[key]
    return number


def _check(parts: Sequence[GgufPart]) -> None:
    first = parts[0]
    owner: dict[str, GgufPart] = {}
    for index, part in enumerate(parts):
        count = _split_number(part, "split.count")
        if count != len(parts):
            raise GgufError(
                f"{part.path}: is a part of a model of {count} parts, {first.path.name} of one of {len(parts)}"
            )
        number = _split_number(part, "split.no")
        if number != index:
            raise GgufError(
                f"{part.path}: holds part {number + 1} of its model where part {index + 1} belongs: "
                "a copy of another part, or renamed"
            )
        for name in part.tensors:
            if name in owner:
                raise GgufError(
                    f"{part.path}: tensor {shown(name)} is in {owner[name].path.name} already: a foreign part"
                )
            owner[name] = part
        for key, value in part.values.items():
            known = first.values.get(key)
            if key not in SPLIT_KEYS and known is not None and not known.is_equal(value):
                raise GgufError(f"{part.path}: key {shown(key)} differs from that of {first.path.name}: a foreign part")
    for part in parts:
        total = _split_number(part, "split.tensors.count")
        if total != len(owner):
            raise GgufError(
                f"{part.path}: key 'split.tensors.count' is {total}, but the {len(parts)} parts hold {len(owner)} "
                "tensors: a foreign or damaged part"
            )
