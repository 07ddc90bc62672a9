"""Lifecycle rules of seeds, as functions over the whole table.

    legal(table, rules) → bool [E, O, S]     the only legality function; includes the gates of `leyline.gates`
    apply(table, actions, rules) → outcome   one action row per environment; an illegal one does nothing
    tick(table, rules) → effects             once per epoch: ramps, cooldown, auto-advance, counters
    record_epoch(table, …)                   store the measurements of an epoch
    alpha_at(…) → [E, S]                     alpha, the weight of a seed, as a closed-form function of its ramp

They modify the table in place and touch no module. Required changes to modules are returned as effects.

Legend: E environments, S slots, O operations.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from esper.leyline.actions import (
    ALPHA_TARGETS,
    CURVE_STEEPNESS,
    HEAD_OPTIONS,
    NUM_OPS,
    RELEVANCE,
    SPEED_TICKS,
    STYLE_CURVE,
    STYLE_OPERATOR,
    TEMPO_EPOCHS,
    Curve,
    Head,
    Op,
)  # fmt: skip
from esper.leyline.errors import ConfigError
from esper.leyline.gates import open_gates
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable
from esper.leyline.stages import (
    COOLDOWN_LABEL,
    COOLDOWN_TICKS,
    COOLING,
    GROWING,
    NUM_STAGES,
    PERMISSIVE,
    SeedStage,
    Thresholds,
)  # fmt: skip

Stage = SeedStage
VELOCITY_KEEP = 0.7
"""Weight of the old velocity, 0…1, in the moving average updated at each contribution measurement."""


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lifecycle settings of one run.

    Raises:
        ConfigError: A setting is out of its range.

    Example:
        >>> esper.Rules(birth="isolated", thresholds=esper.STRICT).birth
        'isolated'
    """

    thresholds: Thresholds = PERMISSIVE
    """The gates require these minimum values."""
    auto_train: bool = True
    """If true, a GERMINATED seed enters TRAINING without an ADVANCE operation."""
    auto_blend: bool = True
    """If true, a TRAINING seed enters BLENDING as soon as its gate opens."""
    auto_hold: bool = True
    """If true, a BLENDING seed enters HOLDING as soon as alpha rests at 1."""
    max_seeds: int = 0
    """An environment has at most this many seeds, fossils included, ≥ 0; 0 sets no limit."""
    min_prune_age: int = 5
    """A seed may be pruned from this age in epochs on, ≥ 0, so that it can be measured first."""
    birth: Literal["isolated", "open"] = "open"
    """A seed begins blended in at once ("open"), or trained apart from the host first ("isolated"). Neither changes the
    host's output, because Δ is 0 at birth. An open birth has no TRAINING stage and no shadow passes."""
    open_ramp: int | None = 0
    """The first alpha ramp of an open birth lasts this many epochs, ≥ 0; None uses the tempo of the action."""
    one_at_a_time: bool = True
    """If true, germination is illegal while another seed is GERMINATED, TRAINING or cooling down."""

    def __post_init__(self) -> None:
        if self.max_seeds < 0 or self.min_prune_age < 0:
            raise ConfigError(f"max_seeds and min_prune_age must be ≥ 0, got {self.max_seeds} and {self.min_prune_age}")
        if self.birth not in ("isolated", "open"):
            raise ConfigError(f"birth must be 'isolated' or 'open', got {self.birth!r}")
        if self.open_ramp is not None and self.open_ramp < 0:
            raise ConfigError(f"open_ramp must be ≥ 0 epochs or None, got {self.open_ramp}")


class EffectKind(IntEnum):
    """Changes to modules that a rule requires."""

    BUILD = 0  # a seed was germinated: build the blueprint in the table
    DROP = 1  # a seed was removed: remove its module
    COMMIT = 2  # a seed became part of the host
    SET_OPERATOR = 3  # the operator of a live seed changed


class Effect(NamedTuple):
    """One change to the module of one slot in one environment."""

    kind: EffectKind
    env: int
    slot: int


class Outcome(NamedTuple):
    """Result of one action per environment."""

    happened: Bools  # [E] False where the action was illegal and nothing changed
    effects: list[Effect]


# plain ints: numpy compares them with small integers five times faster than enum members
_DORMANT = int(Stage.DORMANT)
_BLENDING = int(Stage.BLENDING)
_HOLDING = int(Stage.HOLDING)
_NEXT = np.arange(1, NUM_STAGES + 1, dtype=np.int8)  # stage after an advance
_PRUNABLE = np.isin(np.arange(NUM_STAGES), GROWING)
_BUSY = np.isin(np.arange(NUM_STAGES), (Stage.GERMINATED, Stage.TRAINING, *COOLING))
_OCCUPIED = np.isin(np.arange(NUM_STAGES), (*GROWING, Stage.FOSSILIZED))


def _auto_by_stage(rules: Rules) -> Bools:
    """Return by stage whether a seed advances automatically."""
    auto = np.zeros(NUM_STAGES, dtype=bool)
    auto[[Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING]] = (rules.auto_train, rules.auto_blend, rules.auto_hold)
    return auto


def legal(table: SlotTable, rules: Rules) -> Bools:
    """Return which operation is legal on which slot: [E, O, S]. WAIT is always legal.

    GERMINATE is legal if any blueprint may be planted; `table.takes` says which.
    """
    stage = table.stage
    open_gate = open_gates(table, rules.thresholds)
    resting = ~table.moving
    holding = stage == _HOLDING
    blended = (stage == _BLENDING) | holding

    may_germinate = np.ones(table.num_envs, dtype=bool)
    if rules.max_seeds:
        may_germinate &= (_OCCUPIED[stage] & table.enabled).sum(axis=1) < rules.max_seeds
    if rules.one_at_a_time:
        may_germinate &= ~(_BUSY[stage] & table.enabled).any(axis=1)

    ops = np.zeros((table.num_envs, NUM_OPS, table.num_slots), dtype=bool)
    ops[:, Op.GERMINATE] = (stage == _DORMANT) & may_germinate[:, None] & table.takes.any(axis=1)
    ops[:, Op.SET_ALPHA_TARGET] = blended & resting
    ops[:, Op.PRUNE] = _PRUNABLE[stage] & (table.age >= rules.min_prune_age) & resting
    ops[:, Op.FOSSILIZE] = holding & open_gate
    ops[:, Op.ADVANCE] = (stage <= _BLENDING) & open_gate & ~_auto_by_stage(rules)[stage]
    ops &= table.enabled[:, None, :]
    ops[:, Op.WAIT] = True
    return ops


def _enter(table: SlotTable, where: Bools, stage: Ints | int) -> None:
    """Move the seeds at `where` to a stage: save the previous stage, reset dwell and the quality baseline."""
    if not where.any():
        return
    table.prev_stage[where] = table.stage[where]
    table.prev_dwell[where] = table.dwell[where]
    table.stage[where] = stage if np.isscalar(stage) else np.asarray(stage)[where]
    table.dwell[where] = 0
    # only a contribution measured at full strength may justify fossilising
    table.contribution_age[where & (table.stage == Stage.HOLDING)] = -1
    table.quality_stage[where] = np.broadcast_to(table.quality[:, None], where.shape)[where]


def _remove(table: SlotTable, where: Bools) -> None:
    """Move the seeds at `where` to PRUNED, start the cooldown and clear alpha and parameter count."""
    if not where.any():
        return
    _enter(table, where, Stage.PRUNED)
    table.cooldown[where] = COOLDOWN_TICKS
    for column in (table.alpha, table.alpha_from, table.alpha_to, table.ramp_len, table.ramp_pos, table.params):
        column[where] = 0


def _ramp(table: SlotTable, at: At, target: Floats, ticks: Ints, curve: Ints) -> None:
    """Start an alpha ramp from the current value to `target` over `ticks`."""
    table.alpha_from[at], table.alpha_to[at] = table.alpha[at], target
    table.ramp_len[at] = np.where(table.alpha[at] == target, 0, ticks)
    table.ramp_pos[at] = 0
    table.curve[at] = curve
    _update_alpha(table, at)


def _update_alpha(table: SlotTable, at: At | Bools) -> None:
    """Set alpha to its value at the current position of the ramp."""
    start = table.alpha_from[at]
    target = table.alpha_to[at]
    position = table.ramp_pos[at]
    table.alpha[at] = alpha_at(start, target, position, table.ramp_len[at], table.curve[at])


def _effects(kind: EffectKind, where: Bools) -> list[Effect]:
    """Return one effect of this kind per True entry of `where` [E, S]."""
    return [Effect(kind, int(e), int(s)) for e, s in zip(*np.nonzero(where), strict=True)]


def is_legal(table: SlotTable, actions: Ints, rules: Rules) -> Bools:
    """Return whether each environment's action is legal [E], head choices included."""
    sizes = {Head.SLOT: table.num_slots, Head.BLUEPRINT: table.takes.shape[1]}
    fits = (actions >= 0) & (actions < [sizes.get(head) or len(HEAD_OPTIONS[head] or ()) for head in Head])
    op = np.where(fits[:, Head.OP], actions[:, Head.OP], 0)
    is_valid = fits[:, Head.OP] & (fits | ~RELEVANCE[op]).all(
        axis=1
    )  # heads that an op does not read may have any value
    slot, blueprint = (np.where(fits[:, h], actions[:, h], 0) for h in (Head.SLOT, Head.BLUEPRINT))
    ok = is_valid & legal(table, rules)[np.arange(table.num_envs), op, slot]
    return np.asarray(ok & ((op != Op.GERMINATE) | table.takes[slot, blueprint]))


def apply(table: SlotTable, actions: Ints, rules: Rules) -> Outcome:
    """Apply one action row [E, 8] per environment. An illegal action changes nothing."""
    happened = is_legal(table, actions, rules)
    op = np.where(happened, actions[:, Head.OP], Op.WAIT)
    table.last_op[:] = op
    effects: list[Effect] = []
    for which, function in _OPERATIONS.items():
        envs = np.nonzero(op == which)[0]
        if len(envs):
            effects += function(table, (envs, actions[envs, Head.SLOT]), actions[envs])
            if which == Op.GERMINATE and rules.birth == "open":
                _blend_at_birth(table, (envs, actions[envs, Head.SLOT]), rules)
    return Outcome(happened, effects)


At = tuple[Ints, Ints]
"""Environments, and the slot of each."""


def _mask(table: SlotTable, at: At, values: Bools | bool = True) -> Bools:
    """Return [E, S] with `values` at these slots and False elsewhere."""
    where = np.zeros(table.stage.shape, dtype=bool)
    where[at] = values
    return where


def _germinate(table: SlotTable, at: At, actions: Ints) -> list[Effect]:
    """Start a seed: blueprint, operator and first ramp as chosen."""
    where = _mask(table, at)
    table.blank(where)
    _enter(table, where, Stage.GERMINATED)
    table.serial[at] = table.next_serial[at[0]]
    table.next_serial[at[0]] += 1
    table.blueprint[at] = actions[:, Head.BLUEPRINT]
    table.operator[at] = STYLE_OPERATOR[actions[:, Head.STYLE]]
    table.curve[at] = STYLE_CURVE[actions[:, Head.STYLE]]
    table.tempo[at] = table.ramp_len[at] = TEMPO_EPOCHS[actions[:, Head.TEMPO]]
    table.alpha_to[at] = ALPHA_TARGETS[actions[:, Head.ALPHA_TARGET]]
    table.quality_birth[at] = table.quality_best[at] = table.quality[at[0]]
    return _effects(EffectKind.BUILD, where)


def _blend_at_birth(table: SlotTable, at: At, rules: Rules) -> None:
    """Move new seeds to BLENDING and start their first ramp, without a TRAINING stage."""
    _enter(table, _mask(table, at), Stage.BLENDING)
    ticks = table.tempo[at] if rules.open_ramp is None else np.full(len(at[0]), rules.open_ramp)
    _ramp(table, at, table.alpha_to[at], ticks, table.curve[at])


def _set_alpha_target(table: SlotTable, at: At, actions: Ints) -> list[Effect]:
    """Start a ramp to another target and set the operator. A seed in HOLDING with a lower target blends again."""
    target = ALPHA_TARGETS[actions[:, Head.ALPHA_TARGET]]
    operator = STYLE_OPERATOR[actions[:, Head.STYLE]]
    switched = _mask(table, at, table.operator[at] != operator)
    table.operator[at] = operator
    _enter(table, _mask(table, at, target < 1.0) & (table.stage == Stage.HOLDING), Stage.BLENDING)
    _ramp(table, at, target, SPEED_TICKS[actions[:, Head.ALPHA_SPEED]], actions[:, Head.ALPHA_CURVE])
    return _effects(EffectKind.SET_OPERATOR, switched)


def _prune(table: SlotTable, at: At, actions: Ints) -> list[Effect]:
    """Remove a seed: after a ramp to 0 if it has an effect and a speed is chosen, otherwise at once."""
    ticks = SPEED_TICKS[actions[:, Head.ALPHA_SPEED]]
    ramps = (ticks > 0) & (table.alpha[at] > 0)
    _enter(table, _mask(table, at, ramps) & (table.stage == Stage.HOLDING), Stage.BLENDING)
    ramped = (at[0][ramps], at[1][ramps])
    _ramp(table, ramped, np.zeros(1, np.float32), ticks[ramps], actions[ramps, Head.ALPHA_CURVE])
    removed = _mask(table, at, ~ramps)
    _remove(table, removed)
    return _effects(EffectKind.DROP, removed)


def _fossilize(table: SlotTable, at: At, _actions: Ints) -> list[Effect]:
    """Make a seed a permanent part of the host."""
    where = _mask(table, at)
    _enter(table, where, Stage.FOSSILIZED)
    return _effects(EffectKind.COMMIT, where)


def _advance_chosen(table: SlotTable, at: At, _actions: Ints) -> list[Effect]:
    """Move a seed to its next stage."""
    _advance(table, _mask(table, at))
    return []


_OPERATIONS: dict[Op, Callable[[SlotTable, At, Ints], list[Effect]]] = {
    Op.GERMINATE: _germinate,
    Op.SET_ALPHA_TARGET: _set_alpha_target,
    Op.PRUNE: _prune,
    Op.FOSSILIZE: _fossilize,
    Op.ADVANCE: _advance_chosen,
}


def _advance(table: SlotTable, where: Bools) -> None:
    """Move the seeds at `where` to their next stage. Entering BLENDING starts the ramp."""
    starts = where & (table.stage == Stage.TRAINING)
    _enter(table, where, _NEXT[table.stage])
    table.ramp_pos[starts] = 0


def tick(table: SlotTable, rules: Rules) -> list[Effect]:
    """Advance the table by one epoch: alpha ramps, cooldowns, automatic stage changes, counters."""
    moving = table.moving
    if moving.any():
        table.ramp_pos[moving] += 1
        _update_alpha(table, moving)
    removed = moving & ~table.moving & (table.alpha_to == 0.0)

    cooling = table.cooldown > 0
    if cooling.any():
        table.cooldown[cooling] -= 1
        label = COOLDOWN_LABEL[table.cooldown]
        _enter(table, cooling & (label != table.stage), label)
        table.blank(cooling & (table.cooldown == 0))
    _remove(table, removed)

    _advance(table, open_gates(table, rules.thresholds) & _auto_by_stage(rules)[table.stage] & table.enabled)

    alive = _OCCUPIED[table.stage]
    table.age[alive] += 1
    table.dwell[alive | (table.cooldown > 0)] += 1
    measured = table.contribution_age >= 0
    table.contribution_age[measured] += 1
    table.step[:] += 1
    return _effects(EffectKind.DROP, removed)


def record_epoch(table: SlotTable, *, quality: Floats, val_loss: Floats, train_loss: Floats) -> None:
    """Store one epoch's results [E]. The first quality measured for a seed becomes its baseline."""
    table.quality[:] = quality
    table.val_loss[:] = val_loss
    table.train_loss[:] = train_loss
    table.quality_best_env[:] = np.fmax(table.quality_best_env, table.quality)
    for history, value in ((table.loss_history, val_loss), (table.quality_history, quality)):
        history[:, :-1] = history[:, 1:]
        history[:, -1] = value
    alive = _OCCUPIED[table.stage]
    now = np.broadcast_to(table.quality[:, None], alive.shape)
    for column in (table.quality_birth, table.quality_stage):
        first = alive & np.isnan(column)
        column[first] = now[first]
    table.quality_best[alive] = np.fmax(table.quality_best, now)[alive]


def record_contribution(table: SlotTable, contribution: Floats, se: Floats) -> None:
    """Store contributions [E, S] with their standard errors. NaN marks slots that were not measured."""
    where = np.isfinite(contribution)
    change = contribution - table.contribution
    velocity = VELOCITY_KEEP * np.nan_to_num(table.contribution_velocity) + (1 - VELOCITY_KEEP) * change
    table.contribution_prev[where] = table.contribution[where]
    table.contribution_velocity[where] = velocity[where]
    table.contribution[where] = contribution[where]
    table.contribution_se[where] = se[where]
    table.contribution_age[where] = 0


def expel(table: SlotTable, where: Bools, *, fossils: bool = False) -> list[Effect]:
    """Remove growing seeds at any age, and fossils if `fossils`. Used by the governor, not by policies."""
    removed = where & (_OCCUPIED if fossils else _PRUNABLE)[table.stage]
    _remove(table, removed)
    return _effects(EffectKind.DROP, removed)


def progress(curve: Ints, t: Floats) -> Floats:
    """Return the progress, 0…1, of a ramp with this curve at time t in 0…1. Exact at both ends."""
    k = np.maximum(CURVE_STEEPNESS[curve], 1e-9)
    low = 1.0 / (1.0 + np.exp(0.5 * k))
    rise = (1.0 / (1.0 + np.exp(-k * (t - 0.5))) - low) / (1.0 - 2.0 * low)
    shaped = np.where(curve == Curve.LINEAR, t, np.where(curve == Curve.COSINE, 0.5 - 0.5 * np.cos(np.pi * t), rise))
    return np.where(t <= 0.0, 0.0, np.where(t >= 1.0, 1.0, shaped))


def alpha_at(start: Floats, target: Floats, position: Ints, length: Ints, curve: Ints) -> Floats:
    """Return alpha after `position` of `length` ticks. Exactly `target` at the end, also for length 0."""
    t = position.astype(np.float64) / np.maximum(length, 1)
    t = np.where(length == 0, 1.0, t)
    p = progress(curve, t)
    value = start + (target.astype(np.float64) - start) * p
    return np.where(p >= 1.0, target, value).astype(np.float32)
