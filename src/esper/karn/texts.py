"""Numbers, events and problems of a run as short texts, the same in every view. The most important words come first."""

from __future__ import annotations

import sys
from math import isfinite
from typing import Any

from esper.karn.run_state import RunState
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
from esper.leyline.text import printable

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


MOST_ROLLBACKS = 20
GIVEN_UP = ".given_up"
"""End of the name of a counter: events that a sink did not receive because it was retired. The journal has them."""
KL_LIMIT = 0.03
"""A PPO update with a larger KL is a problem."""
CLIP_LIMIT = 0.3
"""A PPO update with a larger clip fraction is a problem."""
ENTROPY_LIMIT = 0.1
"""A PPO update with a smaller relative entropy (0…1) of a head is a problem."""


def problems(run: RunState) -> list[tuple[str, str]]:
    """Return the problems of a run as (severity, text), errors first."""
    messages = [*_of_the_end(run), *_of_the_journal(run), *_of_the_numbers(run), *_of_the_governor(run), *_of_ppo(run)]
    return sorted(((severity, printable(text)) for severity, text in messages), key=lambda each: each[0] != "error")


def _of_the_end(run: RunState) -> list[tuple[str, str]]:
    error = run.manifest.get("error") or (run.finished.error if run.finished is not None else None)
    if run.status == "failed":
        return [("error", f"The run failed: {error or 'no reason recorded'}")]
    if run.status == "killed":
        return [("error", "The run was killed. The events that it wrote are shown.")]
    return [("warning", "The run was interrupted before its end.")] if run.status == "interrupted" else []


def _of_the_journal(run: RunState) -> list[tuple[str, str]]:
    messages = [("error", f"The journal is incomplete: {text}.") for text in run.losses]
    if run.manifest_damage:
        messages.append(("warning", f"{run.manifest_damage}. What is shown comes from the journal."))
    if damaged := run.damage.lines + run.unreadable:
        messages.append(("warning", f"{damaged} lines of the journal could not be read."))
    if run.damage.torn and run.status not in ("running", "killed"):
        messages.append(("warning", "The journal ends within a line."))
    return messages + [(h.severity, f"{h.source}: {health_text(h)}") for h in run.health.values()]


def _of_the_numbers(run: RunState) -> list[tuple[str, str]]:
    """Return one text if the newest quality or loss of some environment is not a finite number."""
    names = [e.name for e in run.latest if not e.is_finite]
    more = f" and in {len(names) - 1} more" if len(names) > 1 else ""
    return [("error", f"Quality or loss is not finite in {names[0]}{more}.")] if names else []


def _of_the_governor(run: RunState) -> list[tuple[str, str]]:
    messages = []
    rolled_back = sum(count for (_, action), count in run.alarms.items() if action == "rolled back")
    for g in list(run.rollbacks)[:MOST_ROLLBACKS]:
        limit = f", limit {number_text(g.limit)}" if g.limit is not None else ""
        back = f", back to epoch {g.restored_step}" if g.restored_step is not None else ""
        name = run.envs[g.env].name if g.env in run.envs else f"env {g.env}"
        reason = f"{g.alarm} ({number_text(g.value)}{limit})"
        messages.append(("warning", f"Governor, {name}, epoch {g.step}: {reason} → {g.action}{back}"))
    if rolled_back > MOST_ROLLBACKS:
        messages.append(("warning", f"Governor: {rolled_back - MOST_ROLLBACKS} more rollbacks"))
    others = [(alarm, n) for (alarm, action), n in run.alarms.most_common() if action != "rolled back"]
    if others:
        each = ", ".join(f"{alarm} {n} times" if n > 1 else alarm for alarm, n in others[:5])
        total = sum(n for _, n in others)
        messages.append(("warning", f"Governor: {total} alarms that needed no rollback ({each})"))
    return messages


def _of_ppo(run: RunState) -> list[tuple[str, str]]:
    u = run.newest_update
    if u is None:
        return []
    messages = []
    losses = {"policy loss": u.policy_loss, "value loss": u.value_loss, "gradient": u.grad_norm}
    if non_finite := [name for name, value in losses.items() if value is not None and not isfinite(value)]:
        messages.append(("error", f"PPO, round {u.round}: {' and '.join(non_finite)} not finite"))
    if u.skipped:
        messages.append(("warning", f"PPO, round {u.round}: {u.skipped} minibatches skipped that were not finite"))
    if u.kl is not None and u.kl > KL_LIMIT:
        messages.append(("warning", f"PPO, round {u.round}: KL {number_text(u.kl)} is above {KL_LIMIT}"))
    if u.clip_fraction is not None and u.clip_fraction > CLIP_LIMIT:
        messages.append(("warning", f"PPO, round {u.round}: {u.clip_fraction:.0%} of ratios were clipped"))
    collapsed = [
        f"{head} {value:.2f}"
        for head, value in u.entropy.items()
        if value is not None and value < ENTROPY_LIMIT and (u.learnable.get(head) or 0.0) > 0.0
    ]
    if collapsed:
        messages.append(("warning", f"PPO, round {u.round}: entropy collapsed ({', '.join(collapsed)})"))
    return messages


def health_text(health: Health) -> str:
    """Return the text of a `health` event. For the hub's last one, list the events that each sink missed."""
    emitted = health.counters.get("emitted")
    missed = [
        f"sink {name.removesuffix(GIVEN_UP)} missed {count:,.0f}"
        for name, count in health.counters.items()
        if name.endswith(GIVEN_UP) and isinstance(count, int | float) and isfinite(count) and count > 0
    ]
    return f"of {emitted:,.0f} events {'; '.join(missed)}" if missed and emitted is not None else health.text
