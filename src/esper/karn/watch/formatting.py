"""Number formats of the screen: – for values not measured, NaN for NaN, and 0 only for a measured 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from esper.karn.watch.states import Number
from esper.leyline.actions import Op
from esper.leyline.stages import SeedStage

NONE = "–"
BLOCKS = "▁▂▃▄▅▆▇█"
PARTS = " ▏▎▍▌▋▊▉█"
LETTERS = {
    SeedStage.DORMANT: "·",
    SeedStage.GERMINATED: "G",
    SeedStage.TRAINING: "T",
    SeedStage.BLENDING: "B",
    SeedStage.HOLDING: "H",
    SeedStage.FOSSILIZED: "F",
    SeedStage.PRUNED: "x",
    SeedStage.EMBARGOED: "x",
    SeedStage.RESETTING: "x",
}
TONES = {"·": "dim", "G": "note", "T": "note", "B": "warn", "H": "accent", "F": "good", "x": "bad"}
"""The colour of each letter in all tables."""
OP_WORDS = {Op.SET_ALPHA_TARGET.name: "SET ALPHA"}
OP_TONES = {"GERMINATE": "note", "SET_ALPHA_TARGET": "warn", "PRUNE": "bad", "FOSSILIZE": "good", "ADVANCE": "accent"}


def _formatted(value: Number, show: Callable[[float], str]) -> str:
    if value is None:
        return NONE
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return show(value)


def short(value: Number, digits: int = 3) -> str:
    """Format a number in few characters: 0.432, 12.3, 1.2e-05."""

    def show(v: float) -> str:
        size = abs(v)
        if v != 0 and (size < 0.001 or size >= 1e6):
            return f"{v:.1e}"
        return f"{v:.{max(0, digits - (0 if size < 1 else len(str(int(size)))))}f}"

    return _formatted(value, show)


def count(value: Number) -> str:
    """Format a count in at most five characters: 950, 12.3k, 4.56M."""

    def show(v: float) -> str:
        for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(v) >= size:
                return f"{v / size:.{2 if abs(v) < 10 * size else 1 if abs(v) < 100 * size else 0}f}{unit}"
        return f"{v:.0f}"

    return _formatted(value, show)


def quality(value: Number, is_percent: bool) -> str:
    """Format a quality, in percent if qualities are fractions, else in the task's own unit."""
    return _formatted(value, lambda v: f"{100 * v:.1f}") if is_percent else short(value)


def points(value: Number, se: Number, is_percent: bool) -> str:
    """Format a difference of qualities with its standard error: +1.2 ± 0.4."""
    scale = 100.0 if is_percent else 1.0

    def signed(v: float) -> str:
        return f"{scale * v:+.1f}" if is_percent else f"{v:+.3g}"

    if value is None:
        return NONE
    error = "" if se is None else " ± " + _formatted(se, lambda v: f"{scale * v:.1f}" if is_percent else f"{v:.2g}")
    return _formatted(value, signed) + error


def duration(seconds: Number) -> str:
    """Format a duration: 0:41, 12:05, 3:02:10, 2d 04h."""

    def show(v: float) -> str:
        s = max(0, int(v))
        if s >= 86_400:
            return f"{s // 86_400}d {s % 86_400 // 3600:02d}h"
        clock = f"{s % 3600 // 60:02d}:{s % 60:02d}"
        return f"{s // 3600}:{clock}" if s >= 3600 else f"{s // 60}:{s % 60:02d}"

    return _formatted(seconds, show)


def sparkline(values: Sequence[Number], width: int) -> str:
    """Draw a series in `width` characters, oldest left; "!" where it is not finite.

    A long series is cut into `width` parts, each shown by its last value, so the right end is the latest value.
    """
    if width <= 0:
        return ""
    n = len(values)
    picked = list(values) if n <= width else [values[(i + 1) * n // width - 1] for i in range(width)]
    finite = [v for v in picked if v is not None and math.isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high - low

    def mark(v: Number) -> str:
        if v is None:
            return " "
        if not math.isfinite(v):
            return "!"
        return BLOCKS[3] if span <= 0 else BLOCKS[min(7, int(8 * (v - low) / span))]

    return "".join(map(mark, picked)).ljust(width)


def bar(share: Number, width: int) -> str:
    """Draw a value in 0…1 as a bar with a resolution of an eighth of a character."""
    if share is None or not math.isfinite(share):
        return " " * width
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (PARTS[part] if part else "")).ljust(width)


def letter(stage: int) -> str:
    """Return the letter of a stage."""
    return LETTERS[SeedStage(stage)] if stage in SeedStage._value2member_map_ else "?"


def letters(stages: Sequence[int], width: int) -> str:
    """Return one letter per slot; if that does not fit, counts without the empty slots: T3 B2 F4."""
    marks = "".join(map(letter, stages))
    if len(marks) <= width:
        return marks
    counts = [f"{mark}{marks.count(mark)}" for mark in "GTBHFx?" if mark in marks]
    for sep in (" ", ""):
        if len(sep.join(counts)) <= width:
            return sep.join(counts) or "·"
    fits = [c for i, c in enumerate(counts) if len("".join(counts[: i + 1])) < width]
    return "".join(fits) + "…"


def op_word(op: str) -> str:
    """Return the displayed name of an op."""
    return OP_WORDS.get(op, op)


def op_tone(op: str) -> str:
    """Return the tone of an op."""
    return OP_TONES.get(op, "dim")


def stage_word(stage: int) -> str:
    """Return the displayed name of a stage."""
    return SeedStage(stage).name if stage in SeedStage._value2member_map_ else f"stage {stage}"
