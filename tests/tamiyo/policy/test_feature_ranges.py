"""Ranges of the observations in training, and warnings about models outside them."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.leyline.errors import DataError
from esper.simic.simulated_worlds import SimConfig
from esper.simic.simulator import Simulator
from esper.simic.training.config import load_config
from esper.simic.training.vectorized import train_ppo_vectorized
from esper.tamiyo.controllers.learned import Learned
from esper.tamiyo.network import NetworkConfig, TamiyoNetwork
from esper.tamiyo.policy.action_masks import DEFAULT_FIXED
from esper.tamiyo.policy.feature_ranges import COLUMNS, FeatureRanges
from esper.tamiyo.policy.feature_table import BASE, ENV_COLUMN, PER_SLOT, SLOT_COLUMN
from esper.tamiyo.policy.features import num_features
from esper.tamiyo.policy_file import load_ranges, save_policy


def observations(count: int, slots: int, seed: int = 0) -> torch.Tensor:
    obs = torch.rand(count, num_features(slots), generator=torch.Generator().manual_seed(seed)) * 0.5
    obs[:, BASE:].unflatten(-1, (-1, PER_SLOT))[..., SLOT_COLUMN["enabled"]] = 1.0
    return obs


def test_values_within_the_ranges_are_not_outside_and_others_are_named() -> None:
    ranges, obs = FeatureRanges(), observations(40, 3)
    assert not ranges.is_known
    ranges.add(obs)
    assert ranges.is_known
    slots = ["a", "b", "c"]
    assert all(not ranges.outside(row, slots) for row in obs)
    odd = obs[0].clone()
    odd[ENV_COLUMN["host_params"]] = 0.9
    odd[BASE + PER_SLOT + SLOT_COLUMN["width"]] = -0.5
    assert [each.name for each in ranges.outside(odd, slots)] == ["host_params", "width of b"]
    assert "host_params 0.9 (trained with" in str(ranges.outside(odd, slots)[0])


def test_number_of_slots_counts_and_disabled_slots_do_not() -> None:
    ranges = FeatureRanges()
    ranges.add(observations(40, 3))
    five = observations(1, 5, seed=1)
    assert [each.name for each in ranges.outside(five[0], list("abcde"))] == ["number of slots"]
    slots = five[:, BASE:].unflatten(-1, (-1, PER_SLOT))
    slots[:, 3:] = 0.0
    slots[:, 3:, SLOT_COLUMN["width"]] = 77.0
    assert ranges.outside(five[0], list("abcde")) == []
    ranges.add(five)
    assert float(ranges.bounds[1, BASE + SLOT_COLUMN["width"]]) < 1.0


def test_ranges_are_stored_with_the_policy_and_checked(tmp_path: Path) -> None:
    ranges, file = FeatureRanges(), tmp_path / "policy.safetensors"
    network = TamiyoNetwork(NetworkConfig(width=8))
    save_policy(network, file, fixed=DEFAULT_FIXED, ranges=ranges)
    assert load_ranges(file) is None  # nothing was observed
    ranges.add(observations(10, 3))
    save_policy(network, file, fixed=DEFAULT_FIXED, ranges=ranges)
    again = load_ranges(tmp_path)
    assert again is not None
    assert torch.equal(again.bounds, ranges.bounds)
    with pytest.raises(DataError, match="shape"):
        FeatureRanges(torch.zeros(2, COLUMNS - 1))


def test_training_stores_the_ranges_of_all_its_observations(tmp_path: Path) -> None:
    sets = ["simulated=true", "rounds=2", "envs=4", "worlds=8", "epochs=9", "ppo.minibatches=2", "network.width=8",
            "checkpoint_share=1"]  # fmt: skip
    train_ppo_vectorized(load_config(sets=sets), directory=tmp_path)
    ranges = load_ranges(tmp_path)
    assert ranges is not None
    low, high = ranges.bounds
    assert (float(low[ENV_COLUMN["time"]]), float(high[ENV_COLUMN["time"]])) == pytest.approx((0.0, 8 / 9))
    assert (float(low[-1]), float(high[-1])) == (3.0, 3.0)
    more = tmp_path / "more"
    more.mkdir()
    longer = [s for s in sets if not s.startswith("epochs")] + ["epochs=19", f"start_from={tmp_path}"]
    train_ppo_vectorized(load_config(sets=longer), directory=more)
    wider = load_ranges(more)
    assert wider is not None
    assert (wider.bounds[0] <= low).all()
    assert float(wider.bounds[1, ENV_COLUMN["steps_left"]]) > float(high[ENV_COLUMN["steps_left"]])


def controller(ranges: FeatureRanges) -> Learned:
    torch.manual_seed(0)
    return Learned(TamiyoNetwork(NetworkConfig(width=8)), ranges=ranges)


def test_controller_warns_once_about_a_model_outside_the_ranges() -> None:
    sim = Simulator(SimConfig(horizon=6), [0, 1])
    ranges = FeatureRanges()
    ranges.add(observations(3, 3))
    ranges.bounds[0, :-1], ranges.bounds[1, :-1] = -1.0, 1.0  # everything but the number of slots
    inside = controller(ranges)
    inside.bind(sim.context)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inside.act(sim.table, sim.legal)
    assert inside.outside_text() == ""
    big = controller(ranges)
    big.bind(replace(sim.context, host_params=2**31))
    ranges.bounds[1, ENV_COLUMN["host_params"]] = 0.5
    with pytest.warns(UserWarning, match="outside what the policy was trained on.*host_params"):
        actions = big.act(sim.table, sim.legal)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        big.act(sim.table, sim.legal)
    without = Learned(big.network)
    without.bind(replace(sim.context, host_params=2**31))
    np.testing.assert_array_equal(without.act(sim.table, sim.legal), actions)  # no effect on decisions
