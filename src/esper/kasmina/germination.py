"""Why a seed cannot be planted now, or is planted too late to be useful, as messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from esper.kasmina.blueprints import blueprint_name
from esper.kasmina.lifecycle import Rules, legal
from esper.leyline.actions import Op
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import SeedStage

MIXING_STEPS = 560
"""Optimiser steps that a planted structure needs at least to match the same one trained from step 0 for as many epochs.

Measured on `rescue`, open birth, 20 batches per epoch, test accuracy. Planted at epoch 8 it was half a point below
after 28 epochs (worlds 0 to 2). Planted at epoch 16 it was still 1.1 points below after 29 epochs (worlds 0 and 1)."""


def late_planting(names: Sequence[str], steps_left: int, mixing_steps: int) -> str:
    """Return a warning about seeds planted at most `steps_left` optimiser steps before the end of training.

    It is empty if there are no such seeds, or if `steps_left` is at least `mixing_steps`.
    """
    if not names or steps_left >= mixing_steps:
        return ""
    return (
        f"{', '.join(map(repr, names))}: planted at most {steps_left} optimiser steps before the end of training. "
        f"A seed needs about {mixing_steps} or more to pay off. Plant earlier, or train for more epochs"
    )


def germination_reason(table: SlotTable, rules: Rules, names: Sequence[str], slot: int, blueprint: int | None) -> str:
    """Return why an empty or cooling slot of environment 0 cannot be planted now, with this blueprint or any."""
    takes = [blueprint_name(int(b)) for b in np.nonzero(table.takes[slot])[0]]
    if blueprint is not None and not table.takes[slot, blueprint]:
        return f"{blueprint_name(blueprint)!r} does not fit there. It takes: {', '.join(takes) or 'none'}"
    if not takes:
        return f"no blueprint fits {names[slot]!r}"
    cooling = {n: int(c) for n, c in zip(names, table.cooldown[0], strict=True) if c}
    if cooling and (rules.one_at_a_time or names[slot] in cooling):
        cooldowns = ", ".join(f"{n!r} for {c} more epochs" for n, c in cooling.items())
        return f"cooling down after a prune: {cooldowns}"
    learning = [s for s in range(len(names)) if table.stage[0, s] in (SeedStage.GERMINATED, SeedStage.TRAINING)]
    if learning and rules.one_at_a_time:
        return (
            f"{names[learning[0]]!r} is still {SeedStage(int(table.stage[0, learning[0]])).name}, and one seed learns "
            "at a time. Wait until it blends, or set rules.one_at_a_time=False"
        )
    return f"there are {rules.max_seeds} seeds, the most that rules.max_seeds allows. Prune one, or raise it"


def planting_obstacle(table: SlotTable, rules: Rules, names: Sequence[str]) -> str:
    """Return why no slot of environment 0 can be planted now; "" if one can."""
    if legal(table, rules)[0, Op.GERMINATE].any():
        return ""
    empty = np.nonzero(table.stage[0] == SeedStage.DORMANT)[0]
    if not len(empty):
        return "no slot is empty"
    return germination_reason(table, rules, names, int(empty[0]), None)
