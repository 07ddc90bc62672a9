"""Format numbers and events of a run as short texts, the same in every view. The most important words come first."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import isfinite
from typing import Any

from esper.leyline.events import (
    Checkpoint,
    Decision,
    Episode,
    Event,
    GovernorAlarm,
    Health,
    Lifecycle,
    RunFinished,
    RunStarted,
    Update,
)

LARGEST = sys.float_info.max
BLOCKS = "▁▂▃▄▅▆▇█"


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


HEADS = ("blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")


def event_text(d: Event, is_percent: bool) -> tuple[str, str]:
    """Return the text of an event and its tone: good, bad, warn, or "" for a neutral one."""
    unit, points = ("percent", "points") if is_percent else ("number", "number")
    match d:
        case Lifecycle():
            return _lifecycle(d, points), {"FOSSILIZED": "good", "PRUNED": "warn"}.get(d.now, "")
        case Decision():
            text = f"{d.op} {d.slot} {' '.join(decision_options(d))}".rstrip()
            return (text, "") if d.happened else (f"{text}: not legal, nothing happened", "warn")
        case Episode():
            text = f"episode ended: quality {number_text(d.quality, unit)}, best {number_text(d.quality_best, unit)}"
            if d.quality is not None and d.baseline_quality is not None:
                text += f", {number_text(d.quality - d.baseline_quality, points)} over the host without growth"
            return f"{text}, {d.fossilized} fossilised, {d.pruned} pruned", ""
        case GovernorAlarm():
            return _governor(d), "bad"
        case RunFinished():
            error = f": {d.error}" if d.error else ""
            text = f"run {d.status} after {number_text(d.wall_s, 'seconds')}, {d.env_steps} env-steps{error}"
            return text, "good" if d.status == "finished" else "bad"
        case _:
            return _machinery(d)


def decision_options(d: Decision) -> list[str]:
    """Return the choices of a decision besides its operation and slot."""
    return [value for name in HEADS if (value := getattr(d, name))]


def _lifecycle(d: Lifecycle, points: str) -> str:
    worth = ""
    if d.contribution is not None:
        error = "" if d.contribution_se is None else f" ± {number_text(d.contribution_se, points).lstrip('+')} se"
        worth = f", worth {number_text(d.contribution, points)}{error}"
    return f"{d.slot} {d.blueprint}: {d.was} → {d.now}{worth} ({d.cause})"


def _governor(d: GovernorAlarm) -> str:
    text = f"governor: {d.alarm}, {d.action}"
    if d.value is not None:
        text += f", {number_text(d.value)}"
        text += f" against a limit of {number_text(d.limit)}" if d.limit is not None else ""
    return text if d.restored_step is None else f"{text}, back to step {d.restored_step}"


def _machinery(d: Event) -> tuple[str, str]:
    match d:
        case RunStarted():
            return f"run began: {d.command} {d.task}, seed {d.seed}", ""
        case Health():
            return f"{d.source}: {health_text(d)}", {"error": "bad", "warning": "warn"}.get(d.severity, "")
        case Checkpoint():
            return f"checkpoint {d.path}, {compact(d.size_bytes)}B ({d.reason})", ""
        case Update():
            mean = "" if d.return_mean is None else f", mean return {number_text(d.return_mean)}"
            text = f"PPO update of round {d.round}: KL {number_text(d.kl)}, clip {number_text(d.clip_fraction)}"
            return text + mean, ""
    return kind_of(d).replace("_", " "), ""


def kind_of(d: Any) -> str:
    """Return the kind of an event."""
    return str(type(d).__struct_config__.tag)


GIVEN_UP = ".given_up"
"""End of the name of a counter: events that a sink did not receive because it was retired. The journal has them."""


def health_text(health: Health) -> str:
    """Return the text of a `health` event. For the hub's last one, list the events that each sink missed."""
    emitted = health.counters.get("emitted")
    missed = [
        f"sink {name.removesuffix(GIVEN_UP)} missed {count:,.0f}"
        for name, count in health.counters.items()
        if name.endswith(GIVEN_UP) and isinstance(count, int | float) and isfinite(count) and count > 0
    ]
    return f"of {emitted:,.0f} events {'; '.join(missed)}" if missed and emitted is not None else health.text


def sparkline(values: Sequence[float | None], width: int, low: float | None = None, high: float | None = None) -> str:
    """Draw a series in `width` characters, oldest left, each part by its last value.

    The lowest block is at `low` and the highest at `high`; None takes the lowest or highest value of the series.
    """
    n = len(values)
    shown = values if n <= width else [values[(i + 1) * n // width - 1] for i in range(width)]
    finite = [v for v in shown if v is not None]
    low = min(finite, default=0.0) if low is None else low
    span = ((max(finite, default=0.0) if high is None else high) - low) or 1.0
    return "".join(
        " " if v is None else BLOCKS[max(0, min(len(BLOCKS) - 1, int(len(BLOCKS) * (v - low) / span)))] for v in shown
    ).ljust(width)
