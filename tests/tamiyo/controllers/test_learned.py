"""Test a trained policy as a controller: legal, reproducible per world, and without state between steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from esper.leyline.actions import RELEVANCE, Head, Op
from esper.leyline.errors import ConfigError, DataError
from esper.leyline.lifecycle import Rules, is_legal, legal
from esper.simic.simulator import SimConfig, Simulator
from esper.tamiyo.controllers.learned import Learned
from esper.tamiyo.network import NetworkConfig, TamiyoNetwork
from esper.tamiyo.policy.action_masks import DEFAULT_FIXED
from esper.tamiyo.policy_file import save_policy


def make_network():
    torch.manual_seed(3)
    net = TamiyoNetwork(NetworkConfig(width=16, patience=-1.0))
    with torch.no_grad():
        for layer in (net.op_head[-1], net.slot_score, net.choices):
            layer.weight.mul_(30.0)
    return net


def play(controller, worlds, steps=25, rules=None):
    """Return the actions [T, E, 8] of one simulated episode. Assert that each is legal."""
    sim = Simulator(SimConfig(horizon=steps), worlds, rules)
    controller.bind(sim.context, worlds)
    result = []
    for _ in range(steps):
        actions = controller.act(sim.table, legal(sim.table, sim.rules))
        assert is_legal(sim.table, actions, sim.rules).all()
        assert sim.step(actions).happened.all()
        result.append(actions)
    return np.stack(result)


@pytest.mark.parametrize("sample", [True, False])
def test_episode_is_legal_and_uses_several_operations(sample):
    actions = play(Learned(make_network(), sample=sample), range(12))
    assert len(np.unique(actions[..., Head.OP])) > (2 if sample else 1)
    for head, option in DEFAULT_FIXED.items():
        assert (actions[RELEVANCE[actions[..., Head.OP], head]][:, head] == option).all()


def test_actions_are_determined_by_world_and_seed():
    controller = Learned(make_network())
    once = play(controller, range(8))
    np.testing.assert_array_equal(play(controller, range(8)), once)
    assert (play(controller, range(100, 108)) != once).any()
    assert (play(Learned(make_network(), rng_seed=1), range(8)) != once).any()


@pytest.mark.parametrize("sample", [True, False])
def test_actions_do_not_depend_on_other_worlds(sample):
    together = play(Learned(make_network(), sample=sample), [5, 9, 2, 7])
    for place, world in enumerate([5, 9, 2, 7]):
        np.testing.assert_array_equal(play(Learned(make_network(), sample=sample), [world])[:, 0], together[:, place])


def test_greedy_actions_do_not_depend_on_the_seed():
    greedy = [play(Learned(make_network(), sample=False, rng_seed=s), range(6)) for s in (0, 1)]
    np.testing.assert_array_equal(*greedy)
    assert (play(Learned(make_network(), rng_seed=0), range(6)) != greedy[0]).any()


@pytest.mark.parametrize("sample", [True, False])
def test_actions_depend_on_the_current_table_only(sample):
    controller = Learned(make_network(), sample=sample)
    sim = Simulator(SimConfig(horizon=30), range(4))
    controller.bind(sim.context, range(4))
    for _ in range(10):
        sim.step(controller.act(sim.table, legal(sim.table, sim.rules)))
    sim.table.reset([1, 3])
    now = legal(sim.table, sim.rules)
    fresh = Learned(make_network(), sample=sample)
    fresh.bind(sim.context, range(4))
    np.testing.assert_array_equal(controller.act(sim.table, now), fresh.act(sim.table, now))


def test_number_of_environments_may_change_at_bind():
    controller = Learned(make_network())
    first = play(controller, range(3))
    play(controller, range(5))
    np.testing.assert_array_equal(play(controller, range(3)), first)


def test_fixed_heads_are_configurable():
    free = play(Learned(make_network(), fixed={}), range(16), rules=Rules(min_prune_age=1))
    planted = free[free[..., Head.OP] == Op.GERMINATE]
    assert len(np.unique(planted[:, Head.TEMPO])) > 1
    fixed = play(Learned(make_network(), fixed={Head.TEMPO: 2}), range(16))
    assert (fixed[fixed[..., Head.OP] == Op.GERMINATE][:, Head.TEMPO] == 2).all()


def test_act_before_bind_raises():
    sim = Simulator(SimConfig(), range(2))
    with pytest.raises(ConfigError, match="bind"):
        Learned(make_network()).act(sim.table, legal(sim.table, sim.rules))


def test_loaded_policy_acts_as_the_saved_network(tmp_path):
    save_policy(make_network(), tmp_path / "policy.safetensors", fixed=DEFAULT_FIXED)
    np.testing.assert_array_equal(play(Learned.load(tmp_path), range(4)), play(Learned(make_network()), range(4)))
    with pytest.raises(DataError):
        Learned.load(tmp_path / "nothing")
