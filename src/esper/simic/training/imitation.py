"""Rounds of imitation: a teacher acts in some environments and labels the states of all."""

from __future__ import annotations

import numpy as np

from esper.leyline.rng import random_bits, uniform, world_keys
from esper.leyline.slot_table import Bools, Ints, SlotTable
from esper.simic.env import GrowthVectorEnv
from esper.simic.evaluation.informed_planner import InformedPlanner
from esper.simic.evaluation.replacing_planner import ReplacingPlanner
from esper.simic.simulator import Simulator
from esper.simic.training.config import TrainConfig
from esper.tolaria.rollout import Decides

TEACHERS = {"open": ReplacingPlanner, "isolated": InformedPlanner}
"""The better planner of each birth."""


class ImitationController:
    """Controller that lets the teacher act in a share of the environments and the policy in the others.

    The share falls to 0 over the rounds of imitation, so that the policy is taught in states that it leads to.
    """

    def __init__(self, policy: Decides, env: GrowthVectorEnv, config: TrainConfig, number: int) -> None:
        assert isinstance(env.backend, Simulator)
        self.policy, self.teacher = policy, TEACHERS[config.rules.birth](env.backend, config.reward)
        draws = uniform(random_bits(world_keys(env.backend.worlds), f"taught {number}", 1))[:, 0]
        self.is_taught = draws < 1.0 - (number + 1) / config.imitation  # [E]
        self.teacher_actions: Ints

    def act(self, table: SlotTable, legal: Bools) -> Ints:
        """Return actions [E, 8]. `teacher_actions` [E, 8] are those of the teacher in all environments."""
        own = self.policy.act(table, legal)
        self.teacher_actions = self.teacher.act(table, legal)
        return np.where(self.is_taught[:, None], self.teacher_actions, own)
