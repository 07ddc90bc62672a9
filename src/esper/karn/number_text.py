"""Numbers as short texts, the same in every view."""

from __future__ import annotations

import sys

LARGEST = sys.float_info.max


def number_text(value: float | None, unit: str = "number", digits: int | None = None) -> str:
    """Format a value: "not measured" for None, a name for values that are not finite.

    unit   number, percent, points (hundredths, signed), count or seconds. The page's script formats in the same way.
    """
    if value is None:
        return "not measured"
    if not is_finite(value):
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


def is_finite(value: float) -> bool:
    """Return whether a number is finite. Integers beyond the range of floats are not."""
    return -LARGEST <= value <= LARGEST


def duration(seconds: float) -> str:
    """Format a duration."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def compact(value: float) -> str:
    """Format a number with three digits and k, M or G."""
    if not is_finite(value):
        return number_text(value)
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−")
