"""Best fixed plans in simulated worlds, as a reference for controllers.

A *plan* lists what to plant where, in which order. Each seed is planted and committed as soon as the rules allow, and
never pruned. `best_schedule` returns the plan with the highest mean return over some worlds: the optimum without
observations. For a single world it is the optimum with full knowledge. It simulates every plan without noise
(`beam=None`: exact within the class), or extends only the best few of each length (for many slots).

Legend: E environments, W worlds, P plans, N plantings of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from esper.leyline.actions import STYLES, Head, Op, Operator
from esper.leyline.lifecycle import Rules
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable
from esper.simic.rewards import Frame, RewardConfig, reward
from esper.simic.simulated_worlds import GATED_HARM, OPERATOR_FIT, draw_worlds
from esper.simic.simulator import SimConfig, Simulator
from esper.tamiyo.controllers import Controller, wait_everywhere
from esper.tolaria.rollout import rollout

Planting = tuple[int, int, int]
"""Slot, blueprint and style."""
PlantingSequence = tuple[Planting, ...]
ENVS_AT_ONCE = 4096
_STYLE_OF = {op: next(i for i, s in enumerate(STYLES) if s.operator == op) for op in Operator}


class FollowPlans:
    """Controller that executes one plan per environment, or one plan in all of them."""

    def __init__(self, plans: Sequence[PlantingSequence]) -> None:
        longest = max((len(p) for p in plans), default=0) + 1  # the last column is −1: nothing left to plant
        self.plantings = np.full((len(plans), longest, 3), -1)
        for i, plan in enumerate(plans):
            if plan:
                self.plantings[i, : len(plan)] = plan

    def act(self, table: SlotTable, legal: Bools) -> Ints:
        """Return actions [E, 8]: plant the next seed of the plan if it is legal, otherwise commit, otherwise wait."""
        envs = np.arange(table.num_envs)
        plans = np.broadcast_to(self.plantings, (table.num_envs, *self.plantings.shape[1:]))
        slot, blueprint, style = plans[envs, np.minimum(table.next_serial, plans.shape[1] - 1)].T
        actions = wait_everywhere(table.num_envs)
        self._do(actions, Op.FOSSILIZE, legal[:, Op.FOSSILIZE])
        plant = (slot >= 0) & legal[envs, Op.GERMINATE, slot]
        actions[plant, Head.OP] = Op.GERMINATE
        for head, choice in ((Head.SLOT, slot), (Head.BLUEPRINT, blueprint), (Head.STYLE, style)):
            actions[plant, head] = choice[plant]
        return actions

    def _do(self, actions: Ints, op: Op, where: Bools) -> None:
        envs = where.any(axis=1)
        actions[envs, Head.OP], actions[envs, Head.SLOT] = op, where[envs].argmax(axis=1)
        actions[envs, Head.ALPHA_SPEED] = 0  # INSTANT


@dataclass(frozen=True, slots=True)
class EpisodeResults:
    """Results of a controller, per environment."""

    total: Floats  # [E] undiscounted return: in `utility` mode the final U
    discounted: Floats  # [E]
    quality: Floats  # [E] at the end


def simulate_episode(
    sim: Simulator, controller: Controller, config: RewardConfig, gamma: float = 0.995
) -> EpisodeResults:
    """Run one episode in every environment, from the first step, and return the results."""
    sim.reset()
    total = np.zeros(len(sim.worlds))
    discounted = np.zeros(len(sim.worlds))
    weight = 1.0
    before = Frame.of(sim.table, sim.context, sim.baseline_quality)
    for _ in rollout(sim, controller, sim.config.horizon):
        after = Frame.of(sim.table, sim.context, sim.baseline_quality)
        paid = reward(before, after, config)
        total = total + paid
        discounted = discounted + weight * paid
        weight = weight * gamma
        before = after
    return EpisodeResults(total, discounted, sim.table.quality.astype(np.float64))


def values(
    plans: Sequence[PlantingSequence],
    worlds: Sequence[int],
    sim: SimConfig,
    rules: Rules | None = None,
    config: RewardConfig | None = None,
    gamma: float = 1.0,
) -> Floats:
    """Return the noiseless return of every plan in every world, [W, P]."""
    quiet = msgspec.structs.replace(sim, noise=0.0)
    config = config or RewardConfig()
    pairs = [(world, plan) for world in worlds for plan in plans]
    returns = []
    for i in range(0, len(pairs), ENVS_AT_ONCE):
        some = pairs[i : i + ENVS_AT_ONCE]
        env = Simulator(quiet, [world for world, _ in some], rules)
        returns.append(simulate_episode(env, FollowPlans([plan for _, plan in some]), config, gamma).discounted)
    return np.concatenate(returns).reshape(len(worlds), len(plans))


def plantings(worlds: Sequence[int], sim: SimConfig) -> list[Planting]:
    """Return every slot with every allowed blueprint, each in the style that is strongest in the mean of these worlds.

    More strength is never worse, so for a single world this choice of style is optimal.
    """
    potential = draw_worlds(worlds, sim).potential  # [W, S, B]
    suits = np.stack([potential * OPERATOR_FIT[op] for op in Operator])  # [operators, W, S, B]
    suits[Operator.GATE] = np.where(potential < 0, potential * GATED_HARM, suits[Operator.GATE])
    best = suits.mean(axis=1).argmax(axis=0)  # [S, B]
    return [(s, b, _STYLE_OF[Operator(int(best[s, b]))]) for s in range(sim.slots) for b in sim.allowed]


def best_schedule(
    sim: SimConfig,
    worlds: Sequence[int],
    rules: Rules | None = None,
    config: RewardConfig | None = None,
    *,
    gamma: float = 1.0,
    beam: int | None = None,
    longest: int = 4,
) -> tuple[PlantingSequence, float]:
    """Return the plan with the highest mean return over these worlds, and that mean."""
    options = plantings(worlds, sim)
    best: tuple[PlantingSequence, float] = ((), float(values([()], worlds, sim, rules, config, gamma).mean()))
    plans: list[PlantingSequence] = [()]
    for _ in range(min(longest, sim.slots)):
        plans = [(*plan, new) for plan in plans for new in options if new[0] not in {p[0] for p in plan}]
        means = values(plans, worlds, sim, rules, config, gamma).mean(axis=0)
        order = np.argsort(-means, kind="stable")
        if means[order[0]] > best[1]:
            best = plans[order[0]], float(means[order[0]])
        plans = [plans[i] for i in (order if beam is None else order[:beam])]
    return best
