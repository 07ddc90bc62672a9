"""Ticks of a chart's axis, and their labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


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
