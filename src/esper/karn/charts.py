"""Charts as HTML: curves in a stretchable SVG, ticks and labels as text.

A plot is drawn in a box of 1000 × 1000 units and stretched to the width of the page; strokes keep their width
(`vector-effect`), so letters and lines have the same size on any screen. The numbers behind the curves are embedded
as JSON, for the values shown under the pointer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from esper.leyline.text import escape, printable

Value = float | None
Point = tuple[float, Value]
MOST_POINTS = 500
"""Maximum number of points per curve. More cannot be distinguished on a screen."""
BOX = 1000.0
LARGEST = 1e150
"""Magnitude up to which values are drawn; larger ones are marked as not finite."""
COLOURS = 8


@dataclass(slots=True)
class Series:
    """One curve. None leaves a gap; a value that is not finite is marked at the top edge."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    errors: Sequence[tuple[float, Value, Value]] = ()
    """A band around the curve: (x, low, high)."""
    key: str = ""
    """Key of the legend's switch; the name if empty."""
    dash: str = ""
    """Line style: "" for actual values, dash or dot for expected or inferred ones, thin for background lines."""
    stairs: bool = False
    """Whether values hold until the next one instead of being interpolated."""
    shown: bool = True


@dataclass(slots=True)
class Chart:
    """A chart of one or more curves."""

    title: str
    series: list[Series]
    says: str = ""
    """One sentence of explanation below the title."""
    unit: str = "number"
    """number, percent, points (hundredths, signed), count or seconds. The page's script formats values the same way."""
    x_name: str = "epoch"
    x_range: tuple[float, float] | None = None
    zero: bool = False
    """Whether the y axis must include zero."""
    height: int = 220
    legend: bool = False
    """Whether the chart has its own legend. Charts that share one leave it to their section."""
    marks: list[tuple[float, str]] = field(default_factory=list)
    """Horizontal lines: (y, label)."""


# -- downsampling


def downsample(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most `most` points with the same appearance: each bucket's minimum and maximum, in order.

    The first and the last point are kept. A bucket without measured values stays a gap; one with values that are not
    finite keeps one of them.
    """
    if len(points) <= most:
        return list(points)
    buckets = max(1, (most - 2) // 3)
    inner = points[1:-1]
    chosen = [points[0]]
    for b in range(buckets):
        bucket = inner[b * len(inner) // buckets : (b + 1) * len(inner) // buckets]
        chosen += _extremes(bucket)
    return [*chosen, points[-1]]


def _extremes(bucket: Sequence[Point]) -> list[Point]:
    """Return, in order, the minimum, the maximum and the first value that is not finite; or one gap."""
    low = high = odd = -1
    for i, (_, y) in enumerate(bucket):
        if y is None:
            continue
        if not math.isfinite(y):
            odd = i if odd < 0 else odd
            continue
        if low < 0 or y < bucket[low][1]:  # type: ignore[operator]  # both are finite here
            low = i
        if high < 0 or y > bucket[high][1]:  # type: ignore[operator]
            high = i
    chosen = sorted({i for i in (low, high, odd) if i >= 0})
    return [bucket[i] for i in chosen] or ([(bucket[0][0], None)] if bucket else [])


# -- number formats


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


def spoken(value: Value, unit: str = "number", digits: int | None = None) -> str:
    """Format a value as text: "not measured" for None, a name for values that are not finite."""
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


def tick_labels(values: Sequence[float], unit: str) -> list[str]:
    """Return tick labels with as few digits as distinguish neighbours."""
    if unit in ("count", "seconds"):
        return [compact(v) if unit == "count" else spoken(v, unit) for v in values]
    scale = 100.0 if unit in ("percent", "points") else 1.0
    gap = min((b - a for a, b in pairwise(values)), default=1.0) * scale
    digits = 0
    while digits < 6 and abs(gap * 10**digits - round(gap * 10**digits)) > 1e-6:
        digits += 1
    sign = "+" if unit == "points" else ""
    tail = " %" if unit == "percent" else ""
    return [f"{v * scale:{sign if v else ''}.{digits}f}{tail}".replace("-", "−") for v in values]


def _bounded(y: Value) -> Value:
    """Return the value, or an infinity if differences or percentages of it could overflow."""
    return y if y is None or not abs(y) > LARGEST else math.copysign(math.inf, y)


def compact(value: float) -> str:
    """Format a number with three digits and k, M or G."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−")


# -- rendering


def render(chart: Chart) -> str:
    """Return the chart as a `<figure>`. Without values it contains "Not measured."."""
    for each in chart.series:
        each.points = [(x, _bounded(y)) for x, y in downsample(each.points)]
        each.errors = [(x, _bounded(low), _bounded(high)) for x, low, high in thinned(each.errors)]
    finite = [y for s in chart.series for y in _heights(s) if y is not None and math.isfinite(y)]
    head = f"<h3>{escape(chart.title)}</h3>" + (f'<p class="says">{escape(chart.says)}</p>' if chart.says else "")
    if chart.legend:
        head += legend([(s.key or s.name, s.name, s.colour, s.shown) for s in chart.series])
    odd = sum(y is not None and not math.isfinite(y) for s in chart.series for _, y in s.points)
    if not finite and not odd:
        return f'<figure class="chart"><figcaption>{head}</figcaption><p class="none">Not measured.</p></figure>'
    x0, x1 = chart.x_range or _x_range(chart.series)
    x1 = max(x1, math.nextafter(x0, math.inf))  # equal for numbers too large to differ by one
    finite += [y for y, _ in chart.marks] + ([0.0] if chart.zero else [])
    y0, y1 = _y_range(finite or [0.0, 1.0])

    def px(x: float) -> str:
        return _short(BOX * (x - x0) / (x1 - x0))

    def py(y: float) -> str:
        return _short(BOX * (y1 - y) / (y1 - y0))

    ys, xs = ticks(y0, y1, 5 if chart.height > 150 else 4), whole_ticks(x0, x1)
    parts = [f'<path class="grid{" axis" if y == 0 else ""}" d="M0 {py(y)}H{BOX:g}"/>' for y in ys]
    parts += [f'<path class="mark" d="M0 {py(y)}H{BOX:g}"/>' for y, _ in chart.marks]
    for s in chart.series:
        parts.append(_drawn(s, px, py))
    described = (
        f"{len(chart.series)} curve{'s' * (len(chart.series) != 1)} over {chart.x_name} {x0:g} to {x1:g}: "
        + ", ".join(f"{s.name} ends at {spoken(_last(s), chart.unit)}" for s in chart.series[:12])
    )
    y_labels = "".join(
        f'<span style="top:{float(py(y)) / 10:.2f}%">{label}</span>'
        for y, label in zip(ys, tick_labels(ys, chart.unit), strict=True)
    )
    mark_labels = "".join(
        f'<span class="marked" style="top:{float(py(y)) / 10:.2f}%">{escape(t)}</span>' for y, t in chart.marks
    )
    return (
        f'<figure class="chart{" scope" if chart.legend else ""}"><figcaption>{head}</figcaption>'
        f'<div class="plot" style="--h:{chart.height}px">'
        f'<div class="ys" aria-hidden="true">{y_labels}</div>'
        f'<div class="area" tabindex="0" role="group" aria-label="{escape(chart.title)}: '
        f'values under the pointer or the arrow keys">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img"><title>{escape(chart.title)}</title>'
        f"<desc>{escape(described)}</desc>{''.join(parts)}</svg>{mark_labels}<i class='cross'></i></div>"
        f'<div class="xs" aria-hidden="true">{x_labels(xs, x0, x1)}<em>{escape(chart.x_name)}</em></div></div>'
        f"{data_script(_numbers(chart, x0, x1))}</figure>"
    )


def legend(items: Sequence[tuple[str, str, int, bool]], note: str = "") -> str:
    """Return buttons that switch curves: (key, text, colour, shown)."""
    buttons = "".join(
        f'<button type="button" aria-pressed="{str(shown).lower()}" data-key="{escape(key)}">'
        f'<i class="c{colour % COLOURS}"></i><span>{escape(text)}</span></button>'
        for key, text, colour, shown in items
    )
    return f'<div class="legend">{buttons}{f"<small>{escape(note)}</small>" if note else ""}</div>'


def _drawn(s: Series, px: Any, py: Any) -> str:
    off = "" if s.shown else " off"
    group = [f'<g class="c{s.colour % COLOURS} {s.dash}{off}" data-key="{escape(s.key or s.name)}">']
    for run in _runs([(x, None if lo is None or hi is None else (lo, hi)) for x, lo, hi in s.errors]):
        if len(run) > 1:
            there = "L".join(f"{px(x)} {py(hi)}" for x, (_, hi) in run)
            back = "L".join(f"{px(x)} {py(lo)}" for x, (lo, _) in reversed(run))
            group.append(f'<path class="band" d="M{there}L{back}Z"/>')
        else:
            (x, (lo, hi)), *_ = run
            group.append(f'<path class="whisker" d="M{px(x)} {py(lo)}V{py(hi)}"/>')
    line, alone = [], []
    for run in _runs([(x, y if y is not None and math.isfinite(y) else None) for x, y in s.points]):
        if len(run) == 1 and not s.stairs:
            alone.append(f"M{px(run[0][0])} {py(run[0][1])}h0")
        elif s.stairs:
            line.append(f"M{px(run[0][0])} {py(run[0][1])}" + "".join(f"H{px(x)}V{py(y)}" for x, y in run[1:]))
        else:
            line.append("M" + "L".join(f"{px(x)} {py(y)}" for x, y in run))
    if line:
        group.append(f'<path class="line" d="{"".join(line)}"/>')
    if alone:
        group.append(f'<path class="alone" d="{"".join(alone)}"/>')
    odd = [x for x, y in s.points if y is not None and not math.isfinite(y)]
    if odd:
        group.append(f'<path class="odd" d="{"".join(f"M{px(x)} 0V60" for x in odd)}"/>')
    return "".join(group) + "</g>"


def _runs(points: Iterable[tuple[float, Any]]) -> list[list[tuple[float, Any]]]:
    """Return the stretches without gaps."""
    runs: list[list[tuple[float, Any]]] = [[]]
    for x, y in points:
        if y is None:
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]


def thinned(errors: Sequence[tuple[float, Value, Value]]) -> list[tuple[float, Value, Value]]:
    """Return a band of fewer points that still covers all of it."""
    if len(errors) <= MOST_POINTS // 2:
        return list(errors)
    buckets, thin = MOST_POINTS // 2, []
    for b in range(buckets):
        part = errors[b * len(errors) // buckets : (b + 1) * len(errors) // buckets]
        lows = [lo for _, lo, _ in part if lo is not None and math.isfinite(lo)]
        highs = [hi for _, _, hi in part if hi is not None and math.isfinite(hi)]
        thin.append((part[len(part) // 2][0], min(lows, default=None), max(highs, default=None)))
    return thin


def _numbers(chart: Chart, x0: float, x1: float) -> dict[str, Any]:
    """Return the data for the values under the pointer."""
    series = []
    for s in chart.series:
        spread = {x: (hi - lo) / 2 for x, lo, hi in s.errors if lo is not None and hi is not None}
        row: dict[str, Any] = {
            "name": printable(s.name, None, keep="\n"),
            "key": printable(s.key or s.name, None, keep="\n"),  # as in `data-key`
            "c": s.colour % COLOURS,
            "x": [_round(x) for x, _ in s.points],
            "y": [_round(y) for _, y in s.points],
        }
        if s.stairs:
            row["stairs"] = 1
        if spread and len(s.points) <= MOST_POINTS // 2:
            row["e"] = [_round(spread.get(x)) for x, _ in s.points]
        series.append(row)
    return {"unit": chart.unit, "x": chart.x_name, "x0": x0, "x1": x1, "series": series}


def data_script(data: Any) -> str:
    """Return JSON in a script element. `<` is always escaped, so no name can close the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json">{text}</script>'


def x_labels(xs: Sequence[float], x0: float, x1: float) -> str:
    """Return the labels of the x axis. The first and the last stay within the plot."""
    return "".join(
        f'<span{" class=end" if x == x1 else ""} style="left:{100 * (x - x0) / (x1 - x0):.2f}%">{compact(x)}</span>'
        for x in xs
    )


def whole_ticks(x0: float, x1: float) -> list[float]:
    """Return integer ticks."""
    return [x for x in ticks(x0, x1, 6) if x == int(x)]


def _heights(s: Series) -> Iterable[Value]:
    yield from (y for _, y in s.points)
    for _, lo, hi in s.errors:
        yield from (lo, hi)


def _last(s: Series) -> Value:
    return next((y for _, y in reversed(s.points) if y is not None), None)


def _x_range(series: Sequence[Series]) -> tuple[float, float]:
    xs = [x for s in series for x, _ in s.points]
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    return (low, high) if high > low else (low - 1.0, low + 1.0)


def _y_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (low if low == 0 else low - room), high + room


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _round(value: Value) -> Any:
    """Round to five digits, enough for a tooltip. JSON has no NaN: return its name instead."""
    if value is None:
        return None
    if not math.isfinite(value):
        return "NaN" if value != value else "∞" if value > 0 else "−∞"
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.5g}")
