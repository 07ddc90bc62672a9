"""Events as short texts, most important words first."""

from __future__ import annotations

from typing import Any

from esper.karn.number_text import compact, number_text
from esper.karn.problems import health_text
from esper.leyline.events import (
    Checkpoint,
    Decision,
    Episode,
    Event,
    Governor,
    Health,
    Lifecycle,
    RunFinished,
    RunStarted,
    Update,
)

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
        case Governor():
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


def _governor(d: Governor) -> str:
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
