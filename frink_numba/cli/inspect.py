"""show a model file's facts, metadata and tensors"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from frink_numba.cli import arguments as common
from frink_numba.cli import output

if TYPE_CHECKING:
    from frink_numba.host.gguf import GgufFile

_SHOWN_ITEMS = 8
_SHOWN_CHARACTERS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.model(parser)
    parser.add_argument(
        "--tensors", action="store_true", help="list every tensor, not only the kinds (--json always does)"
    )


def run(arguments: argparse.Namespace) -> int:
    from frink_numba.host.fetch import resolve
    from frink_numba.host.gguf import GgufFile

    with GgufFile.open(resolve(arguments.model)) as gguf:
        document = describe(gguf)
    if arguments.json:
        output.write_json(document)
    else:
        _write(document, arguments.tensors)
    return 0


def describe(gguf: GgufFile) -> dict[str, Any]:
    """The file in plain types. Arrays are cut to their first items, `count` tells how many there are."""
    tensors = gguf.tensors.values()
    parameters = sum(math.prod(info.shape) for info in tensors)
    tensor_bytes = sum(info.nbytes for info in tensors)
    return {
        "files": [{"path": str(path), "bytes": path.stat().st_size} for path in gguf.paths],
        "gguf_version": gguf.version,
        "architecture": gguf.metadata.get("general.architecture"),
        "name": gguf.metadata.get("general.name"),
        "parameters": parameters,
        "tensor_bytes": tensor_bytes,
        "bits_per_weight": round(8 * tensor_bytes / parameters, 3) if parameters else None,
        "metadata": {key: _value(gguf, key) for key in gguf.metadata},
        "tensors": [
            {"name": info.name, "kind": info.kind.name, "shape": list(info.shape), "bytes": info.nbytes}
            for info in tensors
        ],
    }


def _value(gguf: GgufFile, key: str) -> dict[str, Any]:
    kind = gguf.metadata.type_name(key)
    value = gguf.metadata[key]
    if not kind.startswith("array"):
        return {"type": kind, "value": _plain(value)}
    return {"type": kind, "count": len(value), "value": [_plain(item) for item in value[:_SHOWN_ITEMS]]}


def _plain(value: Any) -> Any:
    """A value that JSON can hold: NumPy scalars become Python's, NaN and infinities their names."""
    plain = value.item() if hasattr(value, "item") else value
    return str(plain) if isinstance(plain, float) and not math.isfinite(plain) else plain


def _write(document: dict[str, Any], all_tensors: bool) -> None:
    files = document["files"]
    facts = [
        ("file", files[0]["path"] + (f" and {len(files) - 1} more" if len(files) > 1 else "")),
        ("size", f"{sum(file['bytes'] for file in files):,} bytes"),
        ("format", f"GGUF version {document['gguf_version']}"),
        ("architecture", document["architecture"]),
        ("name", document["name"]),
        ("parameters", f"{document['parameters']:,}"),
        ("bits per weight", document["bits_per_weight"]),
    ]
    output.write_table("", ("fact", "value"), [(name, _shown(value)) for name, value in facts])
    rows = [(key, entry["type"], _shown_entry(entry)) for key, entry in document["metadata"].items()]
    output.write_table("metadata", ("key", "type", "value"), rows)
    tensors = document["tensors"]
    counted, sizes = Counter(t["kind"] for t in tensors), Counter[str]()
    for tensor in tensors:
        sizes[tensor["kind"]] += tensor["bytes"]
    kinds = [(kind, counted[kind], f"{size / 1e6:.1f}") for kind, size in sizes.most_common()]
    output.write_table("tensor kinds", ("kind", "tensors", "MB"), kinds, right=("tensors", "MB"))
    if all_tensors:
        listed = [(_shown(t["name"]), t["kind"], " x ".join(map(str, t["shape"])), f"{t['bytes']:,}") for t in tensors]
        output.write_table("tensors", ("name", "kind", "shape", "bytes"), listed, right=("shape", "bytes"))


def _shown_entry(entry: dict[str, Any]) -> str:
    if "count" not in entry:
        return _shown(entry["value"])
    items = ", ".join(_shown(item) for item in entry["value"])
    more = ", ..." if entry["count"] > len(entry["value"]) else ""
    return f"{entry['count']:,} items: {items}{more}"


def _shown(value: Any) -> str:
    """A value in one line; a file's control characters must not reach the terminal."""
    text = "-" if value is None else str(value)
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
