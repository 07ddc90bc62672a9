"""The environments: Gymnasium's contracts, seeds as worlds, rounds, illegal actions, and third-party learners."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline.actions import Head, Op
from esper.leyline.errors import ConfigError, UnknownNameError
from esper.leyline.lifecycle import Rules, is_legal
from esper.leyline.stages import SeedStage
from esper.simic.env import GrowthVectorEnv, HostBackend
from esper.simic.rewards import REWARDS, Frame, RewardConfig, reward, utility
from esper.simic.simulator import SimConfig, Simulator
from esper.simic.single_env import GrowthEnv
from esper.tamiyo.controllers import wait_everywhere
from esper.tamiyo.policy.action_masks import CANONICAL, DEFAULT_FIXED
from esper.tolaria.tasks import get_task
from tests.support.random_tables import LIVELY, random_actions, random_legal_actions

HORIZON = 12
SIM = SimConfig(horizon=HORIZON)
DIGITS = replace(get_task("digits"), epochs=4, batches_per_epoch=2, val_size=60)
BRISK = Rules(min_prune_age=1)


def sim_env(envs: int = 3, rules: Rules = LIVELY, **settings: Any) -> GrowthVectorEnv:
    return GrowthVectorEnv(Simulator(SIM, range(envs), rules), range(envs), **settings)


def one(worlds: tuple[int, ...] = (0,), rules: Rules = LIVELY, **settings: Any) -> GrowthEnv:
    return GrowthEnv(Simulator(SIM, [0], rules), worlds, **settings)


def digits() -> GrowthEnv:
    return GrowthEnv(HostBackend(DIGITS, rules=BRISK))


# ---- Gymnasium's contracts


@pytest.mark.parametrize("make", [one, digits])
def test_gymnasium_checker_passes(make: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make(), skip_render_check=True)


def test_spaces_are_one_box_and_eight_heads() -> None:
    env = sim_env()
    assert isinstance(env.single_observation_space, gym.spaces.Box)
    assert env.single_action_space == gym.spaces.MultiDiscrete([3, 13, 4, 3, 3, 4, 5, 6])
    assert env.observation_space.shape == (3, *env.single_observation_space.shape)
    assert env.action_space.shape == (3, 8)
    assert env.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    assert (env.single_observation_space.low, env.single_observation_space.high) == (
        pytest.approx(-1),
        pytest.approx(1),
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_observations_stay_in_the_box_for_any_actions(dice: int, only_legal: bool) -> None:
    env, rng = sim_env(4), np.random.default_rng(dice)
    obs, info = env.reset(seed=dice)
    for _ in range(HORIZON):
        assert env.observation_space.contains(obs)
        assert info["masks"].shape == (4, env.layout.size)
        table = env.backend.table
        actions = random_legal_actions(table, LIVELY, rng) if only_legal else random_actions(table, rng)
        obs, paid, _, _, info = env.step(actions)
        assert paid.shape == (4,)
        assert paid.dtype == np.float32
        assert np.isfinite(paid).all()
    assert env.observation_space.contains(obs)


def test_end_is_reported_once_and_the_next_step_starts_a_round() -> None:
    env = sim_env(2)
    first, _ = env.reset()
    for t in range(HORIZON):
        obs, paid, ended, cut, _ = env.step(wait_everywhere(2))
        assert ended.tolist() == [t == HORIZON - 1] * 2  # all at once: the training loop relies on it
        assert not cut.any()
    assert env.round == 0
    obs, paid, ended, cut, _ = env.step(env.action_space.sample())
    assert env.round == 1
    assert not ended.any()
    assert not cut.any()
    np.testing.assert_array_equal(paid, 0.0)
    np.testing.assert_array_equal(obs, first)
    assert not env.backend.table.step.any()
    assert not env.step(wait_everywhere(2))[2].any()


def test_returned_arrays_are_never_written_again() -> None:
    env, rng = sim_env(3), np.random.default_rng(0)
    originals, copies = [], []
    result: tuple[Any, ...] = env.reset()
    for _ in range(HORIZON):
        arrays = [*result[:-1], *result[-1].values()]
        originals.append(arrays)
        copies.append([a.copy() for a in arrays])
        result = env.step(random_legal_actions(env.backend.table, LIVELY, rng))
    for arrays, before in zip(originals, copies, strict=True):
        for a, b in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(a, b)


def test_infos_are_compatible_with_gymnasium_wrappers() -> None:
    env = DictInfoToList(sim_env(2))
    _, infos = env.reset()
    assert [sorted(i) for i in infos] == [["happened", "masks", "quality", "utility"]] * 2
    content = env.step(wait_everywhere(2))[-1]
    assert content[0]["quality"] != content[1]["quality"]


def test_gymnasium_wrapper_counts_episodes() -> None:
    inner = sim_env(2)
    env = RecordEpisodeStatistics(inner)
    env.reset()
    earned = np.zeros(2)
    rng = np.random.default_rng(1)
    for _ in range(HORIZON):
        _, paid, _, _, info = env.step(random_legal_actions(inner.backend.table, LIVELY, rng))
        earned += paid
    np.testing.assert_array_equal(info["episode"]["l"], HORIZON)
    np.testing.assert_allclose(info["episode"]["r"], earned, rtol=1e-5)
    np.testing.assert_allclose(earned, info["utility"], atol=1e-6)  # rewards add up to the final utility


def test_gymnasium_vector_of_single_environments_equals_ours() -> None:
    theirs, ours = SyncVectorEnv([partial(one, (w,)) for w in range(3)]), sim_env(3)
    np.testing.assert_array_equal(theirs.reset()[0], ours.reset()[0])
    rng = np.random.default_rng(2)
    for _ in range(HORIZON + 3):
        actions = random_legal_actions(ours.backend.table, LIVELY, rng)
        a, b = theirs.step(actions), ours.step(actions)
        for x, y in zip(a[:-1], b[:-1], strict=True):
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
        assert a[-1].keys() == b[-1].keys()
        for key, value in b[-1].items():
            np.testing.assert_array_equal(a[-1][key], value, err_msg=key)


def test_step_without_reset_is_refused() -> None:
    for env in (sim_env(), one()):
        with pytest.raises(gym.error.ResetNeeded, match="reset"):
            env.step(env.action_space.sample())
    env = one()
    env.reset()
    for _ in range(HORIZON):
        env.step(CANONICAL)
    with pytest.raises(gym.error.ResetNeeded, match="over"):
        env.step(CANONICAL)
    env.reset()
    env.step(CANONICAL)


# ---- worlds, seeds and rounds


def test_reset_seed_selects_the_world() -> None:
    env = sim_env(3)
    env.reset(seed=7)
    assert env.backend.worlds == [7, 8, 9]
    env.reset(seed=np.int64(7))
    assert env.backend.worlds == [7, 8, 9]
    env.reset(seed=[5, None, 6])
    assert env.backend.worlds == [5, 1, 6]
    single = one((3, 4))
    single.reset(seed=9)
    assert single.env.backend.worlds == [9]


def test_reset_seed_restarts_the_round_count() -> None:
    env = GrowthVectorEnv(Simulator(SIM, [0, 1]), lambda n: [10 * n, 10 * n + 1])
    worlds = []
    for _ in range(2):
        env.reset(seed=3)
        for _ in range(3):
            env.reset()
            worlds.append(env.backend.worlds)
    assert worlds == [[10, 11], [20, 21], [30, 31]] * 2


def test_rounds_cycle_through_the_worlds() -> None:
    env = one((3, 4, 9))
    worlds = []
    for _ in range(4):
        env.reset()
        worlds += env.env.backend.worlds
    assert worlds == [3, 4, 9, 3]


def test_options_select_worlds() -> None:
    env = sim_env(2)
    env.reset(options={"worlds": np.array([8, 0])}, seed=4)
    assert env.backend.worlds == [8, 0]
    with pytest.raises(ConfigError, match="2 environments and 3 worlds"):
        env.reset(options={"worlds": [1, 2, 3]})
    with pytest.raises(UnknownNameError, match="worlds"):
        env.reset(options={"world": [1, 2]})


def test_environment_needs_a_world() -> None:
    with pytest.raises(ConfigError, match="at least one world"):
        one(())
    with pytest.raises(ConfigError, match="at least one world"):
        sim_env(1).__class__(Simulator(SIM, [0]), [])


@pytest.mark.parametrize("make", [one, digits])
def test_same_seed_and_actions_give_the_same_episode(make: Any) -> None:
    episodes = []
    for _ in range(2):
        env = make()
        content = [env.reset(seed=11)]
        env.action_space.seed(5)
        while True:
            content.append(env.step(env.action_space.sample(mask=None)))
            if content[-1][2]:
                break
        episodes.append(content)
    for a, b in zip(*episodes, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
        assert a[1:-1] == b[1:-1]


def test_different_worlds_give_different_episodes() -> None:
    env = sim_env(2)
    env.reset()
    _, _, _, _, info = env.step(wait_everywhere(2))
    assert info["quality"][0] != info["quality"][1]


# ---- effects and rewards of actions


def test_illegal_action_does_nothing_and_is_flagged() -> None:
    plain, odd = sim_env(1), sim_env(1)
    plain.reset()
    odd.reset()
    rng, refused = np.random.default_rng(0), 0
    for _ in range(HORIZON):
        actions = random_actions(odd.backend.table, rng)
        actions[:, Head.SLOT] += rng.integers(0, 2) * 100  # out of range altogether
        if is_legal(odd.backend.table, actions, LIVELY).all():
            actions = wait_everywhere(1)
        a, b = odd.step(actions), plain.step(wait_everywhere(1))
        np.testing.assert_array_equal(a[0], b[0])
        np.testing.assert_array_equal(a[1], b[1])
        refused += not a[-1]["happened"][0]
    assert refused > HORIZON // 3


def test_actions_of_another_shape_are_refused() -> None:
    env = sim_env(2)
    env.reset()
    for shape in ((8,), (2, 7), (3, 8)):
        with pytest.raises(ConfigError, match="shape"):
            env.step(np.zeros(shape, np.int64))


@pytest.mark.parametrize("odd", [np.nan, np.inf, 0.5])
def test_actions_that_are_not_integers_are_refused(odd: float) -> None:
    env = sim_env(2)
    env.reset()
    actions = np.zeros((2, 8))
    env.step(actions)  # integral floats are accepted
    actions[1, 3] = odd
    with pytest.raises(ConfigError, match="finite integers"):
        env.step(actions)


@pytest.mark.parametrize("mode", REWARDS)
def test_reward_is_for_the_state_the_step_led_to(mode: str) -> None:
    config = RewardConfig(mode=mode, scale=2.0)
    env, rng = sim_env(4, reward=config), np.random.default_rng(3)
    env.reset()
    by_hand = Simulator(SIM, range(4), LIVELY)
    before = Frame.of(by_hand.table, by_hand.context, by_hand.baseline_quality)
    for _ in range(HORIZON):
        actions = random_legal_actions(env.backend.table, LIVELY, rng)
        paid = env.step(actions)[1]
        by_hand.step(actions)
        after = Frame.of(by_hand.table, by_hand.context, by_hand.baseline_quality)
        np.testing.assert_array_equal(paid, reward(before, after, config).astype(np.float32))
        np.testing.assert_array_equal(env.utility, utility(after, config))
        before = after


# ---- third-party learners


def test_per_head_masks_are_those_of_all_legal_actions() -> None:
    env, rng = one(), np.random.default_rng(4)
    env.reset()
    sizes = env.env.layout.head_sizes
    grown = 0
    for _ in range(HORIZON):
        table = env.env.backend.table
        heads = np.split(env.action_masks(), np.cumsum(sizes)[:-1])
        for op in Op:  # slow reference: try every slot and blueprint
            rows = np.array([CANONICAL] * (3 * 13))
            rows[:, Head.OP], rows[:, Head.SLOT] = op, np.repeat(np.arange(3), 13)
            rows[:, Head.BLUEPRINT] = np.tile(np.arange(13), 3)
            fine = np.array([is_legal(table, row[None], LIVELY)[0] for row in rows])
            assert heads[Head.OP][op] == fine.any()
            for row in rows[fine & (op != Op.WAIT)]:
                assert heads[Head.SLOT][row[Head.SLOT]]
            if op == Op.GERMINATE:
                for row in rows[fine]:
                    assert heads[Head.BLUEPRINT][row[Head.BLUEPRINT]]
        for head, choice in DEFAULT_FIXED.items():
            assert heads[head].nonzero()[0].tolist() == [choice]
        assert all(head.any() for head in heads)
        grown += (table.stage != SeedStage.DORMANT).any()
        env.step(random_legal_actions(table, LIVELY, rng)[0])
    assert grown


def test_head_without_choices_still_has_a_legal_option() -> None:
    env = one(fixed={Head.BLUEPRINT: 0})  # noop is never a choice: nothing can be germinated
    env.reset()
    heads = np.split(env.action_masks(), np.cumsum(env.env.layout.head_sizes)[:-1])
    assert heads[Head.BLUEPRINT].nonzero()[0].tolist() == [0]
    assert heads[Head.OP].nonzero()[0].tolist() == [Op.WAIT]


def test_inconsistent_heads_act_as_wait() -> None:
    env, waits = one(), one()
    env.reset()
    waits.reset()
    plant = CANONICAL.copy()
    plant[[Head.OP, Head.SLOT, Head.BLUEPRINT]] = Op.GERMINATE, 0, 1
    env.step(plant)
    waits.step(plant)
    for _ in range(6):
        env.step(CANONICAL)
        waits.step(CANONICAL)
    prune = CANONICAL.copy()
    prune[[Head.OP, Head.SLOT]] = Op.PRUNE, 1
    heads = np.split(env.action_masks(), np.cumsum(env.env.layout.head_sizes)[:-1])
    assert heads[Head.OP][Op.PRUNE]
    assert heads[Head.SLOT][1]
    assert not env.env.legal[0, Op.PRUNE, 1]
    a, b = env.step(prune), waits.step(CANONICAL)
    assert not a[-1]["happened"]
    np.testing.assert_array_equal(a[0], b[0])
    assert a[1] == b[1]


def learn(env: GrowthEnv, steps: int, **settings: Any) -> Any:
    sb3 = pytest.importorskip("sb3_contrib")
    return sb3.MaskablePPO("MlpPolicy", env, seed=0, device="cpu", policy_kwargs={"net_arch": [32]}, **settings).learn(
        steps
    )


@pytest.mark.slow
def test_maskable_ppo_trains_on_the_simulator() -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    env = one(tuple(range(8)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checker.check_env(env)
    before = learn(env, 0, n_steps=120, batch_size=60)
    model = learn(env, 360, n_steps=120, batch_size=60)
    moved = [(p - q).abs().max() for p, q in zip(model.policy.parameters(), before.policy.parameters(), strict=True)]
    assert all(m > 0 for m in moved)
    obs, _ = env.reset()
    action, _ = model.predict(obs, action_masks=env.action_masks())
    assert env.action_space.contains(action)


@pytest.mark.slow
def test_maskable_ppo_trains_on_a_real_host() -> None:
    env = digits()
    model = learn(env, 16, n_steps=8, batch_size=8, n_epochs=2)
    assert model.num_timesteps == 16
    assert len(env.env.backend.baselines.cached) == 1  # one world, trained once
