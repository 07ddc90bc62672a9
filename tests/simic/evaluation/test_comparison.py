"""Comparing controllers: the same worlds for all."""

import dataclasses

import numpy as np
import pytest

from esper.leyline.actions import Operator
from esper.simic.env import HostBackend
from esper.simic.evaluation.comparison import AT_ONCE, from_start, play, static
from esper.simic.rewards import RewardConfig
from esper.simic.simulator import SimConfig, Simulator
from esper.tamiyo.controllers import Random, Schedule, Wait
from esper.tamiyo.controllers.learned import Learned
from esper.tamiyo.network import TamiyoNetwork
from esper.tolaria.tasks import get_task

REWARD = RewardConfig()


@pytest.fixture(scope="module")
def backend():
    return HostBackend(dataclasses.replace(get_task("digits"), epochs=18))


def test_simulated_worlds_do_not_depend_on_controller_or_other_worlds():
    sim = Simulator(SimConfig(), [0])
    for controller in (Random, Schedule):
        many = play(sim, controller(), range(100, 132), REWARD, "schedule")
        few = play(sim, controller(), range(110, 114), REWARD)
        assert np.array_equal(many.utility[10:14], few.utility)
        assert np.array_equal(many.params[10:14], few.params)
    nothing = play(sim, Wait(), range(100, 132), REWARD)
    assert np.array_equal(nothing.utility, np.zeros(32))
    assert (many.params >= nothing.params).all()
    assert (many.params > nothing.params).mean() > 0.8  # a seed still in training at the end is not counted
    assert np.isnan(many.test).all()  # a simulated host has no test split


def test_trained_policy_is_deterministic_in_the_same_worlds():
    sim = Simulator(SimConfig(), [0])
    learned = Learned(TamiyoNetwork())
    first = play(sim, learned, range(16), REWARD)
    again = play(sim, learned, range(16), REWARD)
    assert np.array_equal(first.utility, again.utility)
    alone = play(sim, learned, [7], REWARD)
    assert alone.utility[0] == pytest.approx(first.utility[7], abs=1e-6)


def test_real_hosts_are_measured_on_test_data_against_their_baselines(backend):
    worlds = list(range(20, 20 + AT_ONCE + 1))  # more than run side by side
    nothing = play(backend, Wait(), worlds, REWARD, "none")
    assert nothing.worlds == worlds
    assert np.allclose(nothing.utility, 0.0)  # no growth is its own baseline, and pays no rent
    assert ((nothing.test > 0.1) & (nothing.test < 1.0)).all()
    grown = play(backend, Schedule(), worlds[:2], REWARD, "schedule")
    assert (grown.params > nothing.params[:2]).all()
    assert (grown.macs > nothing.macs[:2]).all()
    assert grown.structures[0]["r0c0"] == ("mlp_small", Operator.ADD)

    same = from_start(backend, grown, REWARD, "from start")
    assert np.array_equal(same.params[0], backend.context.host_params + sum(
        backend.engine.networks[0].body.slots[s].seed is not None and backend.table.params[0, i]
        for i, s in enumerate(backend.slots)
    ))  # fmt: skip
    assert [set(s) for s in same.structures] == [set(s) for s in grown.structures]


def test_static_hosts_are_charged_for_their_size_against_the_same_baseline(backend):
    size = 3 * backend.context.host_params
    wide = static(backend, backend.task.widened(size), [20, 21], REWARD, "wider")
    assert (wide.params >= size).all()
    baseline = backend.baselines.curves([20, 21])[:, -1]
    doublings = np.log2(wide.params / backend.context.host_params), np.log2(wide.macs / backend.context.host_macs)
    rent = REWARD.rent_params * doublings[0] + REWARD.rent_macs * doublings[1]
    assert np.allclose(wide.utility, wide.quality - baseline - rent, atol=1e-6)
    same_host = static(backend, backend.task, [20], REWARD, "same")
    assert np.allclose(same_host.utility, 0.0, atol=1e-6)


def test_deeper_host_keeps_its_pools_and_wider_one_its_depth():
    task = get_task("rescue")
    deep = task.deepened(3000)
    assert deep.host_kwargs["blocks"] > task.host_kwargs["blocks"]
    assert deep.host_kwargs["pools"] == 3
    assert sum(p.numel() for p in deep.build_host(0).parameters()) >= 3000
    assert get_task("moby").deepened(200_000).host_kwargs["layers"] > 3


def test_random_play_is_no_better_than_no_growth_in_the_simulator():
    sim = Simulator(SimConfig(), [0])
    played = play(sim, Random(), range(256), REWARD)
    assert abs(played.utility.mean()) < 0.01
