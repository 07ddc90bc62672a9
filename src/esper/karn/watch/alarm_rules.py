"""State, pace and alarms of a run, derived from a `WatchModel`. `now` is the reader's clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

from esper.karn.problems import missed_by_sinks
from esper.karn.watch.formatting import NONE, duration, short
from esper.karn.watch.model import WatchModel
from esper.karn.watch.states import EnvState, number, numbers, text, whole

LIVE_S, SLOW_S = 5.0, 15.0
"""Seconds without events up to which a run is LIVE, or SLOW. Runs with longer regular gaps have larger limits."""
RATE_WINDOW_S, ETA_WINDOW_S = 30.0, 300.0
"""Seconds over which the shown rates and the remaining time are averaged, at least."""
RECENT_S = 60.0
"""Seconds for which an alarm of the governor counts as recent."""
KL_LIMIT, CLIP_LIMIT, ENTROPY_LIMIT = 0.03, 0.3, 0.1
"""A PPO update with a larger KL or clip fraction, or a smaller relative entropy (0…1), raises an alarm."""
FLAT_STEPS = 10
"""Steps without a new best after which an environment is called flat."""
WORSE = 0.01
"""Distance below its best at which an environment is called worse; relative to the best where that is larger."""
LOSS_WORDS = ("lost", "dropped", "unencodable")
"""Counters whose names contain these words count lost events."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm: its tone and text."""

    tone: str  # bad, warn or note
    text: str


@dataclass(frozen=True, slots=True)
class Pace:
    """Times and rates of the header; None if unknown."""

    elapsed_s: float | None
    steps_per_s: float | None
    events_per_s: float | None
    eta_s: float | None
    is_mean: bool  # whether rates are means over the whole run, which has ended


def silence_s(model: WatchModel, now: float) -> float:
    """Return the seconds since the last event was new."""
    return 0.0 if model.fresh_at is None else max(0.0, now - model.fresh_at)


def state(model: WatchModel, now: float) -> tuple[str, str]:
    """Return the state in one word and its tone. The `run_finished` event takes precedence over the manifest.

    A run without an owner is killed, unless events are arriving: a lock may not be visible on another machine.
    """
    ended = text(model.ending.get("status")) if model.ending is not None else model.status
    quiet = silence_s(model, now)
    if model.events == 0 and ended not in ("finished", "failed", "interrupted", "killed"):
        return "WAITING", "note"
    if ended in ("finished", "failed", "interrupted"):
        return ended.upper(), {"finished": "good", "failed": "bad", "interrupted": "warn"}[ended]
    if ended == "killed" and (model.arrived_at is None or now - model.arrived_at > LIVE_S):
        return "KILLED", "bad"
    if quiet <= max(LIVE_S, 2 * model.usual_pause_s):
        return "LIVE", "good"
    if quiet <= max(SLOW_S, 4 * model.usual_pause_s):
        return "SLOW", "warn"
    return "STALE", "bad"


def is_over(word: str) -> bool:
    """Return whether the state means that the run has ended."""
    return word in ("FINISHED", "FAILED", "INTERRUPTED", "KILLED")


def pace(model: WatchModel, now: float) -> Pace:
    """Return times and rates of the run."""
    if model.first_s is None or model.last_s is None:
        return Pace(None, None, None, None, False)
    over = is_over(state(model, now)[0])
    end = model.last_s + (0.0 if over else silence_s(model, now))
    elapsed = end - model.first_s - model.paused_s
    if over:
        if elapsed <= 0:
            return Pace(elapsed, None, None, None, True)
        return Pace(elapsed, model.env_steps / elapsed, model.events / elapsed, None, True)
    rates = model.rate(max(RATE_WINDOW_S, 4 * model.usual_pause_s), end)
    steady = model.rate(max(ETA_WINDOW_S, 4 * model.usual_pause_s), end)
    eta = None
    if steady is not None and steady[0] > 0 and model.done is not None and model.steps is not None:
        eta = (1.0 - model.done) * model.rounds * model.steps * len(model.envs) / steady[0]
    steps_per_s, events_per_s = rates or (None, None)
    return Pace(elapsed, steps_per_s, events_per_s, eta, False)


def env_state(env: EnvState) -> tuple[str, str]:
    """Return the state of an environment in one word, as used by the filter, and its tone."""
    if env.broken:
        return "broken", "bad"
    if env.episode is None:
        return "waiting", "dim"
    if env.has_ended:
        return "ended", "dim"
    if env.governed_step is not None and env.step - env.governed_step <= FLAT_STEPS:
        return "rolled", "warn"
    if env.quality is None or env.best is None:
        return "running", "plain"
    if env.quality < env.best - max(WORSE, WORSE * abs(env.best)):
        return "worse", "warn"
    return ("flat", "plain") if env.step - env.best_step > FLAT_STEPS else ("rising", "good")


def alarms(model: WatchModel, now: float) -> list[Alarm]:
    """Return the alarms, worst first; empty if there are none. Notes are past or harmless."""
    problems = [*_run(model, now), *_envs(model), *_governor(model, now), *_machinery(model), *_ppo(model)]
    return sorted(problems, key=lambda a: ("bad", "warn", "note").index(a.tone))


def _run(model: WatchModel, now: float) -> list[Alarm]:
    word = state(model, now)[0]
    if word == "FAILED":
        error = text((model.ending or {}).get("error")) or "no error was recorded"
        return [Alarm("bad", f"failed: {' '.join(error.split())}")]
    if word == "KILLED":
        return [Alarm("bad", "killed: no process owns this run and it has no end")]
    if word == "INTERRUPTED":
        return [Alarm("warn", "interrupted before its end")]
    if word in ("SLOW", "STALE"):
        usual = f", pauses of {model.usual_pause_s:.0f} s are usual" if model.usual_pause_s >= 1 else ""
        return [Alarm("bad" if word == "STALE" else "warn", f"silent for {duration(silence_s(model, now))}{usual}")]
    return []


def _envs(model: WatchModel) -> list[Alarm]:
    broken = [e for e in model.envs.values() if e.broken]
    if not broken:
        return []
    more = f" and in {len(broken) - 1} more" if len(broken) > 1 else ""
    return [Alarm("bad", f"{' and '.join(broken[0].broken)} not finite in {broken[0].name}{more}")]


def _governor(model: WatchModel, now: float) -> list[Alarm]:
    if model.last_alarm is None or model.last_s is None:
        return []
    total = sum(model.governor.values())
    d = model.last_alarm.data
    env = model.envs.get(whole(d.get("env")))
    message = (
        f"governor: {total} alarm{'s' * (total != 1)}, last {text(d.get('alarm')) or NONE} "
        f"({text(d.get('action')) or NONE}) in {env.name if env else NONE} at step {whole(d.get('step'))}"
    )
    age = model.last_s + silence_s(model, now) - model.last_alarm.time_s
    recent = age <= RECENT_S and not is_over(state(model, now)[0])
    return [Alarm("warn" if recent else "note", message)]


def _machinery(model: WatchModel) -> list[Alarm]:
    missed = missed_by_sinks(model.counters)
    problems = [Alarm("bad", f"sink {name} missed {count:g} events") for name, count in missed.items()]
    problems += [
        Alarm("bad" if e.data.get("severity") == "error" else "warn", f"{text(e.data.get('source'))}: {message}")
        for message, e in model.troubles.items()
        if not (missed and "emitted" in numbers(e.data.get("counters")))  # the hub's last event: already listed above
    ]
    if model.manifest_damage:
        problems.append(Alarm("warn", "the manifest is damaged; this is what the journal tells"))
    lost = {k: v for k, v in model.counters.items() if v and any(w in k for w in LOSS_WORDS)}
    if lost:
        problems.append(Alarm("bad", "events lost: " + ", ".join(f"{k} {v:g}" for k, v in lost.items())))
    if model.damage:
        problems.append(Alarm("warn", f"{model.damage} unreadable line{'s' * (model.damage != 1)} in the journal"))
    return problems + [Alarm("bad", f"the journal is incomplete: {text}") for text in model.losses]


def _ppo(model: WatchModel) -> list[Alarm]:
    u = model.update
    if u is None:
        return []
    problems = []
    named = {"policy loss": u.get("policy_loss"), "value loss": u.get("value_loss"), "gradient": u.get("grad_norm")}
    odd = [name for name, v in named.items() if (n := number(v)) is not None and not math.isfinite(n)]
    if odd:
        problems.append(Alarm("bad", f"PPO {' and '.join(odd)} not finite"))
    if whole(u.get("skipped")):
        problems.append(Alarm("warn", f"PPO skipped {whole(u['skipped'])} minibatches that were not finite"))
    kl, clip = number(u.get("kl")), number(u.get("clip_fraction"))
    if kl is not None and not kl <= KL_LIMIT:
        problems.append(Alarm("warn", f"PPO KL {short(kl)} above {KL_LIMIT}"))
    if clip is not None and not clip <= CLIP_LIMIT:
        problems.append(Alarm("warn", f"PPO clips {clip:.0%} of ratios"))
    if flat := collapsed(model):
        problems.append(Alarm("warn", "entropy collapsed: " + ", ".join(f"{h} {e:.2f}" for h, e in flat.items())))
    return problems


def collapsed(model: WatchModel) -> dict[str, float]:
    """Return heads whose entropy has collapsed although they had a choice. Heads without free steps are excluded."""
    u = model.update or {}
    learnable = numbers(u.get("learnable"))
    return {
        head: value
        for head, value in numbers(u.get("entropy")).items()
        if value is not None and value < ENTROPY_LIMIT and (learnable.get(head) or 0.0) > 0.0
    }
