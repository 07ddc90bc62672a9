"""Test that `Select` plants every slot once, prunes the least useful seeds and ends within its limit."""

from __future__ import annotations

import numpy as np
import pytest

from esper.kasmina.lifecycle import Rules
from esper.leyline.actions import BLUEPRINTS, Head, Op
from esper.leyline.slot_table import live_costs
from esper.leyline.stages import SeedStage
from esper.simic.simulator import SimConfig, Simulator
from esper.tamiyo.controllers.select import Select
from esper.tolaria.rollout import rollout

OPEN = Rules(birth="open")


def simulator() -> Simulator:
    return Simulator(SimConfig(slots=3), range(4), OPEN)


def full_macs(sim: Simulator) -> int:
    blueprint = BLUEPRINTS.index("conv_heavy")
    return int(sim.context.host_macs + sim.context.slot_macs[:, blueprint].sum())


@pytest.mark.parametrize("share", [0.4, 0.7, 1.0])
def test_final_network_is_within_the_limit_and_committed(share):
    sim = simulator()
    limit = sim.context.host_macs + share * (full_macs(sim) - sim.context.host_macs)
    for _ in rollout(sim, Select(sim.context, limit, ["conv_heavy"], judge_from=8), 30):
        pass
    assert (live_costs(sim.table, sim.context)[1] <= limit).all()
    assert (sim.table.next_serial == 3).all()  # every slot was planted once
    occupied = sim.table.blueprint >= 0
    assert (sim.table.stage[occupied & (sim.table.cooldown == 0)] == SeedStage.FOSSILIZED).all()
    assert (share < 1.0) == bool((sim.table.stage == SeedStage.DORMANT).any())


def test_least_useful_seed_per_multiply_add_is_pruned_first():
    sim = simulator()
    controller = Select(sim.context, sim.context.host_macs, ["conv_heavy"], judge_from=8, z=1.0)
    for step in rollout(sim, controller, 9):
        if (step.actions[:, Head.OP] == Op.PRUNE).any():
            break
    assert (step.actions[:, Head.OP] == Op.PRUNE).all()
    fresh = simulator()
    for _ in rollout(fresh, controller, 8):
        pass
    table, macs = fresh.table, fresh.context.slot_macs[:, BLUEPRINTS.index("conv_heavy")]
    value = (table.contribution - table.contribution_se) / macs
    assert (step.actions[:, Head.SLOT] == np.nanargmin(value, axis=1)).all()


def test_nothing_is_pruned_before_the_first_judgement():
    sim = simulator()
    for step in rollout(sim, Select(sim.context, 1.0, ["conv_heavy"], judge_from=12), 12):
        assert not (step.actions[:, Head.OP] == Op.PRUNE).any()
