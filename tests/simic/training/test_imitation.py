"""Rounds of imitation: the teacher's actions are learnt, and the teacher acts less and less."""

from __future__ import annotations

import numpy as np
import pytest

from esper.kasmina.blueprints import blueprint_index, blueprint_name
from esper.leyline.actions import Head, Op
from esper.leyline.errors import ConfigError, UnknownNameError
from esper.leyline.stages import SeedStage
from esper.simic.training.config import PRESETS, load_config
from esper.simic.training.imitation import ImitationController
from esper.simic.training.vectorized import make_env, round_worlds, train_ppo_vectorized
from esper.tamiyo.controllers import Wait, wait_everywhere
from esper.tolaria.rollout import rollout

SETS = ["simulated=true", "envs=32", "worlds=64", "network.width=16"]


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


PLANS = {"3": {"r1c0": "conv_light"}, "5": {}, "8": {"r0c0": "norm", "r0c1": "conv_heavy"}}
REAL = {
    "task": "sight_digits", "plans": PLANS, "imitation": 2, "envs": 3, "rounds": 3, "worlds": 4, "epochs": 8,
    "fixed": PRESETS["sim"]["fixed"],
}  # fmt: skip


def test_teacher_grows_the_plan_of_each_world_and_prunes_all_else():
    config = load_config(more=REAL)
    env = make_env(config)
    env.reset()
    assert sorted(env.backend.worlds) == [3, 5, 8]
    controller = ImitationController(Wait(), env, config, 0)
    controller.is_taught[:] = True
    wrong = wait_everywhere(3)
    wrong[:, Head.OP], wrong[:, Head.SLOT], wrong[:, Head.BLUEPRINT] = Op.GERMINATE, 3, blueprint_index("norm")
    env.step(wrong)
    planted = []
    for step in rollout(env, controller, 7):
        if (step.actions[:, Head.OP] == Op.GERMINATE).any():
            planted.append(int(env.backend.table.step[0]) - 1)
        if env.over:
            break
    assert min(planted) == 2
    table = env.backend.table
    alive = (table.stage >= SeedStage.GERMINATED) & (table.stage <= SeedStage.FOSSILIZED)
    for e, world in enumerate(env.backend.worlds):
        grown = {env.backend.slots[s]: blueprint_name(table.blueprint[e, s]) for s in np.nonzero(alive[e])[0]}
        assert grown == PLANS[str(world)]


def test_imitation_on_real_hosts_uses_worlds_with_plans_then_all():
    config = load_config(more=REAL)
    trained = train_ppo_vectorized(config)
    assert [sorted(round_worlds(config, n)) for n in range(2)] == [[3, 5, 8]] * 2
    assert set(round_worlds(config, 2)) <= set(range(4))
    assert [r.update.kl == 0 for r in trained.rounds[:2]] == [True, True]  # not a PPO update


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"imitation": 3}, "needs `plans`"),
        ({"imitation": -1}, "≥ 0"),
        ({"plans": {"10000": {}}}, "training worlds"),
        ({"plans": {"first": {}}}, "training worlds"),
        ({"plans": {"03": {}}}, "training worlds"),
    ],
)
def test_invalid_imitation_is_refused(more, message):
    with pytest.raises(ConfigError, match=message):
        load_config(more=more)


@pytest.mark.parametrize(
    ("plan", "message"),
    [({"r9c9": "norm"}, "r0c0"), ({"r0c0": "nrom"}, "norm"), ({"r0c0": "mlp_small"}, "does not fit the slot 'r0c0'")],
)
def test_invalid_plan_of_any_world_is_refused_before_training(plan, message):
    last = len(PLANS) - 1
    plans = {w: plan if i == last else {} for i, w in enumerate(PLANS)}
    config = load_config(more=REAL | {"plans": plans, "envs": 1})
    assert round_worlds(config, 0) != [int(list(PLANS)[last])]

    def fail() -> None:
        raise AssertionError("training has begun")

    with pytest.raises((ConfigError, UnknownNameError), match=message):
        train_ppo_vectorized(config, poll=fail)


def test_plans_of_another_task_are_refused_for_imitation(tmp_path):
    file = tmp_path / "plans.toml"
    file.write_text('task = "sight"\n[plans]\n0 = {}\n')
    with pytest.raises(ConfigError, match="for the task 'sight', not 'mend'"):
        load_config(file=file, sets=["imitation=1"], more={"task": "mend"})
    assert load_config(file=file, sets=["imitation=1"], more={"task": "sight"}).plans == {"0": {}}
    assert load_config(file=file, more={"task": "mend"}).imitation == 0
    assert load_config(file=file, sets=["imitation=1", "simulated=true"], more={"task": "mend"}).simulated
