"""Scalar reference implementation of the lifecycle rules: one slot at a time, in plain Python.

Written from the specification, not from `esper.leyline.lifecycle`; the tests require equal results. It
shares only the enums and the table's column names with the code it checks.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from esper.leyline.actions import Curve, Op, Operator
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import Check
from esper.leyline.stages import SeedStage as Stage

TARGETS = {0: 0.5, 1: 0.7, 2: 1.0}
SPEEDS = {0: 0, 1: 3, 2: 5, 3: 8}
TEMPOS = {0: 3, 1: 5, 2: 8}
STYLES = {
    0: (Curve.LINEAR, Operator.ADD),
    1: (Curve.LINEAR, Operator.MULTIPLY),
    2: (Curve.SIGMOID, Operator.ADD),
    3: (Curve.LINEAR, Operator.GATE),
}
STEEPNESS = {Curve.SIGMOID_GENTLE: 6, Curve.SIGMOID: 12, Curve.SIGMOID_SHARP: 24}
HEADS = ("slot", "blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve", "op")


@dataclasses.dataclass
class Slot:
    """One slot: the columns of `SlotTable` at [e, s]."""

    stage: int = Stage.DORMANT
    prev_stage: int = Stage.DORMANT
    dwell: int = 0
    prev_dwell: int = 0
    age: int = 0
    cooldown: int = 0
    serial: int = -1
    blueprint: int = -1
    operator: int = -1
    tempo: int = 0
    params: int = 0
    alpha: float = 0.0
    alpha_from: float = 0.0
    alpha_to: float = 0.0
    ramp_len: int = 0
    ramp_pos: int = 0
    curve: int = 0
    quality_birth: float = math.nan
    quality_stage: float = math.nan
    quality_best: float = math.nan
    contribution: float = math.nan
    contribution_se: float = math.nan
    contribution_prev: float = math.nan
    contribution_velocity: float = math.nan
    contribution_age: int = -1
    prospect: float = math.nan
    prospect_se: float = math.nan
    interaction: float = math.nan
    grad_norm: float = math.nan
    grad_ratio: float = math.nan
    grad_health: float = math.nan

    def is_moving(self) -> bool:
        """Return whether a ramp is running. Alpha moves only in BLENDING."""
        return self.stage == Stage.BLENDING and self.ramp_pos < self.ramp_len

    def is_empty(self) -> bool:
        return self.stage == Stage.DORMANT

    def is_alive(self) -> bool:
        return self.stage in (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)


@dataclasses.dataclass
class Env:
    """One environment: its slots and the other values that the rules read or write."""

    slots: list[Slot]
    enabled: list[bool]
    takes: list[list[bool]]
    quality: float
    step: int
    next_serial: int
    last_op: int


COLUMNS = [f.name for f in dataclasses.fields(Slot)]


def read(table: SlotTable) -> list[Env]:
    """Return every environment of a table as an `Env`."""
    return [
        Env(
            slots=[Slot(**{name: getattr(table, name)[e, s] for name in COLUMNS}) for s in range(table.num_slots)],
            enabled=[bool(x) for x in table.enabled[e]],
            takes=[[bool(x) for x in row] for row in table.takes],
            quality=table.quality[e],
            step=int(table.step[e]),
            next_serial=int(table.next_serial[e]),
            last_op=int(table.last_op[e]),
        )
        for e in range(table.num_envs)
    ]


def write(envs: list[Env], table: SlotTable) -> None:
    """Write the environments into a table of the same size."""
    for name in COLUMNS:
        getattr(table, name)[:] = [[getattr(slot, name) for slot in env.slots] for env in envs]
    for name in ("step", "next_serial", "last_op"):
        getattr(table, name)[:] = [getattr(env, name) for env in envs]


# --- gates


def at_least(value: float, floor: float | None) -> bool:
    if floor is None:
        return True
    if not math.isfinite(value):
        return False
    return np.float32(value) >= np.float32(floor)


def failed_checks(env: Env, slot: Slot, rules: Any) -> set[Check]:
    t = rules.thresholds
    failed = set()
    if slot.stage == Stage.TRAINING:
        if slot.dwell < t.blend_dwell:
            failed.add(Check.DWELL)
        if not at_least(slot.grad_health, t.blend_health):
            failed.add(Check.GRADIENT_HEALTH)
        if not at_least(slot.grad_ratio, t.blend_ratio):
            failed.add(Check.GRADIENT_RATIO)
        if not at_least(env.quality - slot.quality_stage, t.blend_improvement):
            failed.add(Check.IMPROVEMENT)
    elif slot.stage == Stage.BLENDING:
        if slot.dwell < t.hold_dwell:
            failed.add(Check.DWELL)
        if slot.is_moving() or slot.alpha_to < 1 - 1e-6 or abs(slot.alpha - slot.alpha_to) > 1e-6:
            failed.add(Check.ALPHA_AT_FULL)
    elif slot.stage == Stage.HOLDING and not at_least(
        slot.contribution - t.z * slot.contribution_se if slot.contribution_age >= 0 else math.nan,
        t.fossil_contribution,
    ):
        failed.add(Check.CONTRIBUTION)
    return failed


def gate_is_open(env: Env, slot: Slot, rules: Any) -> bool:
    if slot.stage not in (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING):
        return False
    return not failed_checks(env, slot, rules)


# --- legality


def may_germinate(env: Env, rules: Any) -> bool:
    """Return whether the environment may germinate one more seed in any slot."""
    seeds = 0
    for slot, enabled in zip(env.slots, env.enabled, strict=True):
        if not enabled:
            continue
        if slot.is_alive():
            seeds += 1
        under_way = slot.stage in (Stage.GERMINATED, Stage.TRAINING, Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING)
        if under_way and rules.one_at_a_time:
            return False
    return rules.max_seeds == 0 or seeds < rules.max_seeds


def advances_automatically(slot: Slot, rules: Any) -> bool:
    flags = {Stage.GERMINATED: rules.auto_train, Stage.TRAINING: rules.auto_blend, Stage.BLENDING: rules.auto_hold}
    return bool(flags.get(Stage(slot.stage), False))


def is_legal(env: Env, op: int, s: int, rules: Any) -> bool:
    if op == Op.WAIT:
        return True
    if not env.enabled[s]:
        return False
    slot = env.slots[s]
    if op == Op.GERMINATE:
        return slot.is_empty() and any(env.takes[s]) and may_germinate(env, rules)
    if op == Op.SET_ALPHA_TARGET:
        return slot.stage in (Stage.BLENDING, Stage.HOLDING) and not slot.is_moving()
    if op == Op.PRUNE:
        if slot.stage not in (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING):
            return False
        return slot.age >= rules.min_prune_age and not slot.is_moving()
    if op == Op.FOSSILIZE:
        return slot.stage == Stage.HOLDING and gate_is_open(env, slot, rules)
    assert op == Op.ADVANCE
    if slot.stage not in (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING) or advances_automatically(slot, rules):
        return False
    return gate_is_open(env, slot, rules)


def may_happen(env: Env, action: dict[str, int], rules: Any) -> bool:
    sizes = {
        "slot": len(env.slots),
        "blueprint": len(env.takes[0]),
        "style": 4,
        "tempo": 3,
        "alpha_target": 3,
        "alpha_speed": 4,
        "alpha_curve": 5,
        "op": 6,
    }
    reads = {
        Op.WAIT: [],
        Op.GERMINATE: ["slot", "blueprint", "style", "tempo", "alpha_target"],
        Op.SET_ALPHA_TARGET: ["slot", "style", "alpha_target", "alpha_speed", "alpha_curve"],
        Op.PRUNE: ["slot", "alpha_speed", "alpha_curve"],
        Op.FOSSILIZE: ["slot"],
        Op.ADVANCE: ["slot"],
    }
    if not 0 <= action["op"] < sizes["op"]:
        return False
    for head in reads[action["op"]]:
        if not 0 <= action[head] < sizes[head]:
            return False
    if action["op"] == Op.WAIT:
        return True
    if action["op"] == Op.GERMINATE and not env.takes[action["slot"]][action["blueprint"]]:
        return False
    return is_legal(env, action["op"], action["slot"], rules)


# --- apply and tick


def enter(env: Env, slot: Slot, stage: int) -> None:
    slot.prev_stage, slot.prev_dwell = slot.stage, slot.dwell
    slot.stage, slot.dwell = stage, 0
    slot.quality_stage = env.quality
    if stage == Stage.HOLDING:
        slot.contribution_age = -1


def remove(env: Env, slot: Slot) -> None:
    enter(env, slot, Stage.PRUNED)
    slot.cooldown = 1 + 5 + 1
    slot.alpha = slot.alpha_from = slot.alpha_to = 0.0
    slot.ramp_len = slot.ramp_pos = slot.params = 0


def advance(env: Env, slot: Slot) -> None:
    after = {Stage.GERMINATED: Stage.TRAINING, Stage.TRAINING: Stage.BLENDING, Stage.BLENDING: Stage.HOLDING}
    enter(env, slot, after[Stage(slot.stage)])


def start_ramp(slot: Slot, target: float, ticks: int, curve: int) -> None:
    target = np.float32(target)
    slot.alpha_from, slot.alpha_to, slot.curve = slot.alpha, target, curve
    slot.ramp_pos = 0
    slot.ramp_len = 0 if slot.alpha == target else ticks
    if slot.ramp_len == 0:
        slot.alpha = target


def alpha_now(slot: Slot) -> float:
    if slot.ramp_pos == slot.ramp_len:
        return slot.alpha_to
    t = slot.ramp_pos / slot.ramp_len
    curve = Curve(slot.curve)
    if curve == Curve.LINEAR:
        p = t
    elif curve == Curve.COSINE:
        p = (1 - math.cos(math.pi * t)) / 2
    else:
        k = STEEPNESS[curve]
        low, high = sigmoid(-k / 2), sigmoid(k / 2)
        p = (sigmoid(k * (t - 0.5)) - low) / (high - low)
    return float(slot.alpha_from) + (float(slot.alpha_to) - float(slot.alpha_from)) * p


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def apply(env: Env, row: list[int], rules: Any) -> tuple[bool, list[tuple[str, int]]]:
    """Apply one action. Return whether it happened and the effects as (kind, slot)."""
    action = dict(zip(HEADS, row, strict=True))
    if not may_happen(env, action, rules):
        env.last_op = Op.WAIT
        return False, []
    op, s = action["op"], action["slot"]
    env.last_op = op
    if op == Op.WAIT:
        return True, []
    slot = env.slots[s]
    if op == Op.GERMINATE:
        curve, operator = STYLES[action["style"]]
        tempo = TEMPOS[action["tempo"]]
        env.slots[s] = Slot(
            stage=Stage.GERMINATED,
            serial=env.next_serial,
            blueprint=action["blueprint"],
            operator=operator,
            curve=curve,
            tempo=tempo,
            ramp_len=tempo,
            alpha_to=TARGETS[action["alpha_target"]],
            quality_birth=env.quality,
            quality_stage=env.quality,
            quality_best=env.quality,
        )
        env.next_serial += 1
        if rules.birth == "open":
            born = env.slots[s]
            enter(env, born, Stage.BLENDING)
            start_ramp(born, born.alpha_to, tempo if rules.open_ramp is None else rules.open_ramp, curve)
        return True, [("BUILD", s)]
    if op == Op.SET_ALPHA_TARGET:
        _, operator = STYLES[action["style"]]
        effects = [("SET_OPERATOR", s)] if slot.operator != operator else []
        slot.operator = operator
        target = TARGETS[action["alpha_target"]]
        if slot.stage == Stage.HOLDING and target < 1:
            enter(env, slot, Stage.BLENDING)
        start_ramp(slot, target, SPEEDS[action["alpha_speed"]], action["alpha_curve"])
        return True, effects
    if op == Op.PRUNE:
        ticks = SPEEDS[action["alpha_speed"]]
        if ticks == 0 or slot.alpha == 0:
            remove(env, slot)
            return True, [("DROP", s)]
        if slot.stage == Stage.HOLDING:
            enter(env, slot, Stage.BLENDING)
        start_ramp(slot, 0.0, ticks, action["alpha_curve"])
        return True, []
    if op == Op.FOSSILIZE:
        enter(env, slot, Stage.FOSSILIZED)
        return True, [("COMMIT", s)]
    if op == Op.ADVANCE:
        advance(env, slot)
    return True, []


def tick(env: Env, rules: Any) -> list[tuple[str, int]]:
    """Advance one epoch: ramp, cooldown, removal, at most one automatic advance, counters. Return the effects."""
    effects = []
    for s, slot in enumerate(env.slots):
        ramp_down_ended = False
        if slot.is_moving():
            slot.ramp_pos += 1
            slot.alpha = alpha_now(slot)
            ramp_down_ended = not slot.is_moving() and slot.alpha_to == 0
        if slot.cooldown > 0:
            slot.cooldown -= 1
            if slot.cooldown == 0:
                env.slots[s] = slot = Slot()
            elif slot.cooldown == 1:
                enter(env, slot, Stage.RESETTING)
            elif slot.stage == Stage.PRUNED:
                enter(env, slot, Stage.EMBARGOED)
        if ramp_down_ended:
            remove(env, slot)
            effects.append(("DROP", s))
        if env.enabled[s] and advances_automatically(slot, rules) and gate_is_open(env, slot, rules):
            advance(env, slot)
        if slot.is_alive():
            slot.age += 1
        if not slot.is_empty():
            slot.dwell += 1
        if slot.contribution_age >= 0:
            slot.contribution_age += 1
    env.step += 1
    return effects
