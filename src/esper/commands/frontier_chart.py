"""Chart of a study's frontiers as SVG: quality against training multiply-adds, one line per arm.

One file serves light and dark pages: its colours follow `prefers-color-scheme`. The name of an arm is at the end of
its line. The x axis is logarithmic, in units of one full training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from esper.commands.charts import tick_labels, ticks
from esper.leyline.text import escape
from esper.studies.rendering import METRICS
from esper.studies.statistics import Summary

# the edges of the plot area in pixels
LEFT = 64
TOP = 44
RIGHT = 584
BOTTOM = 344
COLOURS = 8
"""Number of colours of curves."""
NAME_HEIGHT = 15
"""Least vertical distance of two names, in pixels."""
STYLE = """
svg { --page: #ffffff; --ink: #17202a; --soft: #566270; --grid: #e2e6eb; --c0: #0072b2; --c1: #d55e00; --c2: #00845f;
  --c3: #b8588f; --c4: #b07d00; --c5: #3a9bd6; --c6: #6a58b8; --c7: #6d747c; }
@media (prefers-color-scheme: dark) { svg { --page: #191f27; --ink: #e7ecf1; --soft: #9aa7b4; --grid: #2b333d;
  --c0: #56aee6; --c1: #ff8b4a; --c2: #3fc79b; --c3: #e594c4; --c4: #e9b949; --c5: #92d2f7; --c6: #ab9df0;
  --c7: #a9b1ba; } }
.page { fill: var(--page); } text { fill: var(--ink); } .soft { fill: var(--soft); } .grid { stroke: var(--grid); }
.line { fill: none; stroke: currentColor; stroke-width: 2; } .dashed { stroke-dasharray: 6 4; }
.band { fill: currentColor; fill-opacity: 0.15; } .name { fill: currentColor; }
.leader { stroke: currentColor; stroke-opacity: 0.4; }
"""
Scale = Callable[[float], float]
Curve = list[tuple[float, float, float, float]]
"""Points of one line: x, mean, low, high. Of an arm, x is the multiple of one full training."""


def frontier_chart(summary: Summary, task: str) -> str:
    """Return the chart of one task. Its rows must state their multiply-adds."""
    rows = [row for row in summary.rows if row.task == task and row.budget]
    curves: dict[str, Curve] = {}
    for row in rows:
        curves.setdefault(row.arm, []).append(
            (row.full_trainings or 0.0, row.value.mean, row.value.low, row.value.high)
        )
    amounts = [x for curve in curves.values() for x, *_ in curve]
    powers = [10.0**k for k in range(-9, 10) if min(amounts) <= 10.0**k <= max(amounts)]
    xs = {x: f"×{x:g}" for x in sorted({*powers, *(row.budget or 0.0 for row in rows)})}
    unit = "number" if summary.metric == "test_loss" else "percent"
    note = "training multiply-adds, × one full training; bands: 95 % intervals over worlds"
    title = f"{task}: {METRICS[summary.metric]} against training multiply-adds"
    return line_chart(title, curves, xs, unit, note, math.log2)


def line_chart(
    title: str, curves: Mapping[str, Curve], xs: Mapping[float, str], unit: str, note: str, scale: Scale = float
) -> str:
    """Return lines with bands as SVG. `xs` are labelled positions on the x axis, whose values `scale` transforms."""
    x0, x1 = (limit(scale(x) for curve in curves.values() for x, *_ in curve) for limit in (min, max))
    y0, y1 = (limit(y for curve in curves.values() for point in curve for y in point[1:]) for limit in (min, max))

    def px(x: float) -> float:
        return LEFT + (RIGHT - LEFT) * (scale(x) - x0 + 0.05) / (x1 - x0 + 0.1)

    def py(y: float) -> float:
        return TOP + (BOTTOM - TOP) * (y1 - y) / (y1 - y0 or 1.0)

    drawn = [_curve(sorted(curve), i, px, py) for i, curve in enumerate(curves.values())]
    ends = [(py(max(curve)[1]), px(max(curve)[0]), arm, i) for i, (arm, curve) in enumerate(curves.items())]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {RIGHT + 190} {BOTTOM + 56}" font-family="sans-serif" '
        f'font-size="12" role="img"><title>{escape(title)}</title><style>{STYLE}</style>'
        f'<rect class="page" width="100%" height="100%"/><text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>'
        f"{_axes(xs, ticks(y0, y1), unit, px, py)}{''.join(drawn)}"
        f'{_names(ends)}<text class="soft" x="{LEFT}" y="{BOTTOM + 40}">{escape(note)}</text></svg>\n'
    )


def _axes(xs: Mapping[float, str], ys: Sequence[float], unit: str, px: Scale, py: Scale) -> str:
    """Return the grid, with a label at every budget, power of ten and y tick."""
    parts = [
        f'<path class="grid" d="M{LEFT} {py(y):.1f}H{RIGHT}"/>'
        f'<text class="soft" x="{LEFT - 8}" y="{py(y) + 4:.1f}" text-anchor="end">{label}</text>'
        for y, label in zip(ys, tick_labels(ys, unit), strict=True)
    ]
    parts += [
        f'<path class="grid" d="M{px(x):.1f} {TOP}V{BOTTOM}"/>'
        f'<text class="soft" x="{px(x):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{escape(label)}</text>'
        for x, label in xs.items()
    ]
    return "".join(parts)


def _curve(curve: Curve, index: int, px: Scale, py: Scale) -> str:
    """Return the line of one arm and its band. Arms beyond the number of colours are dashed."""
    means, lows, highs = ([f"{px(point[0]):.1f} {py(point[k]):.1f}" for point in curve] for k in (1, 2, 3))
    return (
        f'<g style="color: var(--c{index % COLOURS})"><path class="band" d="M{"L".join([*highs, *reversed(lows)])}Z"/>'
        f'<path class="line{" dashed" if index >= COLOURS else ""}" d="M{"L".join(means)}"/></g>'
    )


def _names(ends: Sequence[tuple[float, float, str, int]]) -> str:
    """Return the names beside the ends of their lines, (y, x, name, index), moved apart where they would overlap."""
    parts = []
    at = -math.inf
    for y, x, name, index in sorted(ends):
        at = max(y, at + NAME_HEIGHT)
        parts.append(
            f'<g style="color: var(--c{index % COLOURS})">'
            f'<path class="leader" d="M{x:.1f} {y:.1f}L{RIGHT + 6} {at:.1f}"/>'
            f'<text class="name" x="{RIGHT + 10}" y="{at + 4:.1f}">{escape(name)}</text></g>'
        )
    return "".join(parts)
