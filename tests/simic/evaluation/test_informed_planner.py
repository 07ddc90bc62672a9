"""The informed planner: legal actions, no use of surprises, and a place between the best schedule and the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from esper.leyline.actions import Head, Op
from esper.leyline.lifecycle import Rules
from esper.leyline.stages import SeedStage
from esper.simic.evaluation.comparison import play
from esper.simic.evaluation.informed_planner import InformedPlanner
from esper.simic.evaluation.sim_oracle import FollowPlans, best_schedule
from esper.simic.rewards import RewardConfig
from esper.simic.simulated_worlds import draw_worlds
from esper.simic.simulator import SimConfig, Simulator
from esper.tolaria.rollout import rollout
from tests.support.rules import ISOLATED

REWARD = RewardConfig()


@pytest.mark.parametrize("rules", [Rules(), ISOLATED], ids=["open", "isolated"])
def test_every_action_is_legal_and_worthless_seeds_are_replaced(rules):
    sim = Simulator(SimConfig(), range(64), rules)
    steps = list(rollout(sim, InformedPlanner(sim, REWARD), 40))
    assert all(step.result.happened.all() for step in steps)
    ops = np.array([step.actions[:, Head.OP] for step in steps])
    assert (ops == Op.PRUNE).sum() > 10
    occupied = ((sim.table.stage > SeedStage.DORMANT) & (sim.table.stage <= SeedStage.FOSSILIZED)).sum(axis=1)
    assert (sim.table.next_serial > occupied).any()
    assert not (ops[:2] == Op.GERMINATE).any()  # it waits until a policy has seen the host


def test_first_plantings_depend_on_expectations_only():
    sim, other = (Simulator(SimConfig(), range(64)) for _ in range(2))
    other.truth = replace(other.truth, potential=-other.truth.potential)
    for _ in range(2):
        for s in (sim, other):
            s.step(np.zeros((64, 8), dtype=np.int64))
    first, second = (InformedPlanner(s, REWARD).act(s.table, s.legal) for s in (sim, other))
    assert (first[:, Head.OP] == Op.GERMINATE).any()
    np.testing.assert_array_equal(first, second)


def test_expected_potential_is_the_mean_over_prediction_errors():
    """Without surprise and bad seeds the potential is the expected one; otherwise the mean of many worlds is close."""
    certain = draw_worlds(range(50), SimConfig(surprise=0.0, bad_share=0.0, stillborn_share=0.0))
    np.testing.assert_allclose(certain.potential, certain.expected)
    many = draw_worlds(range(4000), SimConfig())
    np.testing.assert_allclose(many.potential.mean(axis=0), many.expected.mean(axis=0), atol=2.5e-3)


def test_planner_lies_between_the_best_schedule_and_the_oracle():
    worlds = range(30_000, 30_024)
    sim = Simulator(SimConfig(), worlds)
    plan, _ = best_schedule(SimConfig(), range(16), beam=8)
    oracle = FollowPlans([best_schedule(SimConfig(), [world], beam=8)[0] for world in worlds])
    controllers = (FollowPlans([plan]), InformedPlanner(sim, REWARD), oracle)
    fixed, informed, best = (play(sim, c, list(worlds), REWARD).utility.mean() for c in controllers)
    assert fixed + 0.01 < informed < best
