"""The problems of a run as short texts, the same in every view."""

from __future__ import annotations

from math import isfinite

from esper.karn.formatting import health_text, number_text
from esper.karn.run_state import RunState
from esper.leyline.text import printable

MOST_ROLLBACKS = 20
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
