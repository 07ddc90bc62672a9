"""Explanations of decisions, feature importance and the record that they are computed from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.leyline.actions import Head, Op
from esper.leyline.errors import ConfigError, DataError
from esper.leyline.run_files import DECISIONS
from esper.simic.training.config import TrainConfig, load_config
from esper.simic.training.vectorized import choice_draws, round_worlds, train_ppo_vectorized
from esper.tamiyo.decision_record import MOST_ENVS, DecisionLog, DecisionRecord
from esper.tamiyo.explanation import explain, importances, neutral_values
from esper.tamiyo.policy.feature_table import BASE, ENV_COLUMN, PER_SLOT, SLOT_COLUMN

SETS = ["simulated=true", "rounds=2", "envs=20", "worlds=20", "epochs=15", "ppo.minibatches=2", "network.width=16",
        "network.patience=0.0", "checkpoint_share=1"]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainConfig]:
    path = tmp_path_factory.mktemp("runs") / "mine"
    path.mkdir()
    config = load_config(sets=SETS)
    train_ppo_vectorized(config, directory=path)
    return path, config


@pytest.fixture(scope="module")
def record(run: tuple[Path, TrainConfig]) -> DecisionRecord:
    return DecisionRecord.load(run[0])


def acting(record: DecisionRecord, op: Op) -> tuple[int, int]:
    """Return environment and step of the first decision with this op."""
    at = torch.nonzero(record.actions[..., Head.OP] == op)[0].tolist()
    return at[1], at[0] + 1


def test_record_holds_the_last_round_of_the_first_environments(record: DecisionRecord) -> None:
    assert record.facts.episode == 2
    assert len(record.facts.worlds) == MOST_ENVS < 20
    assert record.lengths.tolist() == [15] * MOST_ENVS
    assert record.valid.all()


def test_recorded_policy_is_the_one_that_decided(record: DecisionRecord, run: tuple[Path, TrainConfig]) -> None:
    network, layout = record.network(), record.layout
    config = run[1]
    for step, draws in enumerate(choice_draws(config.seed, 1, round_worlds(config, 1), len(record.obs))):
        choice = network.act(record.obs[step], record.masks[step], layout, draws[:MOST_ENVS])
        assert torch.equal(choice.actions, record.actions[step])
    first = train_ppo_vectorized(load_config(sets=[*SETS, "rounds=1"]))  # the policy that acted in round 2
    for name, value in first.network.state_dict().items():
        torch.testing.assert_close(value, record.weights[name])


def test_probabilities_of_alternatives_add_up_and_contain_the_choice(record: DecisionRecord) -> None:
    env, step = acting(record, Op.GERMINATE)
    explanation = explain(record, env, step)
    assert explanation.op == "GERMINATE"
    assert sum(explanation.ops.values()) == pytest.approx(1.0, abs=1e-5)
    assert sum(explanation.slots.values()) == pytest.approx(1.0, abs=1e-5)
    assert set(explanation.options) == {"blueprint", "style", "tempo", "alpha_target"}
    parts = [explanation.ops[explanation.op], explanation.slots[explanation.slot]]
    for head, chances in explanation.options.items():
        assert sum(chances.values()) == pytest.approx(1.0, abs=1e-5), head
        parts.append(chances[explanation.heads[head]])
    assert explanation.probability == pytest.approx(np.prod(parts), rel=1e-4)


def test_waiting_has_no_slot_and_no_options(record: DecisionRecord) -> None:
    explanation = explain(record, *acting(record, Op.WAIT))
    assert (explanation.op, explanation.slot, explanation.heads, explanation.slots, explanation.options) == (
        "WAIT",
        "",
        {},
        {},
        {},
    )
    assert explanation.probability == pytest.approx(explanation.ops["WAIT"], rel=1e-5)


def test_influence_is_the_change_of_the_chosen_actions_log_probability(record: DecisionRecord) -> None:
    env, step = acting(record, Op.GERMINATE)
    explanation = explain(record, env, step)
    neutral = neutral_values(record)
    strongest = next(i for i in explanation.influences if i.slot)
    column = SLOT_COLUMN[strongest.name]
    at = BASE + record.facts.slots.index(strongest.slot) * PER_SLOT + column
    assert strongest.neutral == pytest.approx(float(neutral[BASE + column]))
    changed = record.obs.clone()
    changed[step - 1, env, at] = strongest.neutral
    other = explain(replace(record, obs=changed), env, step)
    assert np.log(explanation.probability / other.probability) == pytest.approx(strongest.effect, abs=1e-4)
    effects = [abs(i.effect) for i in explanation.influences]
    assert effects == sorted(effects, reverse=True)


def test_feature_at_its_neutral_value_has_no_influence(record: DecisionRecord) -> None:
    first = explain(record, 0, 1)
    effects = {i.name: i.effect for i in first.influences if not i.slot}
    assert effects["has_budget"] == 0.0  # constant, so always at its mean
    assert effects["time"] != 0.0


@pytest.mark.parametrize(("env", "step", "message"), [(16, 1, "0 to 15"), (-1, 1, "0 to 15"), (0, 16, "1 to 15"),
                                                      (0, 0, "1 to 15")])  # fmt: skip
def test_unknown_environment_or_step_is_refused(env: int, step: int, message: str, record: DecisionRecord) -> None:
    with pytest.raises(ConfigError, match=message):
        explain(record, env, step)


def test_unused_and_constant_features_have_no_importance(record: DecisionRecord) -> None:
    weights = {name: value.clone() for name, value in record.weights.items()}
    weights["state_encoder.0.weight"][:, ENV_COLUMN["quality"]] = 0.0
    by_feature = {(i.feature.scope, i.feature.name): i for i in importances(replace(record, weights=weights))}
    assert by_feature["env", "quality"].nats == pytest.approx(0.0, abs=1e-9)
    assert by_feature["env", "quality"].sd > 0
    assert by_feature["env", "has_budget"].sd == 0.0
    assert by_feature["env", "has_budget"].nats == pytest.approx(0.0, abs=1e-9)
    assert by_feature["env", "time"].nats > 1e-8
    assert by_feature["slot", "depth"].nats > 1e-8


def test_record_survives_a_round_trip_and_damage_is_reported(record: DecisionRecord, tmp_path: Path) -> None:
    record.save(tmp_path / DECISIONS)
    again = DecisionRecord.load(tmp_path)
    assert again.facts == record.facts
    assert torch.equal(again.obs, record.obs)
    content = (tmp_path / DECISIONS).read_bytes()
    (tmp_path / DECISIONS).write_bytes(content[:-3] + b"abc")
    with pytest.raises(DataError, match="damaged"):
        DecisionRecord.load(tmp_path)
    wrong = replace(record, actions=record.actions + 100)
    wrong.save(tmp_path / DECISIONS)
    with pytest.raises(DataError, match="an option that does not exist"):
        DecisionRecord.load(tmp_path)
    with pytest.raises(DataError, match="no recorded decisions"):
        DecisionRecord.load(tmp_path / "none")


def test_log_of_one_environment_resumes_where_it_was(record: DecisionRecord) -> None:
    log, network = DecisionLog(), record.network()
    rows = [[f[t, :1] for f in (record.obs, record.masks, record.actions)] for t in range(4)]
    for row in rows[:2]:
        log.add(*row)
    resumed = DecisionLog()
    resumed.load_state_dict(log.state_dict())
    for row in rows[2:]:
        resumed.add(*row)
    whole = resumed.record(network, record.layout, slots=record.facts.slots, world=7)
    assert torch.equal(whole.obs[:, 0], record.obs[:4, 0])
    assert whole.lengths.tolist() == [4]
    assert whole.facts.worlds == (7,)


def test_rounds_of_imitation_are_not_recorded(tmp_path: Path) -> None:
    train_ppo_vectorized(load_config(sets=[*SETS, "rounds=1", "imitation=1"]), directory=tmp_path)
    assert (tmp_path / "policy.safetensors").exists()
    assert not (tmp_path / DECISIONS).exists()
