"""The page of one environment: its numbers, its slots and their stages, its decisions and their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from esper.karn.watch import alarm_rules
from esper.karn.watch.event_text import event_line
from esper.karn.watch.formatting import LETTERS, NONE, TONES, count, letter, quality, short
from esper.karn.watch.lines import Line, fit, joined
from esper.karn.watch.model import WatchModel
from esper.karn.watch.states import EnvState, SlotState
from esper.karn.watch.tables import empty_slots, slot_table
from esper.leyline.stages import SeedStage

Maker = Callable[[], Line]
T = TypeVar("T")


def detail_lines(model: WatchModel, env: EnvState, width: int) -> list[Maker]:
    """Return one function per line, so that only visible lines are created."""
    table = slot_table(model, env, width)
    out: list[Maker] = [lambda: _title(model, env, width), lambda: _numbers(model, env, width), _nothing]
    out += [table.head]
    out += [_later(table.line, slot) for slot in env.slots] or [lambda: ((empty_slots(model, env), "dim"),)]
    out += [_nothing, lambda: _lives_head(env, width)]
    alive = [(i, s) for i, s in enumerate(env.slots) if _ever_alive(env, i)]
    out += [_later(_life, (env, i, slot, width)) for i, slot in alive] or [
        lambda: (("no seed has lived in this episode yet", "dim"),)
    ]
    out += [_nothing, lambda: ((fit("DECISIONS AND WHAT CAME OF THEM (newest first)", width), "head"),)]
    out += [_later(lambda e: event_line(model, e, width, with_env=False), e) for e in reversed(env.happenings)] or [
        lambda: (("nothing has happened here yet", "dim"),)
    ]
    return out


def _later(make: Callable[[T], Line], value: T) -> Maker:
    return lambda: make(value)


def _nothing() -> Line:
    return ()


def _title(model: WatchModel, env: EnvState, width: int) -> Line:
    word, tone = alarm_rules.env_state(env)
    steps = f"/{model.steps}" if model.steps else ""
    episode = f"episode {env.episode}" if env.episode is not None else "not begun"
    return joined(
        [[(f" {env.name} ", "badge-note")], [(word, tone)], [(f"environment {env.index}", "dim")], [(episode, "plain")],
         [(f"step {env.step}{steps}", "plain")], [(f"{env.growing} live, {env.fossils} fossilised", "plain")]],
        width,
    )  # fmt: skip


def _numbers(model: WatchModel, env: EnvState, width: int) -> Line:
    pc, unit = model.is_percent, " %" if model.is_percent else ""
    at = f" at step {env.best_step}" if env.best_step else ""
    named = [
        ("quality", quality(env.quality, pc) + unit), ("best", quality(env.best, pc) + unit + at),
        ("committed", quality(env.committed_quality, pc) + unit), ("train loss", short(env.train_loss)),
        ("val loss", short(env.val_loss)), ("params", count(env.params)), ("reward", short(env.reward)),
    ]  # fmt: skip
    named = [(name, content.replace(f"{NONE} %", NONE)) for name, content in named]
    return joined([[(f"{name} ", "dim"), (content, "plain")] for name, content in named], width, gap="  ")


def _ever_alive(env: EnvState, slot: int) -> bool:
    return env.slots[slot].stage != SeedStage.DORMANT or any(slot < len(s) and s[slot] for s in env.stages)


def _lives_head(env: EnvState, width: int) -> Line:
    return ((fit(f"LIVES, steps {max(1, env.step - len(env.stages) + 1)} to {env.step}", width), "head"),)


def _life(of: tuple[EnvState, int, SlotState, int]) -> Line:
    """Return a slot's stages over the steps of this episode, one letter per group of steps."""
    env, index, slot, width = of
    room = max(10, width - 14)
    n = len(env.stages)
    picked = range(n) if n <= room else [(i + 1) * n // room - 1 for i in range(room)]
    marks = [letter(env.stages[i][index]) if index < len(env.stages[i]) else LETTERS[SeedStage.DORMANT] for i in picked]
    out = [(fit(slot.name, 12, keep_end=True) + "  ", "strong")]
    for mark in marks:
        tone = TONES.get(mark, "plain")
        if out[-1][1] == tone and len(out) > 1:
            out[-1] = (out[-1][0] + mark, tone)
        else:
            out.append((mark, tone))
    return tuple(out)
