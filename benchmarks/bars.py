"""Chart of `benchmarks.train` as SVG: one stacked bar per host, the phases of a step relative to the bare loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LEFT = 240
WIDTH = 560
ROW = 34
TOP = 84
COLOURS = {"train": "#0072b2", "validate": "#56b4e9", "coalitions": "#e69f00", "norms": "#f0e442"}
REST = "#d55e00"
BARE = "#111111"
GOAL = "#777777"


@dataclass(frozen=True, slots=True)
class Bar:
    """One host: the phases of our step and the reference marks, in units of the bare loop's step."""

    name: str
    parts: dict[str, float]
    goal: float
    """The bare loop with its table of coalitions."""


def bars(rows: Sequence[Bar], title: str) -> str:
    """Return stacked bars as SVG. The line at 1 is the bare loop; the tick of a row adds coalitions to it."""
    most = 1.1 * max(max(sum(row.parts.values()), row.goal, 1.0) for row in rows)
    height = TOP + ROW * len(rows) + 30

    def x(value: float) -> float:
        return LEFT + WIDTH * value / most

    colours = COLOURS | {"all else": REST}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" '
        f'font-family="sans-serif" font-size="12" role="img"><title>{escape(title)}</title>'
        '<rect width="100%" height="100%" fill="white"/>'
        f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(title)}</text>'
        '<text x="12" y="40" fill="#555">in units of the bare loop (the line at 1); a grey tick is the bare loop with '
        "its table of coalitions</text>"
    ]
    for i, (name, colour) in enumerate(colours.items()):
        parts.append(
            f'<rect x="{LEFT + 110 * i}" y="52" width="11" height="11" fill="{colour}"/>'
            f'<text x="{LEFT + 16 + 110 * i}" y="62">{escape(name)}</text>'
        )
    for i, row in enumerate(rows):
        y = TOP + ROW * i
        start = 0.0
        parts.append(f'<text x="{LEFT - 10}" y="{y + 17}" text-anchor="end">{escape(row.name)}</text>')
        grouped = {name: row.parts.get(name, 0.0) for name in COLOURS}
        grouped["all else"] = sum(v for name, v in row.parts.items() if name not in COLOURS)
        for name, value in grouped.items():
            parts.append(
                f'<rect x="{x(start):.1f}" y="{y}" width="{x(value) - LEFT:.1f}" height="24" fill="{colours[name]}">'
                f"<title>{escape(name)}: {value:.3f}</title></rect>"
            )
            start += value
        parts.append(
            f'<text x="{x(max(start, row.goal)) + 8:.1f}" y="{y + 17}" fill="#333">{start:.2f}</text>'
            f'<line x1="{x(row.goal):.1f}" x2="{x(row.goal):.1f}" y1="{y - 3}" y2="{y + 27}" stroke="{GOAL}" '
            'stroke-width="2"/>'
        )
    parts.append(
        f'<line x1="{x(1):.1f}" x2="{x(1):.1f}" y1="{TOP - 8}" y2="{height - 26}" stroke="{BARE}" '
        'stroke-dasharray="3 2"/>'
        f'<text x="{x(1):.1f}" y="{height - 10}" text-anchor="middle" fill="#333">bare loop</text>'
    )
    return "".join(parts) + "</svg>\n"
