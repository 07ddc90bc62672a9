"""Ticks of a chart's axis, and the dot plot of a comparison as SVG: one row per controller, one dot per world."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from math import sqrt

from esper.karn.formatting import number_text
from esper.leyline.text import escape


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return about `about` round numbers within low…high."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return []
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # too narrow to divide in floating point
        return [low]
    raw = (high - low) / max(1, about)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [0.0 if k == 0 else k * step for k in range(first, last + 1)]


def tick_labels(values: Sequence[float], unit: str) -> list[str]:
    """Return tick labels with as few digits as distinguish neighbours. The unit is number or percent."""
    scale, tail = (100.0, " %") if unit == "percent" else (1.0, "")
    gap = min((b - a for a, b in pairwise(values)), default=1.0) * scale
    digits = 0
    while digits < 6 and abs(gap * 10**digits - round(gap * 10**digits)) > 1e-6:
        digits += 1
    return [f"{v * scale:.{digits}f}{tail}".replace("-", "−") for v in values]


LEFT = 250
WIDTH = 560
ROW = 34
TOP = 56
COLOURS = ("#0072b2", "#777777")  # the first row, and the others


def dots(rows: Sequence[tuple[str, Sequence[float]]], title: str) -> str:
    """Return the plot as SVG. A bar marks the mean, a line its 95 % interval from the standard error."""
    values = [v for _, row in rows for v in row]
    low, high = min(values), max(values)
    pad = 0.05 * (high - low or 1.0)
    low, high = low - pad, high + pad
    height = TOP + ROW * len(rows) + 30

    def x(value: float) -> float:
        return LEFT + WIDTH * (value - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" '
        f'font-family="sans-serif" font-size="12" role="img"><title>{escape(title)}</title>'
        '<rect width="100%" height="100%" fill="white"/>'
        f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(title)}</text>'
        '<text x="12" y="40" fill="#555">a dot is a world; the bar is the mean, the line its 95 % interval</text>'
    ]
    for tick in ticks(low, high):
        if low <= tick <= high:
            parts.append(
                f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP - 6}" y2="{height - 26}" stroke="#e4e4e4"/>'
                f'<text x="{x(tick):.1f}" y="{height - 10}" text-anchor="middle" fill="#555">{number_text(tick)}</text>'
            )
    for i, (name, row) in enumerate(rows):
        y = TOP + ROW * (i + 0.5)
        colour = COLOURS[min(i, 1)]
        parts.append(f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        parts += [
            f'<circle cx="{x(v):.1f}" cy="{y + 5 * (k % 3 - 1):.1f}" r="3" fill="{colour}" fill-opacity="0.45"/>'
            for k, v in enumerate(row)
        ]
        mean = sum(row) / len(row)
        parts.append(f'<rect x="{x(mean) - 1.5:.1f}" y="{y - 11}" width="3" height="22" fill="{colour}"/>')
        if len(row) > 1:
            error = 1.96 * sqrt(sum((v - mean) ** 2 for v in row) / (len(row) - 1) / len(row))
            parts.append(
                f'<line x1="{x(mean - error):.1f}" x2="{x(mean + error):.1f}" y1="{y}" y2="{y}" stroke="{colour}" '
                'stroke-width="2"/>'
            )
    return "".join(parts) + "</svg>\n"
