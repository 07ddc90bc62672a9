"""Scores of controllers in the same simulated worlds, from no growth to the oracle.

In the scoreboard seeds are born isolated, as in the episodes that the simulator was fitted to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from esper.leyline.actions import Op
from esper.leyline.lifecycle import Rules
from esper.leyline.slot_table import Bools, Ints, SlotTable
from esper.leyline.stages import SeedStage
from esper.simic.evaluation.sim_oracle import FollowPlans, PlantingSequence, best_schedule, simulate_episode
from esper.simic.rewards import RewardConfig
from esper.simic.simulator import SimConfig, Simulator
from esper.tamiyo.controllers import Controller, Heuristic, Random, Schedule, Wait
from tests.support.rules import ISOLATED

TYPICAL_RENT = 0.004


class FollowAndPrune(FollowPlans):
    """A controller that carries out plans and prunes seeds whose measurements are below a typical rent."""

    def act(self, table: SlotTable, legal: Bools) -> Ints:
        actions = super().act(table, legal)
        self._do(actions, Op.PRUNE, legal[:, Op.PRUNE] & unpromising(table))
        return actions


def unpromising(table: SlotTable) -> Bools:
    """Return [E, S] seeds that have trained for a while and seem to add less than a typical rent."""
    training = (table.stage == SeedStage.TRAINING) & (table.dwell >= 4) & (table.prospect < TYPICAL_RENT)
    holding = (table.stage == SeedStage.HOLDING) & (table.contribution < TYPICAL_RENT)
    return np.asarray(training | holding)


def oracle(
    sim: SimConfig, world: int, rules: Rules | None = None, *, beam: int | None = None, longest: int = 4
) -> tuple[PlantingSequence, float]:
    """Return the best plan of one world, and its noiseless return."""
    return best_schedule(sim, [world], rules, beam=beam, longest=longest)


@dataclass(frozen=True, slots=True)
class Score:
    """Mean results of one controller over some worlds."""

    name: str
    total: float
    discounted: float


def scoreboard(
    sim: SimConfig, worlds: Sequence[int], training_worlds: Sequence[int], *, beam: int | None = None
) -> list[Score]:
    """Return the scores; the best fixed schedule may be fitted to `training_worlds`."""
    plan, _ = best_schedule(sim, training_worlds, ISOLATED, beam=beam)
    controllers: dict[str, Controller] = {
        "none": Wait(),
        "random": Random(),
        "schedule": Schedule(),
        "heuristic": Heuristic(),
        "best fixed": FollowPlans([plan]),
        "best fixed, pruned": FollowAndPrune([plan]),
        "oracle": FollowPlans([oracle(sim, world, ISOLATED, beam=beam)[0] for world in worlds]),
    }
    env = Simulator(sim, worlds, ISOLATED)
    scores = []
    for name, controller in controllers.items():
        played = simulate_episode(env, controller, RewardConfig())
        scores.append(Score(name, float(np.mean(played.total)), float(np.mean(played.discounted))))
    return scores
