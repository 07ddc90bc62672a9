"""A controller with privileged information about simulated worlds: an upper bound for policies, and a teacher.

It reads the demand, need and largest possible gain of each world, which a policy can only infer from its observations.
It does not read the random deviation of each seed's worth, which it measures as a policy does. It plants the seed with
the highest expected utility, prunes a seed that turns out worthless, and plants the next best.

Legend: E environments, S slots, B blueprints.
"""

from __future__ import annotations

import numpy as np

from esper.leyline.actions import BLUEPRINTS, STYLE_OPERATOR, TEMPO_EPOCHS, Head, Op
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable
from esper.leyline.stages import SeedStage
from esper.simic.rewards import RewardConfig
from esper.simic.simulated_worlds import INTERACTION, LEARNING_RATE, OPERATOR_FIT
from esper.simic.simulator import Simulator
from esper.tamiyo.controllers import wait_everywhere

FIRST_STEP = 2
"""Epochs before the first seed. A policy needs some observations of the host before it can make the same choice."""
LEAST_STRENGTH = 0.004
"""Strength at full skill, as a fraction of quality, below which a seed is pruned. It is about a typical rent."""
NEVER = -1.0
"""Expected potential of a seed that is not to be planted: worse than any."""
STYLE = np.array([int(np.argmax(OPERATOR_FIT[STYLE_OPERATOR, b])) for b in range(len(BLUEPRINTS))])  # [B]
STYLE_FIT = OPERATOR_FIT.max(axis=0)  # [B]


class InformedPlanner:
    """Plants by expected potential and prunes by measurement, from the first step of an episode.

    `expected` [S, B] or [E, S, B] replaces the potentials expected in the simulator's worlds.
    """

    def __init__(self, sim: Simulator, reward: RewardConfig, expected: Floats | None = None) -> None:
        shape = sim.shape
        rules = sim.rules
        self.horizon = sim.config.horizon
        self.delay = 0 if rules.birth == "open" else rules.thresholds.blend_dwell + int(TEMPO_EPOCHS.min())
        """Epochs until a seed has an effect; planting later does not pay."""
        params = np.log2(1 + shape.params / shape.host_params)
        macs = np.log2(1 + shape.macs / shape.host_macs)
        self.rent = reward.rent_params * params + reward.rent_macs * macs  # [S, B]
        expected = np.broadcast_to(sim.truth.expected if expected is None else expected, sim.truth.expected.shape)
        allowed = np.isin(np.arange(len(BLUEPRINTS)), sim.config.allowed)
        self.expected = np.where(allowed, expected, NEVER)  # [E, S, B]

    def act(self, table: SlotTable, legal: Bools) -> Ints:
        """Return actions [E, 8]: prune a worthless seed, otherwise plant the best one if it pays, otherwise wait."""
        actions = wait_everywhere(table.num_envs)
        cooling = table.stage >= SeedStage.PRUNED
        self.expected[(*np.nonzero(cooling), table.blueprint[cooling])] = NEVER  # it was worthless here
        self._plant(actions, table, legal[:, Op.GERMINATE])
        self._prune(actions, table, legal[:, Op.PRUNE])
        return actions

    def _plant(self, actions: Ints, table: SlotTable, legal: Bools) -> None:
        envs = np.arange(table.num_envs)
        steps_left = self.horizon - table.step
        skill = 1.0 - (1.0 - LEARNING_RATE) ** steps_left[:, None]  # [E, B] at the end
        value = (self.expected + self._interactions(table)) * (skill * STYLE_FIT)[:, None] - self.rent
        value = np.where(legal[:, :, None], value, NEVER).reshape(len(envs), -1)
        best = value.argmax(axis=1)
        plants = (value[envs, best] > 0) & (table.step >= FIRST_STEP) & (steps_left > self.delay)
        slot, blueprint = np.divmod(best[plants], len(BLUEPRINTS))
        actions[plants, Head.OP] = Op.GERMINATE
        for head, choice in ((Head.SLOT, slot), (Head.BLUEPRINT, blueprint), (Head.STYLE, STYLE[blueprint])):
            actions[plants, head] = choice

    def _interactions(self, table: SlotTable) -> Floats:
        """Return [E, S, B] what a seed's neighbours are expected to add to it or take from it."""
        alive = (table.stage >= SeedStage.GERMINATED) & (table.stage <= SeedStage.FOSSILIZED)
        blueprint = np.maximum(table.blueprint, 0).astype(np.intp)
        mine = np.maximum(self.expected, 0.0)
        there = np.where(alive, np.take_along_axis(mine, blueprint[:, :, None], 2)[:, :, 0], 0.0)  # [E, S]
        total = np.zeros(mine.shape)
        for here, other in ((slice(1, None), slice(None, -1)), (slice(None, -1), slice(1, None))):
            total[:, here] += INTERACTION[blueprint[:, other]] * np.minimum(mine[:, here], there[:, other, None])
        return total

    def _prune(self, actions: Ints, table: SlotTable, legal: Bools) -> None:
        skill = 1.0 - (1.0 - LEARNING_RATE[np.maximum(table.blueprint, 0)]) ** np.maximum(table.age, 1)
        measured = np.where(table.stage == SeedStage.TRAINING, table.prospect, table.contribution)
        worthless = legal & (measured < LEAST_STRENGTH * skill)
        envs = worthless.any(axis=1)
        actions[envs] = wait_everywhere(int(envs.sum()))
        actions[envs, Head.OP] = Op.PRUNE
        actions[envs, Head.SLOT] = worthless[envs].argmax(axis=1)
        actions[envs, Head.ALPHA_SPEED] = 0  # INSTANT
