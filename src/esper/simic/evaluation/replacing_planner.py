"""A planner for simulated worlds that weighs what a seed will be worth at the end against its best replacement.

Like `InformedPlanner` it knows the demand, need and largest possible gain of each world but not its surprises, and
learns about a seed from its measured contributions. Where the informed planner prunes seeds below a fixed threshold,
this one compares utilities at the end of the episode: of the network with the seed, without it, and with the best other
seed in its place, which has less time to learn. Utilities include interactions, the limit by `room` and rent.

Legend: E environments, S slots, B blueprints.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from esper.leyline.actions import BLUEPRINTS, Head, Op
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable
from esper.leyline.stages import SeedStage
from esper.simic.evaluation.informed_planner import FIRST_STEP, STYLE, STYLE_FIT
from esper.simic.rewards import RewardConfig
from esper.simic.simulated_worlds import INTERACTION, LEARNING_RATE
from esper.simic.simulator import Simulator
from esper.tamiyo.controllers import wait_everywhere

LEAST_AGE = 4
"""Epochs before a seed can be pruned. Younger ones have learnt too little to be compared."""
REST = 7
"""Epochs from the decision to prune until a replacement begins to learn."""
MARGIN = 0.005
"""Utility by which a replacement must be better. Measurements are noisy, and pruning disturbs the host."""
OPTIMISM = 0.6
"""Standard deviations of surprise added to the expected potential of a new seed, times the share of the episode left: a
disappointing seed can be replaced again."""
TRUST = 1.5
"""Factor of that standard deviation when a measurement is weighed against the expectation: some seeds are bad."""
EMPTY = -1


class ReplacingPlanner:
    """Plants and replaces seeds by their expected utility at the end, from the first step of an episode.

    MARGIN, OPTIMISM, TRUST and LEAST_AGE were chosen in training worlds.
    """

    def __init__(self, sim: Simulator, reward: RewardConfig) -> None:
        self.truth = sim.truth
        self.shape = sim.shape
        self.reward = reward
        self.horizon = sim.config.horizon
        self.surprise = sim.truth.scale * sim.config.surprise  # [E, S] standard deviation of a seed's potential
        self.allowed = sorted(sim.config.allowed)
        self.tried = np.zeros(sim.truth.expected.shape, dtype=bool)  # [E, S, B]

    def act(self, table: SlotTable, legal: Bools) -> Ints:
        """Return actions [E, 8]: prune the seed whose replacement gains most, otherwise plant, otherwise wait."""
        actions = wait_everywhere(table.num_envs)
        envs = np.arange(table.num_envs)
        cooling = table.stage >= SeedStage.PRUNED
        self.tried[(*np.nonzero(cooling), table.blueprint[cooling])] = True
        is_alive = (table.stage >= SeedStage.GERMINATED) & (table.stage <= SeedStage.FOSSILIZED)
        keep, offers = self._values(table, is_alive)
        values = np.where(legal[:, Op.GERMINATE, :, None], offers, -np.inf).reshape(len(envs), -1)
        best = values.argmax(axis=1)
        plants = (values[envs, best] > 0) & (table.step >= FIRST_STEP)
        slot, blueprint = np.divmod(best[plants], len(BLUEPRINTS))
        actions[plants, Head.OP] = Op.GERMINATE
        for head, choice in ((Head.SLOT, slot), (Head.BLUEPRINT, blueprint), (Head.STYLE, STYLE[blueprint])):
            actions[plants, head] = choice

        better = np.maximum(offers.max(axis=2), 0.0) - keep - MARGIN  # [E, S]
        better = np.where(legal[:, Op.PRUNE] & is_alive & (table.age >= LEAST_AGE), better, -np.inf)
        worst = better.argmax(axis=1)
        prunes = better[envs, worst] > 0
        actions[prunes] = wait_everywhere(int(prunes.sum()))
        actions[prunes, Head.OP], actions[prunes, Head.SLOT] = Op.PRUNE, worst[prunes]
        actions[prunes, Head.ALPHA_SPEED] = 0  # INSTANT
        return actions

    def _values(self, table: SlotTable, is_alive: Bools) -> tuple[Floats, Floats]:
        """Return what each seed will add to the final utility [E, S], and what a new seed there would add [E, S, B]."""
        final = self._final_strength(table, is_alive)
        blueprint = np.where(is_alive, table.blueprint, EMPTY).astype(np.intp)
        whole = self._utility(blueprint, final)
        left = self.horizon - table.step
        keep = np.zeros(final.shape)
        offers = np.full(self.truth.expected.shape, -np.inf)
        for s in range(table.num_slots):
            without = self._utility(_at(blueprint, s, EMPTY), _at(final, s, 0.0))
            keep[:, s] = whole - without
            time = np.maximum(left - np.where(is_alive[:, s], REST, 0), 0)  # [E]
            bonus = OPTIMISM * self.surprise[:, s] * time / self.horizon
            for b in self.allowed:
                skill = 1.0 - (1.0 - LEARNING_RATE[b]) ** time
                strength = (self.truth.expected[:, s, b] + bonus) * skill * STYLE_FIT[b]
                offers[:, s, b] = self._utility(_at(blueprint, s, b), _at(final, s, strength)) - without
        return keep, np.where(self.tried, -np.inf, offers)

    def _final_strength(self, table: SlotTable, is_alive: Bools) -> Floats:
        """Return [E, S] the expected strength of each seed at the end, from its measured contribution."""
        blueprint = np.maximum(table.blueprint, 0).astype(np.intp)
        age = np.maximum(table.age, 1)
        rate = LEARNING_RATE[blueprint]
        fit = STYLE_FIT[blueprint]
        prior = np.take_along_axis(self.truth.usual, blueprint[:, :, None], 2)[:, :, 0]
        now = (1.0 - (1.0 - rate) ** age) * fit
        truth = self.truth
        maturity = (truth.host_quality(table.step) - truth.start) / (truth.ceiling - truth.start)
        potential = np.where(is_alive, np.maximum(prior, 0.0), 0.0)
        for _ in range(2):  # what a contribution says of the potential depends on the strength of all
            share_left = np.exp(-np.maximum((potential * now).sum(axis=1), 0.0) / self.truth.room)
            seen = np.maximum((maturity * share_left)[:, None] * now, 1e-3)  # contribution per unit of potential
            spread = (TRUST * self.surprise) ** 2
            weight = spread / (spread + (np.nan_to_num(table.contribution_se, nan=0.02) / seen) ** 2)
            is_measured = np.isfinite(table.contribution) & (table.age > 0)
            surprise = np.where(is_measured, weight * (table.contribution / seen - prior), 0.0)
            potential = np.where(is_alive, prior + surprise, 0.0)
        left = self.horizon - table.step
        return np.asarray(potential * (1.0 - (1.0 - rate) ** (np.maximum(table.age, 0) + left[:, None])) * fit)

    def _utility(self, blueprint: Ints, strength: Floats) -> Floats:
        """Return the utility [E] of seeds of these strengths [E, S] in a mature host."""
        both = np.maximum(np.minimum(strength[:, :-1], strength[:, 1:]), 0.0)
        raw = strength.sum(axis=1) + (INTERACTION[blueprint[:, :-1], blueprint[:, 1:]] * both).sum(axis=1)
        quality = np.where(raw > 0, self.truth.room * -np.expm1(-np.maximum(raw, 0.0) / self.truth.room), raw)
        slots = np.arange(blueprint.shape[1])
        is_there = blueprint != EMPTY
        params, macs = (
            np.log2(1 + np.where(is_there, of[slots, blueprint], 0).sum(axis=1) / host)
            for of, host in ((self.shape.params, self.shape.host_params), (self.shape.macs, self.shape.host_macs))
        )
        return np.asarray(quality - self.reward.rent_params * params - self.reward.rent_macs * macs)


def _at(values: npt.NDArray[Any], slot: int, value: Floats | float) -> npt.NDArray[Any]:
    """Return a copy of values [E, S] with another value in one slot."""
    changed = values.copy()
    changed[:, slot] = value
    return changed
