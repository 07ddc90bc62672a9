"""Settings of simulated worlds: defaults change nothing, each has its effect, wrong values are refused."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from esper.leyline.actions import BLUEPRINTS, Head, Op
from esper.leyline.errors import ConfigError, UnknownNameError
from esper.simic.evaluation.informed_planner import InformedPlanner
from esper.simic.evaluation.replacing_planner import ReplacingPlanner
from esper.simic.evaluation.sim_oracle import best_schedule
from esper.simic.rewards import RewardConfig
from esper.simic.simulated_worlds import LEAST_CEILING, LEAST_ROOM, MOST_CEILING, SimConfig, draw_worlds
from esper.simic.simulator import Simulator
from esper.tamiyo.controllers import Random
from esper.tolaria.rollout import rollout

ONLY_HEAVY = SimConfig(blueprints=("conv_heavy",), horizon=12)
HEAVY = BLUEPRINTS.index("conv_heavy")


@pytest.mark.parametrize(
    ("config", "scale", "potential"),
    [
        (SimConfig(), 0.07254133746881981, -0.0070169381910733936),
        (SimConfig(slots=5, gain=0.1, kind_spread=0.7), 0.12204462244547801, -0.012524893045003352),
    ],
)
def test_worlds_equal_those_recorded_before_their_constants_were_settings(config, scale, potential):
    """Equal to rounding: NumPy's exponentials depend on the processor in the last bit."""
    drawn = draw_worlds(range(64), config)
    recorded = {
        "ceiling": 0.7355562224263287,
        "pace": 4.044073254074827,
        "room": 0.1623828211273702,
        "overfit": 0.15443729618944807,
        "scale": scale,
        "potential": potential,
    }
    assert {name: getattr(drawn, name).mean() for name in recorded} == pytest.approx(recorded, rel=1e-9)


@pytest.mark.parametrize(
    ("change", "column", "mean", "sd"),
    [
        ({"ceiling": 0.5, "ceiling_spread": 0.02}, lambda w: w.ceiling, 0.5, np.hypot(0.02, 0.01)),
        ({"pace": 2.0, "pace_spread": 0.5}, lambda w: np.log(w.pace), np.log(2.0), np.hypot(0.5, 0.05)),
        ({"room": 0.5, "room_spread": 0.1}, lambda w: w.room, 0.5, 0.1),
        ({"overfit": -0.5, "overfit_spread": 0.1}, lambda w: w.overfit, -0.5, np.hypot(0.1, 0.02)),
        ({"gain_spread": 0.8, "slot_spread": 0.0}, lambda w: np.log(w.scale[:, 0]), np.log(0.06), 0.8),
    ],
)
def test_setting_determines_mean_and_spread_over_worlds(change, column, mean, sd):
    values = column(draw_worlds(range(4000), SimConfig(**change)))
    assert values.mean() == pytest.approx(mean, abs=0.06 * sd)
    assert values.std() == pytest.approx(sd, rel=0.05)


def test_factors_scale_the_costs_of_seeds_only():
    one, other = (Simulator(c, [0]).context for c in (SimConfig(), SimConfig(seed_params=3.0, seed_macs=0.5)))
    assert (one.host_params, one.host_macs) == (other.host_params, other.host_macs)
    np.testing.assert_array_equal(other.slot_params, 3 * one.slot_params)
    np.testing.assert_allclose(other.slot_macs, 0.5 * one.slot_macs, atol=0.5)


def test_wide_spreads_stay_in_range():
    drawn = draw_worlds(range(500), SimConfig(ceiling_spread=0.5, room_spread=0.5, overfit=-0.1, overfit_spread=0.5))
    assert drawn.ceiling.min() == LEAST_CEILING
    assert drawn.ceiling.max() == MOST_CEILING
    assert drawn.room.min() == LEAST_ROOM
    assert drawn.overfit.min() >= -1.0
    assert drawn.overfit.max() == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ceiling": 0.1}, "ceiling must lie in 0.15…0.98, got 0.1"),
        ({"ceiling": 1.0}, "ceiling must lie in"),
        ({"ceiling_spread": -0.1}, "ceiling_spread must be ≥ 0"),
        ({"pace": 0.0}, "pace must be > 0"),
        ({"seed_params": 0.0}, "seed_params must be > 0"),
        ({"seed_macs": float("inf")}, "seed_macs must be > 0"),
        ({"pace_spread": float("nan")}, "pace_spread must be ≥ 0"),
        ({"gain": float("inf")}, "gain must be ≥ 0 and at most 100, got inf"),
        ({"seed_params": 1e17}, "seed_params must be > 0, from 1e-4 to 1e4"),
        ({"room": 0.0}, "room must be above 0"),
        ({"room": 1.5}, "room must be above 0 and at most 1"),
        ({"room_spread": -1.0}, "room_spread must be ≥ 0"),
        ({"gain_spread": -1.0}, "gain_spread must be ≥ 0"),
        ({"overfit": 0.6}, "overfit must lie in"),
        ({"overfit_spread": -1.0}, "overfit_spread must be ≥ 0"),
    ],
)
def test_setting_out_of_range_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        SimConfig(**change)


@pytest.mark.parametrize("name", ["conv_havy", "lora", "noop"])
def test_blueprint_that_is_not_for_feature_maps_is_refused(name):
    with pytest.raises(UnknownNameError, match="blueprint of simulated slots"):
        SimConfig(blueprints=(name,))


def test_only_allowed_blueprints_are_planted():
    sim = Simulator(ONLY_HEAVY, range(32))
    planted = set()
    for _ in rollout(sim, Random(3), ONLY_HEAVY.horizon):
        planted |= set(sim.table.blueprint[sim.table.serial >= 0].tolist())
    assert planted == {HEAVY}


@pytest.mark.parametrize("config", [ONLY_HEAVY, msgspec.structs.replace(ONLY_HEAVY, gain=2.0, surprise=2.0)])
@pytest.mark.parametrize("planner", [InformedPlanner, ReplacingPlanner])
def test_planners_plant_allowed_blueprints_only(planner, config):
    sim = Simulator(config, range(64))
    steps = list(rollout(sim, planner(sim, RewardConfig()), config.horizon))
    chosen = np.concatenate([s.actions[s.actions[:, Head.OP] == Op.GERMINATE, Head.BLUEPRINT] for s in steps])
    assert set(chosen.tolist()) == {HEAVY}


def test_best_schedule_plants_allowed_blueprints_only():
    plan, _ = best_schedule(ONLY_HEAVY, range(16), beam=8)
    assert {blueprint for _, blueprint, _ in plan} == {HEAVY}


def test_restriction_changes_nothing_else():
    free, restricted = (
        draw_worlds(range(16), msgspec.structs.replace(SimConfig(), blueprints=b)) for b in ((), ("norm",))
    )
    for field in dataclasses.fields(free):
        np.testing.assert_array_equal(getattr(free, field.name), getattr(restricted, field.name))
