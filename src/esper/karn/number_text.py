"""Numbers as short texts, the same in every view."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

COLOURS = 8
"""Number of colours of curves."""


def number_text(value: float | None, unit: str = "number", digits: int | None = None) -> str:
    """Format a value: "not measured" for None, a name for values that are not finite.

    unit   number, percent, points (hundredths, signed), count or seconds. The page's script formats in the same way.
    """
    if value is None:
        return "not measured"
    if not math.isfinite(value):
        return "NaN" if value != value else "∞" if value > 0 else "−∞"
    if unit == "percent":
        text = f"{100 * value:.{1 if digits is None else digits}f} %"
    elif unit == "points":
        text = f"{100 * value:+.{1 if digits is None else digits}f}"
    elif unit == "count":
        text = f"{value:,.0f}".replace(",", "\u2009")
    elif unit == "seconds":
        text = duration(value)
    elif value == 0:
        text = "0"
    elif digits is not None:
        text = f"{value:.{digits}f}"
    elif abs(value) >= 10_000 or abs(value) < 0.001:
        text = f"{value:.2e}"
    else:
        text = f"{value:.4g}"
    return text.replace("-", "−")


def duration(seconds: float) -> str:
    """Format a duration."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


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
    """Return tick labels with as few digits as distinguish neighbours."""
    if unit in ("count", "seconds"):
        return [compact(v) if unit == "count" else number_text(v, unit) for v in values]
    scale = 100.0 if unit in ("percent", "points") else 1.0
    gap = min((b - a for a, b in pairwise(values)), default=1.0) * scale
    digits = 0
    while digits < 6 and abs(gap * 10**digits - round(gap * 10**digits)) > 1e-6:
        digits += 1
    sign = "+" if unit == "points" else ""
    tail = " %" if unit == "percent" else ""
    return [f"{v * scale:{sign if v else ''}.{digits}f}{tail}".replace("-", "−") for v in values]


def compact(value: float) -> str:
    """Format a number with three digits and k, M or G."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−")
