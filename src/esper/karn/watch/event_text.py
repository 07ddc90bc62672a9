"""Events as short texts, most important words first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len

from esper.karn.problems import missed_by_sinks
from esper.karn.watch.formatting import (
    TONES,
    count,
    duration,
    letter,
    op_tone,
    op_word,
    points,
    quality,
    short,
)
from esper.karn.watch.lines import Line, Piece, fit, whole_words
from esper.karn.watch.model import WatchModel
from esper.karn.watch.states import Number, number, numbers, text, whole
from esper.leyline.stages import SeedStage
from esper.nissa.journal_reader import Entry


class EventLines:
    """Cache of event lines for one width."""

    KEPT = 512

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], Line] = {}
        self._for: tuple[object, ...] = ()

    def line(self, model: WatchModel, entry: Entry, width: int) -> Line:
        """Return the line of an event."""
        made_for = (id(model), width, model.is_percent, len(model.envs), model.first_s)
        if made_for != self._for or len(self._made) > self.KEPT:
            self._for, self._made = made_for, {}
        key = (entry.rank, entry.seq)
        if key not in self._made:
            self._made[key] = event_line(model, entry, width)
        return self._made[key]


def event_line(model: WatchModel, entry: Entry, width: int, *, with_env: bool = True) -> Line:
    """Return the line of an event: time, environment, step, text."""
    d: Mapping[str, Any] = entry.data
    first = model.first_s if model.first_s is not None else entry.time_s
    out: list[Piece] = [(f"{duration(entry.time_s - first):>7} ", "dim")]
    if with_env:
        env = model.envs.get(whole(d.get("env"), -1)) if "env" in d else None
        names = max((cell_len(e.name) for e in model.envs.values()), default=3)
        out.append((fit(env.name if env else "run", min(max(3, names), 12 if width < 100 else 20)) + " ", "strong"))
    out.append((fit(str(whole(d["step"])) if "step" in d else "", 4, right=True) + "  ", "dim"))
    used = sum(cell_len(s) for s, _ in out)
    room = max(10, width - used)
    message, tone = event_text(model, entry.kind, d, room)
    return (*out, (whole_words(message, room), tone))


def event_text(model: WatchModel, kind: str, d: Mapping[str, Any], width: int = 1000) -> tuple[str, str]:
    """Return the short text of an event and its tone."""
    if kind == "lifecycle":
        forms = _lifecycle_forms(model, d)
        message = next((form for form in forms if cell_len(form) <= width), forms[-1])
        return message, TONES.get(_letter_of(text(d.get("now"))), "plain")
    if kind == "episode":
        return _episode_text(model, d)
    return _TEXTS[kind](d) if kind in _TEXTS else (text(kind).replace("_", " "), "dim")


def _run_started_text(d: Mapping[str, Any]) -> tuple[str, str]:
    return f"run began: {text(d.get('command'))} {text(d.get('task'))}, seed {whole(d.get('seed'))}", "strong"


def _run_finished_text(d: Mapping[str, Any]) -> tuple[str, str]:
    status = text(d.get("status"))
    error = f": {text(d.get('error'))}" if d.get("error") else ""
    message = f"run {status} after {duration(number(d.get('wall_s')))}, {whole(d.get('env_steps'))} env-steps{error}"
    return message, "good" if status == "finished" else "bad"


def _lifecycle_forms(model: WatchModel, d: Mapping[str, Any]) -> list[str]:
    """Return texts of a move and the seed's worth, from the longest to the shortest."""
    slot, blueprint, was, now, by = (text(d.get(k)) for k in ("slot", "blueprint", "was", "now", "cause"))
    worth = ""
    if number(d.get("contribution")) is not None:
        error = number(d.get("contribution_se"))
        worth = ", " + points(number(d.get("contribution")), error, model.is_percent) + " se" * (error is not None)
    move = f"{was} → {now}{worth}"
    return [
        *([f"{slot} {blueprint}: {move} ({by})"] if by else []),
        f"{slot} {blueprint}: {move}",
        f"{slot} {blueprint} → {now}{worth}",
        f"{slot} → {now}{worth}",
        f"→ {now}{worth}",
    ]


def _letter_of(name: str) -> str:
    return letter(int(SeedStage[name.upper()])) if name.upper() in SeedStage.__members__ else "?"


def _decision_text(d: Mapping[str, Any]) -> tuple[str, str]:
    op = text(d.get("op"))
    heads = [text(d.get(h)) for h in ("blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")]
    message = " ".join([op_word(op), text(d.get("slot")), *(h for h in heads if h)])
    if d.get("happened") is False:
        return f"{message}: not legal, nothing happened", "warn"
    return message, op_tone(op)


def _episode_text(model: WatchModel, d: Mapping[str, Any]) -> tuple[str, str]:
    pc = model.is_percent
    unit = " %" if pc else ""
    message = f"episode ended: quality {quality(number(d.get('quality')), pc)}{unit}"
    message += f", best {quality(number(d.get('quality_best')), pc)}{unit}"
    if (gain := over_twin(d)) is not None:
        message += f", {points(gain, None, pc)} over its twin"
    return f"{message}, {whole(d.get('fossilized'))} fossilised, {whole(d.get('pruned'))} pruned", "accent"


def _governor_text(d: Mapping[str, Any]) -> tuple[str, str]:
    message = f"governor: {text(d.get('alarm'))}, {text(d.get('action'))}"
    if number(d.get("value")) is not None:
        message += f", {short(number(d.get('value')))}"
        message += f" against a limit of {short(number(d.get('limit')))}" if number(d.get("limit")) is not None else ""
    return message + (
        f", back to step {whole(d['restored_step'])}" if d.get("restored_step") is not None else ""
    ), "bad"


def _health_text(d: Mapping[str, Any]) -> tuple[str, str]:
    tone = {"error": "bad", "warning": "warn"}.get(text(d.get("severity")), "dim")
    missed = missed_by_sinks(numbers(d.get("counters")))
    if missed and "emitted" in numbers(d.get("counters")):
        return "hub: " + ", ".join(f"sink {name} missed {n:g} events" for name, n in missed.items()), tone
    return f"{text(d.get('source'))}: {text(d.get('text'))}", tone


def _checkpoint_text(d: Mapping[str, Any]) -> tuple[str, str]:
    return f"checkpoint {text(d.get('path'))}, {count(number(d.get('size_bytes')))}B ({text(d.get('reason'))})", "dim"


def _update_text(d: Mapping[str, Any]) -> tuple[str, str]:
    message = f"PPO update of round {whole(d.get('round'))}: KL {short(number(d.get('kl')))}"
    message += f", clip {short(number(d.get('clip_fraction')))}"
    mean = number(d.get("return_mean"))
    return message + (f", mean return {short(mean, 4)}" if mean is not None else ""), "note"


_TEXTS = {
    "run_started": _run_started_text, "run_finished": _run_finished_text,
    "decision": _decision_text, "governor": _governor_text, "health": _health_text,
    "checkpoint": _checkpoint_text, "update": _update_text,
}  # fmt: skip


def over_twin(episode: Mapping[str, Any]) -> Number:
    """Return the quality gained over the no-growth baseline, None if one of them was not measured."""
    mine, twin = number(episode.get("quality")), number(episode.get("twin_quality"))
    return None if mine is None or twin is None else mine - twin
