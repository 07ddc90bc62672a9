"""Controller that plants a seed in every slot, then prunes the least useful ones until a size limit holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from esper.leyline.actions import Head, Op
from esper.leyline.slot_table import Bools, Floats, Ints, Priced, SlotTable, seed_macs
from esper.leyline.stages import SeedStage
from esper.tamiyo.controllers.schedule import PREFERRED, Schedule, wait_everywhere


class Select:
    """Plant wide, keep what is worth its cost.

    Every slot gets a seed as early as the rules allow. From step `judge_from` on, while host and seeds together cost
    more than `limit` multiply-adds per sample, each step prunes the seed with the lowest lower bound of contribution
    per multiply-add. Once the limit holds, each step commits one seed.

    prices      costs of the host and of each blueprint in each slot
    limit       limit of multiply-adds per sample of the final network
    blueprints  what to plant, in order of preference
    judge_from  first step at which seeds are pruned
    z           number of standard errors subtracted from a contribution
    """

    def __init__(
        self,
        prices: Priced,
        limit: float,
        blueprints: Sequence[str | int] = PREFERRED,
        *,
        judge_from: int = 10,
        z: float = 1.0,
    ) -> None:
        self.prices, self.limit, self.judge_from, self.z = prices, limit, judge_from, z
        self.planting = Schedule(blueprints, start=0)

    def act(self, table: SlotTable, legal: Bools) -> Ints:
        """Return actions [E, 8]: plant while slots were never used, then prune, then commit."""
        actions = wait_everywhere(table.num_envs)
        macs = seed_macs(table, self.prices.slot_macs)  # [E, S]
        is_late = table.step >= self.judge_from
        is_large = self.prices.host_macs + macs.sum(axis=1) > self.limit
        choose = (
            (Op.FOSSILIZE, is_late & ~is_large, np.ones(macs.shape)),
            (Op.PRUNE, is_late & is_large, -self._value(table, macs)),
        )
        for op, when, preference in choose:
            may = legal[:, op] & when[:, None] & np.isfinite(preference)
            envs = may.any(axis=1)
            best = np.where(may, preference, -np.inf).argmax(axis=1)
            actions[envs, Head.OP], actions[envs, Head.SLOT] = op, best[envs]
        plants = self.planting.act(table, legal)
        fresh = (plants[:, Head.OP] == Op.GERMINATE) & (table.next_serial < table.num_slots)
        actions[fresh] = plants[fresh]
        return actions

    def why_waiting(self, table: SlotTable) -> str:
        """Return which condition for planting environment 0 does not meet; empty if it meets all."""
        return self.planting.why_waiting(table)

    def _value(self, table: SlotTable, macs: Ints) -> Floats:
        """Return the lower bound of each seed's contribution per multiply-add [E, S]; NaN if not measured."""
        is_measured = (table.stage == SeedStage.HOLDING) & (table.contribution_age >= 0)
        bound = table.contribution - self.z * table.contribution_se
        return np.where(is_measured, bound / np.maximum(macs, 1), np.nan)
