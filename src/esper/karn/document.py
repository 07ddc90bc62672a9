"""The state of a run as one JSON-able document, for the page and the report.

`document(run, since=n)` has only the parts that changed after the first n events. Applying it to the document at n
gives the document at `run.position`, so a page that was disconnected continues from its last position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from esper.karn import held_out
from esper.karn.episode_state import EpisodeState, SlotHistory
from esper.karn.formatting import decision_options, event_text, kind_of
from esper.karn.problems import problems
from esper.karn.run_state import EnvState, RunState
from esper.karn.series import MOST_GROUPS, Series, grouped
from esper.leyline.run_files import DECISIONS
from esper.leyline.stages import SeedStage
from esper.leyline.text import cut, printable

MOST_MEANS = 512
"""Maximum number of steps for which a mean over environments is given. If there are more, several share a mean."""
MOST_BASELINES = 16
"""Runs with more environments train a policy: their baselines are not environments."""
DIGITS = 8
"""Significant digits of numbers in a document, as many as float32 has: a number that is rounded twice, here and for
display, could differ from that in the terminal. The journal has all of them."""
MOST_INT = 1 << 53
"""Integers from here on are not exact in JavaScript and are shown as infinite."""
DEEPEST = 20
"""Maximum depth of nested settings."""
Json = dict[str, Any]


def document(run: RunState, since: int = 0) -> Json:
    """Return the document of a run, or the parts of it that changed after the first `since` events."""
    parts: Json = {"since": since, "position": run.position, "run": facts(run)}
    if not since:
        parts |= {"settings": settings(run), "held_out": comparison(run)}
    envs = [env for _, env in sorted(run.envs.items()) if env.changed > since]
    bare = no_growth_baseline(run)
    parts["envs"] = [env_row(run, env, bare) for env in envs]
    parts["series"] = {
        env.index: series_rows(e.steps, since) | {"episode": e.number}
        for env in envs
        if (e := env.latest) is not None and len(e.steps)
    }
    if envs or not since:
        parts["mean"] = mean_series(run)
    for name, make in PARTS.items():
        if not since or run.changed[name] > since:
            parts[name] = make(run)
    parts["problems"] = [{"severity": severity, "text": text} for severity, text in problems(run)]
    parts["events"] = [event_row(run, at, row) for at, row in run.events if at > since]
    return clean(parts)


# -- the run


def facts(run: RunState) -> Json:
    """Return what identifies a run, and how far it is."""
    names = ("task", "controller", "seed", "device", "threads", "rounds", "steps", "host_params")
    return {
        **{name: run.about(name) for name in names},
        "name": run.name,
        "run_id": run.manifest.get("run_id"),
        "command": run.manifest.get("command") or run.about("command"),  # the manifest's has the options
        "status": run.status,
        "started": run.manifest.get("started"),
        "wall_s": run.wall_s,
        "is_percent": run.is_percent,
        "slots": list(run.order) or list(dict.fromkeys(name for e in run.latest for name in e.slots)),
        "envs": len(run.envs),
        "episodes": run.episodes,
        "env_steps": run.env_steps,
        "events": run.position,
        "kinds": run.kinds,
        "has_decisions": (run.path / DECISIONS).is_file(),
        "best": None if run.best is None else [run.best.env, run.best.number, run.best.quality],
    }


def settings(run: RunState) -> Json:
    """Return the configuration and everything else of the manifest."""
    shown = ("run_id", "status", "task", "command", "config")
    return {
        "Configuration": run.manifest.get("config"),
        "Versions and everything else": {k: v for k, v in run.manifest.items() if k not in shown},
    }


def comparison(run: RunState) -> Json | None:
    """Return the held-out comparison of the run's policy with other controllers; None if there is none."""
    figures, damage = held_out.read(run.path)
    if damage is not None:
        return {"damage": damage}
    return None if figures is None or not figures.rows else held_out.table(figures)


# -- environments


def env_row(run: RunState, env: EnvState, bare: EpisodeState | None) -> Json:
    """Return the newest state of an environment, with its no-growth baseline `bare`, and one cell per slot."""
    row: Json = {"env": env.index, "name": env.name, "episodes": env.episodes}
    e = env.latest
    if e is None:
        return row
    has_bare = bare is not None and bare is not e and (e.world, e.length) == (bare.world, bare.length)
    return row | {
        "episode": e.number, "world": e.world, "step": e.length, "is_over": e.result is not None,
        "quality": e.quality, "best": e.best, "test": e.recorded("test_quality"),
        "no_growth": bare.quality if bare is not None and has_bare else e.recorded("baseline_quality"),
        "is_no_growth": bare is e,
        "utility": e.steps.last("utility"), "params": e.params,
        "host_params": e.recorded("host_params") or run.about("host_params"), "train_macs": e.steps.last("train_macs"),
        "op": None if e.newest is None else e.newest.op, "wall_s": e.wall_s,
        **{stage.name.lower(): e.count(stage) for stage in COUNTED},
        "slots": [slot_cell(e, slot) for slot in e.slots.values()],
    }  # fmt: skip


def no_growth_baseline(run: RunState) -> EpisodeState | None:
    """Return the environment of `esper grow` that did not grow, if another one grew from the same host."""
    latest = run.latest if len(run.envs) <= MOST_BASELINES else []
    return next((bare for bare in latest if any(e.grew_from(bare) for e in latest)), None)


COUNTED = (SeedStage.GERMINATED, SeedStage.FOSSILIZED, SeedStage.PRUNED)


def slot_cell(e: EpisodeState, slot: SlotHistory) -> Json:
    """Return what a slot holds now, and what it is worth."""
    last = e.current(slot)
    cell: Json = {"slot": slot.name, "stage": int(last.stage) if last is not None else 0}
    worth = slot.newest_worth
    if last is not None and SeedStage.GERMINATED <= last.stage <= SeedStage.FOSSILIZED:
        cell |= {"blueprint": last.blueprint, "alpha": slot.alpha[-1][1] if slot.alpha else None}
        cell |= {"ratio": slot.gradient[0], "health": slot.gradient[1]}
        if worth is not None and worth.step >= last.start - 1:
            cell |= {"seed": worth.seed, "contribution": worth.contribution, "contribution_se": worth.contribution_se}
            cell |= {"prospect": worth.prospect, "prospect_se": worth.prospect_se, "committed": worth.committed}
    return cell


def series_rows(series: Series, since: int = 0, most: int = MOST_GROUPS) -> Json:
    """Return the columns of a series from the first group that changed after `since`, with its index `at`.

    With `most`, groups are merged until there are at most as many.
    """
    low, high = series.table()
    merged = 1 << max(0, (len(high) - 1) // most).bit_length()
    if merged > 1:
        low, high = grouped(low, merged)[0], grouped(high, merged)[1]
    at = int(np.searchsorted(high[:, -1], since, side="right")) if series.columns[-1] == "position" else 0
    rows: Json = {"at": at, "stride": series.stride * merged, "columns": columns(series.columns, high[at:])}
    if series.stride * merged > 1:
        rows["low"] = columns(series.columns, low[at:])
    return rows | ({"non_finite": points} if (points := series.non_finite()) else {})


def columns(names: Sequence[str], table: Any) -> Json:
    """Return column → its values, without columns in which nothing was measured."""
    return {
        name: rounded(table[:, i])
        for i, name in enumerate(names)
        if name != "position" and (i == 0 or not np.isnan(table[:, i]).all())
    }


def mean_series(run: RunState) -> Json | None:
    """Return mean, minimum and maximum by step over the newest episodes of all environments; None for one."""
    episodes = [e for e in run.latest if len(e.steps)]
    if len(episodes) < 2 or any(e.steps.stride > 1 for e in episodes):
        return None
    rows = np.concatenate([e.steps.table()[1] for e in episodes])
    names = episodes[0].steps.columns
    width = 1 + int(np.ptp(rows[:, 0])) // MOST_MEANS
    steps, group = np.unique(np.ceil(rows[:, 0] / width) * width, return_inverse=True)
    series: Json = {"step": rounded(steps), "episodes": len(episodes)}
    for i, name in enumerate(names[1:-1], 1):
        is_measured = ~np.isnan(rows[:, i])
        if is_measured.any():
            of = group[is_measured]
            values = rows[is_measured, i]
            count = np.bincount(of, minlength=len(steps))
            with np.errstate(invalid="ignore"):
                mean = np.bincount(of, values, minlength=len(steps)) / np.where(count, count, np.nan)
            low, high = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
            np.minimum.at(low, of, values)
            np.maximum.at(high, of, values)
            series[name] = {"mean": rounded(mean), "low": rounded(low), "high": rounded(high)}
    return series


# -- the life of seeds in one environment


def detail(run: RunState, index: int | None) -> Json | None:
    """Return stages, alpha, worth and seed lives of an environment's newest episode; None: of the run's best one."""
    if index is None:
        e = None if run.best is None else run.best.absorb()
    else:
        e = run.envs[index].latest if index in run.envs else None
    if e is None:
        return None
    return clean({
        "env": e.env, "name": e.name, "episode": e.number, "length": e.length, "position": run.position,
        "host_params": e.recorded("host_params") or run.about("host_params"),
        "slots": [
            {
                "slot": slot.name,
                "stages": [[int(i.stage), i.blueprint, i.start, i.end] for i in slot.intervals],
                "alpha": slot.alpha,
                "worth": series_rows(slot.worth) if len(slot.worth) else None,
            }
            for slot in e.slots.values()
        ],
        "seeds": [
            {
                "seed": life.seed, "slot": life.slot, "blueprint": life.blueprint, "params": life.params,
                "moves": [move(d, reason) for d, reason in life.moves],
            }
            for life in e.seeds.values()
        ],
    })  # fmt: skip


def move(d: Any, reason: Any) -> Json:
    """Return a seed's move between stages with the decision that caused it."""
    names = ("step", "was", "now", "cause", "dwell_epochs", "alpha", "contribution", "contribution_se")
    row: Json = {name: getattr(d, name) for name in names}
    if reason is not None:
        row["decision"] = {"op": reason.op, "how": " ".join(decision_options(reason)), "legal": list(reason.legal_ops),
                           "entropy": reason.entropy, "value": reason.value}  # fmt: skip
    return row


# -- tables


def rounds(run: RunState) -> Json | None:
    """Return results by the number of the episode, which is the round in training; None for one."""
    means = run.rounds
    if len(means) < 2:
        return None
    return {"round": means.keys(), "stride": means.stride, "columns": {
        name: values for name in means.columns if any(values := means.column(name))
    }}  # fmt: skip


def decisions(run: RunState) -> Json:
    """Return the counts of operations, what became of each blueprint, and the entropy of decisions."""
    return {
        "ops": dict(run.ops.most_common()),
        "illegal": run.illegal,
        "by": "round" if run.is_in_rounds else "epoch",
        "keys": run.entropies.keys(),
        "entropy": run.entropies.column("entropy"),
        "blueprints": [
            {"blueprint": name, "germinated": b.germinated, "fossilized": b.fossilized, "pruned": b.pruned,
             "worth": b.worths[1] / b.worths[0] if b.worths[0] else None}
            for name, b in sorted(run.blueprints.items(), key=lambda each: -each[1].germinated)
        ],
    }  # fmt: skip


PARTS: dict[str, Callable[[RunState], Any]] = {
    "rounds": rounds,
    "decisions": decisions,
    "updates": lambda run: series_rows(run.updates) if len(run.updates) else None,
    "phases": lambda run: [asdict(phase) for phase in run.phases],
}
"""Parts of a document that are sent only if they changed."""


def event_row(run: RunState, at: int, d: Any) -> Json:
    """Return an event of the list: its time since the start, its place and its text."""
    text, tone = event_text(d, run.is_percent)
    env = run.envs.get(getattr(d, "env", -1))
    row: Json = {"at": at, "s": d.time_s - run.first_s, "kind": kind_of(d), "text": text, "tone": tone}
    return row | {"env": env.name if env is not None else None, "step": getattr(d, "step", None)}


# -- JSON


def rounded(values: Any) -> list[float | None]:
    """Return numbers with DIGITS significant digits; None for values that are not finite."""
    return [short(v) for v in values.tolist()]


def short(value: float) -> float | None:
    """Return a number with DIGITS significant digits; None if it is not finite."""
    if not -math.inf < value < math.inf:
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.{DIGITS}g}")


def clean(value: Any, depth: int = 0) -> Any:
    """Return a value for JSON: texts without control characters, short numbers, bounded depth."""
    if isinstance(value, str):
        return printable(cut(value))
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if -MOST_INT < value < MOST_INT else "∞" if value > 0 else "−∞"
    if isinstance(value, float):
        return short(value) if math.isfinite(value) else ("NaN" if value != value else "∞" if value > 0 else "−∞")
    if depth > DEEPEST:
        return "…"
    if isinstance(value, dict):
        return {printable(cut(str(k))): clean(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v, depth + 1) for v in value]
    return printable(cut(str(value)))
