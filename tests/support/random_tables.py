"""Random tables that a real run could reach, for tests and benchmarks.

Legend: E environments, S slots, O operations, B blueprints.
"""

from __future__ import annotations

import numpy as np

from esper.leyline.actions import HEAD_OPTIONS, NUM_OPS, Head, Op
from esper.leyline.lifecycle import Rules, apply, legal, record_contribution, record_epoch, tick
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable
from esper.leyline.stages import SeedStage, Thresholds

__all__ = ["LIVELY", "random_actions", "random_legal_actions", "random_measurements", "random_table"]

LIVELY = Rules(
    birth="isolated",
    thresholds=Thresholds(blend_dwell=2, blend_health=0.3, z=0.5),
    auto_train=False,
    auto_blend=False,
    auto_hold=False,
    one_at_a_time=False,
)
"""Rules under which sixty epochs reach every stage, with seeds waiting in each of them."""

_OP_WEIGHT = np.zeros(NUM_OPS)
_OP_WEIGHT[[Op.WAIT, Op.GERMINATE, Op.SET_ALPHA_TARGET]] = 1.0, 4.0, 1.5
_OP_WEIGHT[[Op.PRUNE, Op.FOSSILIZE, Op.ADVANCE]] = 1.5, 0.7, 7.0
_STAGE_WEIGHT = np.array([1.0, 1.0, 2.0, 5.0, 5.0, 1.0, 1.0, 1.0, 1.0])  # few seeds get far: prefer those


def _pick(allowed: Bools, rng: np.random.Generator, weight: Floats | None = None) -> Ints:
    """Return one allowed option per row of `allowed` [E, N], by weight; 0 in a row that allows none."""
    chance = -rng.standard_exponential(allowed.shape)
    return np.where(allowed, chance / (1.0 if weight is None else weight), -np.inf).argmax(axis=1)


def random_actions(table: SlotTable, rng: np.random.Generator) -> Ints:
    """Return random action rows [E, 8], legal or not."""
    sizes = [len(HEAD_OPTIONS[h] or ()) for h in Head]
    sizes[Head.SLOT], sizes[Head.BLUEPRINT] = table.num_slots, table.takes.shape[1]
    return rng.integers(0, sizes, size=(table.num_envs, len(Head)))


def random_legal_actions(table: SlotTable, rules: Rules, rng: np.random.Generator) -> Ints:
    """Return action rows [E, 8] that all take effect: some legal operation, then a slot that admits it."""
    ops = legal(table, rules)  # [E, O, S]
    actions = random_actions(table, rng)
    op = _pick(np.asarray(ops.any(axis=2)), rng, _OP_WEIGHT)
    slot = _pick(ops[np.arange(table.num_envs), op], rng, _STAGE_WEIGHT[table.stage])
    actions[:, Head.OP], actions[:, Head.SLOT] = op, slot
    actions[:, Head.BLUEPRINT] = _pick(table.takes[slot], rng)
    return actions


def random_measurements(table: SlotTable, rng: np.random.Generator) -> None:
    """Record plausible measurements of one epoch; in half of the environments only qualities and losses."""
    envs, shape = table.num_envs, table.stage.shape
    quality = rng.uniform(0.05, 0.95, envs)
    record_epoch(table, quality=quality, val_loss=-np.log(quality), train_loss=-np.log(quality) - 0.01)
    looked = rng.random((envs, 1)) < 0.5
    training = looked & (table.stage == SeedStage.TRAINING)
    blended = looked & ((table.stage == SeedStage.BLENDING) | (table.stage == SeedStage.HOLDING))

    measured = blended & (table.serial % 5 != 4)  # every fifth seed is never measured
    worth, se = rng.normal(0.01, 0.05, shape), rng.uniform(0, 0.02, shape)
    record_contribution(table, np.where(measured, worth, np.nan), np.where(measured, se, np.nan))
    table.committed_quality[looked[:, 0]] = quality[looked[:, 0]] - 0.01
    table.interaction[measured] = rng.normal(0.0, 0.01, shape)[measured]
    table.prospect[training] = rng.normal(0.02, 0.05, shape)[training]
    table.prospect_se[training] = se[training]
    for column in (table.grad_norm, table.grad_ratio, table.grad_health):
        column[training | blended] = rng.uniform(0, 1, shape)[training | blended]
    empty = (table.stage == SeedStage.DORMANT) | (table.stage >= SeedStage.PRUNED)
    table.params[:] = np.where(empty, 0, 64 * table.blueprint)


def random_table(
    envs: int, slots: int, seed: int, *, rules: Rules = LIVELY, epochs: int = 60, legal_share: float = 0.9
) -> SlotTable:
    """Return a reachable random table: every environment ran 0…`epochs` epochs under mostly legal actions."""
    rng = np.random.default_rng(seed)
    table = SlotTable.empty(envs, slots)
    born = (rng.random(envs) ** 2 * (epochs + 1)).astype(np.int64)  # more long histories than short ones
    for t in range(epochs):
        table.reset(np.nonzero(born == t)[0])
        sensible = rng.random((envs, 1)) < legal_share
        actions = np.where(sensible, random_legal_actions(table, rules, rng), random_actions(table, rng))
        apply(table, actions, rules)
        tick(table, rules)
        random_measurements(table, rng)
    table.reset(np.nonzero(born == epochs)[0])
    return table
