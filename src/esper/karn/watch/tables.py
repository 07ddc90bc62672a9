"""The tables: environments, the slots of one environment, the best episodes."""

from __future__ import annotations

import math
from typing import Any

from rich.cells import cell_len

from esper.karn.watch import alarm_rules
from esper.karn.watch.event_text import over_twin
from esper.karn.watch.formatting import (
    NONE,
    TONES,
    bar,
    count,
    letter,
    letters,
    op_tone,
    op_word,
    points,
    quality,
    short,
    sparkline,
    stage_word,
)
from esper.karn.watch.lines import Column, Line, Piece, Table, fit, table, whole_words
from esper.karn.watch.model import WatchModel
from esper.karn.watch.states import EnvState, Number, SlotState, number, text, whole
from esper.leyline.stages import SeedStage


def env_table(model: WatchModel, width: int) -> Table[EnvState]:
    """Return the table of environments."""
    pc = model.is_percent
    steps = model.steps
    step_width = max(4, len(f"{steps}/{steps}") if steps else 4)
    names = max((cell_len(e.name) for e in model.envs.values()), default=3)
    slots = max(5, len(model.slot_names))
    least = min(slots, 12 if width < 110 else 25)  # letters if they fit, else counts

    def step_cell(e: EnvState, w: int) -> Line:
        if e.episode is None:
            return ((NONE, "dim"),)
        full = f"{e.step}/{steps}" if steps else str(e.step)
        return ((full if len(full) <= w else str(e.step), "plain"),)

    def op_cell(e: EnvState, w: int) -> Line:
        if not e.act:
            return ((NONE, "dim"),)
        age = e.step - e.act_step
        word = op_word(e.act)
        longer = f"{word} {e.act_slot}" if e.act_slot and len(word) + len(e.act_slot) < w - 4 else word
        ago = f" -{age}" if age > 0 else ""
        content = longer + ago if len(longer) + len(ago) <= w else longer
        return ((content, op_tone(e.act) if age <= 0 else "dim"),)

    def slots_cell(e: EnvState, w: int) -> Line:
        content = letters([s.stage for s in e.slots], w)
        return tuple((ch, TONES.get(ch, "plain")) for ch in content) or ((NONE, "dim"),)

    columns: list[Column[EnvState]] = [
        Column("ENV", min(max(3, names), 10), lambda e, w: ((fit(e.name, w), "strong"),), grow=max(0, names - 10)),
        Column("STEP", step_width, step_cell, right=True),
        Column("QUAL%" if pc else "QUAL", 5, lambda e, _: (_quality(e.quality, pc),), right=True),
        Column("BEST", 5, lambda e, _: ((quality(e.best, pc), "dim"),), right=True),
        Column("TREND", 8, lambda e, w: ((sparkline(e.qualities, w), "accent"),), drop=3, grow=8),
        Column("LOSS", 5, lambda e, _: (_loss(e.train_loss),), right=True, drop=1),
        Column("PARAMS", 6, lambda e, _: ((count(e.params), "plain"),), right=True, drop=2),
        Column("LAST OP", 9, op_cell, drop=4, grow=9),
        Column("LIVE", 4, lambda e, _: ((str(e.growing) if e.episode is not None else NONE, "plain"),), right=True,
               drop=6),
        Column("SLOTS", least, slots_cell, grow=slots - least),
        Column("STATE", 7, lambda e, _: (alarm_rules.env_state(e),), drop=7),
        Column("COMMIT" + "%" * pc, 7, lambda e, _: (_quality(e.committed_quality, pc),), right=True, drop=9),
        Column("VAL LOSS", 8, lambda e, _: (_loss(e.val_loss),), right=True, drop=10),
        Column("REWARD", 7, lambda e, _: ((short(e.reward), "plain"),), right=True, drop=11),
    ]  # fmt: skip
    return table(columns, width)


def _quality(value: Number, is_percent: bool) -> Piece:
    return quality(value, is_percent), "bad" if value is not None and not math.isfinite(value) else "plain"


def _loss(value: Number) -> Piece:
    return short(value), "bad" if value is not None and not math.isfinite(value) else "plain"


def env_summary(model: WatchModel, shown: int, query: str) -> str:
    """Return one line on all environments."""
    qualities = [e.quality for e in model.envs.values() if e.quality is not None and math.isfinite(e.quality)]
    unit = " %" if model.is_percent else ""
    content = f"{len(model.envs)} environment{'s' * (len(model.envs) != 1)}"
    if query:
        content = f"{shown} of {content} match “{query}”"
    if len(qualities) > 1:
        mean = quality(sum(qualities) / len(qualities), model.is_percent)
        content += f", mean quality {mean}{unit}"
    growing, fossils = sum(e.growing for e in model.envs.values()), sum(e.fossils for e in model.envs.values())
    return f"{content}, {growing} live seed{'s' * (growing != 1)}, {fossils} fossil{'s' * (fossils != 1)}"


def matches(env: EnvState, query: str) -> bool:
    """Return whether an environment matches by name, number or state."""
    query = query.strip().lower()
    return not query or query in env.name.lower() or query == str(env.index) or alarm_rules.env_state(env)[0] == query


def slot_table(model: WatchModel, env: EnvState | None, width: int) -> Table[SlotState]:
    """Return the table of an environment's slots."""
    pc = model.is_percent
    names = max((cell_len(s) for s in model.slot_names), default=4)
    step = env.step if env else 0

    def stage_cell(s: SlotState, _: int) -> Line:
        return ((stage_word(s.stage), TONES.get(letter(s.stage), "plain")),)

    def alpha_cell(s: SlotState, w: int) -> Line:
        if s.alpha is None or s.stage == SeedStage.DORMANT:
            return ((NONE, "dim"),)
        size = w - 5
        return (
            (bar(s.alpha, size), "bar"),
            (f" {s.alpha:4.2f}" if math.isfinite(s.alpha) else f" {short(s.alpha)}", "plain"),
        )

    def worth_cell(name: str) -> Any:
        def cell(s: SlotState, w: int) -> Line:
            value, se = s.worth.get(name), s.worth.get(f"{name}_se")
            content = points(value, se, pc)
            return ((content if len(content) <= w else points(value, None, pc), _worth_tone(value, se)),)

        return cell

    def health_cell(s: SlotState, _: int) -> Line:
        low = s.health is not None and not s.health >= 0.7
        return ((short(s.health, 2), "dim" if s.health is None else "warn" if low else "plain"),)

    def age_cell(s: SlotState, _: int) -> Line:
        return ((str(max(0, step - s.since)), "plain"),) if s.stage != SeedStage.DORMANT else ((NONE, "dim"),)

    columns: list[Column[SlotState]] = [
        Column("SLOT", min(max(4, names), 12),
               lambda s, w: ((fit(s.name, w, keep_end=True), "strong"),), grow=max(0, names - 12)),
        Column("STAGE", 10, stage_cell),
        Column("BLUEPRINT", 10, lambda s, _: ((s.blueprint or NONE, "plain" if s.blueprint else "dim"),), grow=6),
        Column("ALPHA", 11, alpha_cell, grow=10),
        Column("CONTRIB ± SE", 12, worth_cell("contribution"), right=True, grow=2),
        Column("PROSPECT ± SE", 13, worth_cell("prospect"), right=True, drop=2),
        Column("HEALTH", 6, health_cell, right=True, drop=1),
        Column("AGE", 4, age_cell, right=True),
        Column("SHAPLEY ± SE", 12, worth_cell("shapley"), right=True, drop=4),
        Column("SOLO ± SE", 12, worth_cell("solo"), right=True, drop=5),
        Column("INTERACT", 8, worth_cell("interaction"), right=True, drop=6),
        Column("GRAD RATIO", 10, lambda s, _: ((short(s.ratio), "plain" if s.ratio is not None else "dim"),),
               right=True, drop=7),
    ]  # fmt: skip
    return table(columns, width)


def _worth_tone(value: Number, se: Number) -> str:
    """Return a colour only if the value exceeds two standard errors."""
    if value is None:
        return "dim"
    if not math.isfinite(value):
        return "bad"
    sure = abs(value) > 2 * se if se is not None and math.isfinite(se) else False
    return ("good" if value > 0 else "bad") if sure else "plain"


def shown_slots(env: EnvState, room: int) -> tuple[list[SlotState], int]:
    """Return the slots that fit, those with a seed first if not all do, and the number left out."""
    if len(env.slots) <= room:
        return env.slots, 0
    alive = sorted(env.slots, key=lambda s: (s.stage == SeedStage.DORMANT, not s.is_growing))
    return alive[: max(0, room - 1)], len(env.slots) - max(0, room - 1)


def empty_slots(model: WatchModel, env: EnvState | None) -> str:
    """Return why there is no slot to show."""
    if env is None:
        return "no environment selected" if model.envs else "slots appear with the first environment"
    return "this run has no slots: nothing can grow"


def best_table(model: WatchModel, width: int) -> Table[dict[str, Any]]:
    """Return the table of the best episodes."""
    pc = model.is_percent

    def size(d: dict[str, Any], _: int) -> Line:
        host = whole(d.get("host_params"))
        return ((f"{whole(d.get('params')) / host:.2f}x" if host else NONE, "plain"),)

    def grown(d: dict[str, Any], w: int) -> Line:
        structure = d.get("structure")
        named = structure.items() if isinstance(structure, dict) else ()
        return ((whole_words(", ".join(f"{text(s)} {text(b)}" for s, b in named) or "nothing", w), "plain"),)

    names = max((cell_len(text(d.get("name"))) for d in model.best), default=3)
    columns: list[Column[dict[str, Any]]] = [
        Column("BEST EPISODES", min(max(13, names), 20), lambda d, w: ((fit(text(d.get("name")), w), "strong"),)),
        Column("#", 4, lambda d, _: ((str(whole(d.get("episode"))), "dim"),), right=True),
        Column("QUAL%" if pc else "QUAL", 5,
               lambda d, _: ((quality(number(d.get("quality")), pc), "good"),), right=True),
        Column("TEST", 5, lambda d, _: ((quality(number(d.get("test_quality")), pc), "plain"),), right=True, drop=2),
        Column("TWIN", 6, lambda d, _: ((points(over_twin(d), None, pc), "plain"),), right=True, drop=1),
        Column("SIZE", 6, size, right=True),
        Column("GREW", 16, grown, grow=60),
    ]  # fmt: skip
    return table(columns, width)
