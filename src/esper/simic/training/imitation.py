"""Rounds of imitation: a teacher acts in some environments and labels the states of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from esper.kasmina.blueprints import blueprint_index
from esper.leyline.actions import Head, Op
from esper.leyline.errors import ConfigError, unknown_name
from esper.leyline.rng import random_bits, uniform, world_keys
from esper.leyline.slot_table import Bools, Ints, SlotTable
from esper.simic.env import GrowthVectorEnv
from esper.simic.evaluation.informed_planner import InformedPlanner
from esper.simic.evaluation.replacing_planner import ReplacingPlanner
from esper.simic.simulator import Simulator
from esper.simic.training.config import TrainConfig
from esper.tamiyo.controllers import wait_everywhere
from esper.tolaria.rollout import ActionSource

TEACHERS = {"open": ReplacingPlanner, "isolated": InformedPlanner}
"""The better planner of each birth, on simulated hosts."""
FIRST_STEP = 2
"""First step at which a plan plants: a policy can imitate only a choice whose reasons it can see."""


class PlanTeacher:
    """Controller that follows one plan per environment: it plants and commits what the plan has and prunes all else.

    plans  blueprint by slot, of each environment
    slots  names of the slots
    takes  [S, B] which blueprints fit which slot
    """

    def __init__(self, plans: Sequence[Mapping[str, str]], slots: Sequence[str], takes: Bools) -> None:
        self.wanted = np.full((len(plans), len(slots)), -1)  # [E, S] number of the blueprint, or −1
        for e, plan in enumerate(plans):
            for slot, blueprint in plan.items():
                if slot not in slots:
                    raise unknown_name("slot of plans", slot, slots)
                s, b = slots.index(slot), blueprint_index(blueprint)
                if b >= takes.shape[1] or not takes[s, b]:
                    raise ConfigError(f"plans: the blueprint {blueprint!r} does not fit the slot {slot!r}")
                self.wanted[e, s] = b

    def act(self, table: SlotTable, legal: Bools) -> Ints:
        """Return actions [E, 8]: prune what is not in the plan, otherwise plant, otherwise commit, otherwise wait."""
        actions = wait_everywhere(table.num_envs)
        is_wanted = (self.wanted >= 0) & (table.blueprint == self.wanted)
        may_plant = (self.wanted >= 0) & (table.step[:, None] >= FIRST_STEP)
        for op, legal_slots in (
            (Op.FOSSILIZE, legal[:, Op.FOSSILIZE] & is_wanted),
            (Op.GERMINATE, legal[:, Op.GERMINATE] & may_plant),
            (Op.PRUNE, legal[:, Op.PRUNE] & ~is_wanted),
        ):
            envs = legal_slots.any(axis=1)
            actions[envs, Head.OP] = op
            actions[envs, Head.SLOT] = legal_slots.argmax(axis=1)[envs]
        plants = actions[:, Head.OP] == Op.GERMINATE
        actions[plants, Head.BLUEPRINT] = self.wanted[plants, actions[plants, Head.SLOT]]
        return actions


class ImitationController:
    """Controller that lets the teacher act in a share of the environments and the policy in the others.

    The share falls to 0 over the rounds of imitation, so that the policy is taught in states that it reaches.
    """

    def __init__(self, policy: ActionSource, env: GrowthVectorEnv, config: TrainConfig, number: int) -> None:
        self.policy = policy
        self.teacher = _teacher(env, config)
        self.fixed = env.fixed
        draws = uniform(random_bits(world_keys(env.backend.worlds), f"taught {number}", 1))[:, 0]
        self.is_taught = draws < 1.0 - (number + 1) / config.imitation  # [E]
        self.teacher_actions: Ints

    def act(self, table: SlotTable, legal: Bools) -> Ints:
        """Return actions [E, 8]. `teacher_actions` [E, 8] are those of the teacher in all environments."""
        own = self.policy.act(table, legal)
        self.teacher_actions = self.teacher.act(table, legal)
        for head, option in self.fixed.items():
            self.teacher_actions[:, head] = option
        return np.where(self.is_taught[:, None], self.teacher_actions, own)


def _teacher(env: GrowthVectorEnv, config: TrainConfig) -> ActionSource:
    """Return the teacher of this environment's worlds."""
    if isinstance(env.backend, Simulator):
        return TEACHERS[config.rules.birth](env.backend, config.reward)
    plans = [config.plans[str(world)] for world in env.backend.worlds]
    return PlanTeacher(plans, env.backend.slots, env.backend.table.takes)


def check_plans(env: GrowthVectorEnv, config: TrainConfig) -> None:
    """Raise ConfigError if a plan has a slot that no host has, or a blueprint that does not exist or does not fit."""
    if config.imitation and not config.simulated:
        PlanTeacher(list(config.plans.values()), env.backend.slots, env.backend.table.takes)
