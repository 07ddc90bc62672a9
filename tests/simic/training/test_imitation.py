"""Rounds of imitation: the teacher's actions are learnt, and the teacher acts less and less."""

from __future__ import annotations

import numpy as np
import pytest

from esper.leyline.actions import Head, Op
from esper.leyline.errors import ConfigError
from esper.simic.training.config import load_config
from esper.simic.training.imitation import ImitationController
from esper.simic.training.vectorized import make_env, train_ppo_vectorized
from esper.tamiyo.controllers import Wait
from esper.tolaria.rollout import rollout

SETS = ["simulated=true", "envs=32", "worlds=64", "network.width=16", "network.hidden=16"]


@pytest.mark.parametrize("birth", ["open", "isolated"])
def test_teacher_acts_in_its_share_and_labels_every_state(birth):
    config = load_config(sets=[*SETS, "imitation=4", f"rules.birth={birth}"])
    shares = []
    for number in range(4):
        env = make_env(config)
        env.reset()
        controller = ImitationController(Wait(), env, config, number)
        for step in rollout(env, controller, env.horizon):
            taught = controller.is_taught
            np.testing.assert_array_equal(step.actions[taught], controller.teacher_actions[taught])
            assert (step.actions[~taught, Head.OP] == Op.WAIT).all()
        shares.append(controller.is_taught.mean())
    assert 0.5 < shares[0] < 1.0
    assert shares[-1] == 0.0


def test_imitation_makes_the_teachers_actions_likelier():
    config = load_config(sets=[*SETS, "imitation=12", "rounds=12", "ppo.lr=5e-3"])
    before = train_ppo_vectorized(load_config(sets=[*SETS, "imitation=1", "rounds=1", "ppo.lr=1e-9"]))
    after = train_ppo_vectorized(config)
    assert after.rounds[-1].utility.mean() > before.rounds[0].utility.mean() + 0.01
    assert all(r.update.kl == 0 for r in after.rounds)  # not a PPO update


def test_imitation_is_refused_on_real_hosts():
    with pytest.raises(ConfigError, match="imitation"):
        load_config(sets=["imitation=3"])
