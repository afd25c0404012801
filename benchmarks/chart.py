"""The chart of prefill speed by length: ours, from the receipts, and other engines, from the baselines. An SVG.

Every point is a figure of a file in benchmarks/receipts: `render_table.py` draws it anew with the README's tables.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

BASELINES = "baselines-h200.json"
OURS = "frink_numba"

# In the order of drawing: the line that matters comes last, on top.
_STYLES = {
    "torch bf16 eager": "stroke:#9aa0a6;stroke-dasharray:5 4",
    "torch bf16 graph": "stroke:#5f6368",
    "llama.cpp": "stroke:#d9730d",
    OURS: "stroke:#1a66d6;stroke-width:3",
}
_PANEL_WIDTH, _PANEL_HEIGHT, _GAP, _LEFT, _TOP, _BOTTOM = 230, 240, 62, 58, 82, 46


@dataclass(frozen=True, slots=True)
class Point:
    """Tokens per second of one engine for one model and prompt length (0: generation). `source`: where it stands."""

    model: str
    engine: str
    length: int
    value: float
    source: str


def points(folder: Path) -> list[Point]:
    """The baselines' points, and for their models and lengths ours, where a receipt of the same machine has it."""
    baselines = json.loads((folder / BASELINES).read_text("utf-8"))
    found: list[Point] = []
    for row in baselines["rows"]:
        length = _length(row["test"])
        if length and len(row) > 3:  # models of which only one engine was measured have no panel
            found += [
                Point(row["model"], engine, length, row[engine], BASELINES) for engine in _STYLES if engine in row
            ]
    wanted = {(point.model, point.length) for point in found}
    mine = ours(folder).values()
    return found + [point for point in mine if (point.model, point.length) in wanted]


def ours(folder: Path) -> dict[tuple[str, str], Point]:
    """Our figure of each model and test ("pp512", "tg128") of the baselines, from receipts of the same machine.

    Of several receipts the newest counts; rows of the tier without tensor cores do not. A test of generation is the
    greedy answer behind one token.
    """
    baselines = json.loads((folder / BASELINES).read_text("utf-8"))
    wanted = {(row["model"], row["test"]) for row in baselines["rows"]}
    newest: dict[tuple[str, str], tuple[str, Point]] = {}
    for path, document, row in receipts_rows(folder):
        model, _, test = row["case"].removesuffix(" after 1, greedy").rpartition(" ")
        key = model.replace(" shape", "").replace("-Instruct.", " "), test
        if document["machine"] != baselines["machine"] or key not in wanted or row.get("tier") in (None, "simt"):
            continue
        if row["metric"] == "tok/s" and (key not in newest or document["date"] > newest[key][0]):
            newest[key] = document["date"], Point(key[0], OURS, _length(test), row["value"], path.name)
    return {key: point for key, (_, point) in newest.items()}


def receipts_rows(folder: Path) -> Iterator[tuple[Path, dict[str, Any], dict[str, Any]]]:
    """Every row of every receipt of `folder`, with its file and document, in the order of the names."""
    for path in sorted(folder.glob("*.json")):
        if path.name == BASELINES:
            continue
        document = json.loads(path.read_text("utf-8"))
        for row in document["rows"]:
            yield path, document, row


def caption(folder: Path) -> str:
    """Where the chart's points are from, in one paragraph of Markdown."""
    baselines = json.loads((folder / BASELINES).read_text("utf-8"))
    ours = sorted({point.source for point in points(folder) if point.engine == OURS})
    links = ", ".join(f"[{name.removesuffix('.json')}](benchmarks/receipts/{name})" for name in ours)
    engines = "; ".join(f"{engine}: {how}" for engine, how in baselines["engines"].items())
    return (
        f"{baselines['machine']}. Ours: {links}. The others were measured on {baselines['date']}, not in the same runs "
        f"([baselines](benchmarks/receipts/{BASELINES})). {engines}."
    )


def draw(found: Sequence[Point]) -> str:
    """The SVG: a panel a model, lengths to the right, tokens per second upwards on its own scale, both by ratio."""
    models = list(dict.fromkeys(point.model for point in found))
    width = _LEFT + len(models) * (_PANEL_WIDTH + _GAP) - _GAP + 24
    height = _TOP + _PANEL_HEIGHT + _BOTTOM
    said = "; ".join(f"{p.model} pp{p.length} {p.engine} {p.value:,.0f}" for p in found)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-labelledby="title desc" font-family="system-ui, sans-serif" font-size="12">',
        '<title id="title">Prefill: tokens per second by prompt length</title>',
        f'<desc id="desc">{escape(said)}</desc>',
        "<style>polyline{fill:none;stroke-width:1.8;stroke-linejoin:round}.grid{stroke:#e3e5e8}.axis{fill:#5f6368}"
        ".name{font-weight:600;fill:#202124}.ours{font-weight:600;fill:#1a66d6}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text class="name" x="{_LEFT}" y="22" font-size="14">Prefill, tokens per second by prompt length</text>',
        *_legend({point.engine for point in found}),
    ]
    for number, model in enumerate(models):
        left = _LEFT + number * (_PANEL_WIDTH + _GAP)
        parts += _panel([point for point in found if point.model == model], model, left)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(engines: set[str]) -> Iterator[str]:
    x = _LEFT
    for engine, style in reversed(_STYLES.items()):
        if engine in engines:
            yield f'<polyline style="{style}" points="{x},40 {x + 22},40"/>'
            yield f'<text class="{"ours" if engine == OURS else "axis"}" x="{x + 28}" y="44">{escape(engine)}</text>'
            x += 50 + 7 * len(engine)


def _panel(found: Sequence[Point], model: str, left: int) -> Iterator[str]:
    lengths = sorted({point.length for point in found})
    low, high = (f(point.value for point in found) for f in (min, max))
    ticks = [t for e in range(2, 7) for t in (10**e, 2 * 10**e, 5 * 10**e)]
    bottom, top = max(t for t in ticks if t <= low), min(t for t in ticks if t >= high)

    def x_of(length: int) -> float:
        return left + _PANEL_WIDTH * math.log(length / lengths[0]) / math.log(lengths[-1] / lengths[0])

    def y_of(value: float) -> float:
        return _TOP + _PANEL_HEIGHT * (1 - math.log(value / bottom) / math.log(top / bottom))

    yield f'<text class="name" x="{left}" y="{_TOP - 10}">{escape(model)}</text>'
    for tick in ticks:
        if bottom <= tick <= top:
            y = y_of(tick)
            yield f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{left + _PANEL_WIDTH}" y2="{y:.1f}"/>'
            yield f'<text class="axis" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(tick)}</text>'
    for length in lengths:
        y = _TOP + _PANEL_HEIGHT + 18
        yield f'<text class="axis" x="{x_of(length):.1f}" y="{y}" text-anchor="middle">{length}</text>'
    for engine, style in _STYLES.items():
        line = sorted((point.length, point.value) for point in found if point.engine == engine)
        if not line:
            continue
        places = [(x_of(length), y_of(value)) for length, value in line]
        yield f'<polyline style="{style}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'
        colour = re.search(r"#\w+", style)
        assert colour is not None
        for (x, y), (length, value) in zip(places, line, strict=True):
            title = f"<title>{escape(f'{engine}, {length} tokens: {value:,.0f} tok/s')}</title>"
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{colour[0]}">{title}</circle>'
            if engine == OURS:
                yield f'<text class="ours" x="{x:.1f}" y="{y - 9:.1f}" text-anchor="middle">{_short(value)}</text>'


def _length(test: str) -> int:
    """Tokens of a prompt: 512 of "pp512"; 0 for another test."""
    return int(test[2:]) if re.fullmatch(r"pp\d+", test) else 0


def _short(value: float) -> str:
    """Three significant digits, as 1M, 576k or 33.4k."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
