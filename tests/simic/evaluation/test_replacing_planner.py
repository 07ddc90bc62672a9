"""The replacing planner: legal actions, no use of surprises, and a lead over the informed planner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from esper.leyline.actions import Head, Op
from esper.leyline.paired import compare
from esper.simic.evaluation.comparison import play
from esper.simic.evaluation.informed_planner import InformedPlanner
from esper.simic.evaluation.replacing_planner import LEAST_AGE, ReplacingPlanner
from esper.simic.rewards import RewardConfig
from esper.simic.simulator import SimConfig, Simulator
from esper.tolaria.rollout import rollout

REWARD = RewardConfig()


@pytest.mark.parametrize("slots", [1, 3, 5])
def test_every_action_is_legal_and_seeds_are_replaced(slots):
    sim = Simulator(SimConfig(slots=slots), range(64))
    for step in rollout(sim, ReplacingPlanner(sim, REWARD), 40):
        assert step.result.happened.all()
        pruned = step.actions[:, Head.OP] == Op.PRUNE
        assert step.number >= LEAST_AGE or not pruned.any()
    assert (sim.table.next_serial > slots).any()


def test_first_planting_depends_on_expectations_only():
    sim, other = (Simulator(SimConfig(), range(32)) for _ in range(2))
    other.truth = replace(other.truth, potential=-other.truth.potential)
    for world in (sim, other):
        for _ in rollout(world, ReplacingPlanner(world, REWARD), 3):  # it plants at the third step
            pass
    assert np.array_equal(sim.table.blueprint, other.table.blueprint)
    assert (sim.table.blueprint >= 0).any()


def test_it_leads_over_the_informed_planner():
    worlds = range(5000, 5256)  # not those in which its constants were chosen
    sim = Simulator(SimConfig(), worlds)
    ours, theirs = (play(sim, planner(sim, REWARD), worlds, REWARD) for planner in (ReplacingPlanner, InformedPlanner))
    assert compare(ours.utility, theirs.utility).low > 0
