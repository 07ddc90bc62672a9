"""Environments of a task family: padded slots, episodes of different lengths, training, resuming, commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esper.leyline.actions import Head, Op
from esper.leyline.lifecycle import legal
from esper.nissa.journal_reader import read
from esper.nissa.recorder import record, record_on
from esper.simic.env import GrowthVectorEnv
from esper.simic.family_backend import FamilyBackend, FamilyTasks
from esper.simic.training.checkpointer import CHECKPOINTS, run_metadata
from esper.simic.training.config import TrainConfig, load_config
from esper.simic.training.vectorized import choice_draws, make_env, train_ppo_vectorized
from esper.tamiyo.controllers.simple import wait_everywhere
from esper.tamiyo.network import NetworkConfig, TamiyoNetwork
from esper.tamiyo.policy.action_masks import MaskLayout, compute_batch_masks
from esper.tamiyo.policy.features import batch_obs_to_features
from esper.tolaria.best_host import BEST_HOST, GrownHost
from esper.tolaria.checkpoint import Checkpoints
from esper.tolaria.families import Family
from tests.support.command_line import esper, esper_in_process
from tests.support.run_outcomes import is_whole, outcome_of

TEXT = """
host = "mlp"
datasets = ["digits"]
widths = [8, 12]
blocks = [2, 3, 5]
impairments = ["none", "width", "missing"]
samples = [100, 300]
label_noise = [0.0, 0.2]
epochs = [4, 6, 9]
batch = [8, 16]
batches_per_epoch = 3
val_size = 60
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("families") / "small.toml"
    path.write_text(TEXT)
    return path


def config(file: Path, *sets: str) -> TrainConfig:
    small = ["rounds=3", "envs=4", "worlds=6", "ppo.minibatches=2", "network.width=16",
             "network.patience=0.0", "checkpoint_share=1"]  # fmt: skip
    return load_config(sets=[f"task={file}", *small, *sets])


def family_of(file: Path) -> Family:
    family = config(file).family()
    assert family is not None
    return family


def varied_worlds(file: Path) -> list[int]:
    """Return worlds of different lengths and slots, the longest episode last."""
    family = family_of(file)
    tasks = {world: family.task(world) for world in range(40)}
    return [next(w for w, t in tasks.items() if (len(t.slots), t.epochs) == key) for key in ((2, 4), (5, 6), (3, 9))]


def network() -> TamiyoNetwork:
    torch.manual_seed(3)
    net = TamiyoNetwork(NetworkConfig(width=16, patience=0.0))
    with torch.no_grad():
        for layer in (net.op_head[-1], net.slot_score, net.choices):
            layer.weight.mul_(60.0)  # type: ignore[operator, union-attr]
    return net


# ---- padding


def test_padded_slots_do_not_change_decisions_of_the_real_ones(file: Path) -> None:
    worlds, net = varied_worlds(file), network()
    backend = FamilyBackend(FamilyTasks(family_of(file)))
    env = GrowthVectorEnv(backend, worlds)
    obs, info = env.reset()
    assert [part.table.num_slots for part in backend.parts] == [2, 5, 3]
    acted = 0
    for step in range(6):
        draws = choice_draws(0, 0, worlds, env.horizon)[step]
        padded = net.act(torch.from_numpy(obs), torch.from_numpy(info["masks"]), env.layout, draws)
        for e, part in enumerate(backend.parts):
            table = part.table
            may = legal(table, backend.rules)
            own = MaskLayout(slots=table.num_slots, blueprints=table.takes.shape[1])
            single = net.act(
                torch.from_numpy(batch_obs_to_features(table, part.context, legal=may)),
                torch.from_numpy(compute_batch_masks(table, may, fixed=env.fixed)), own, draws[e : e + 1],
            )  # fmt: skip
            assert torch.equal(single.actions, padded.actions[e : e + 1])
            torch.testing.assert_close(single.log_probs, padded.log_probs[e : e + 1], atol=1e-5, rtol=0)
            torch.testing.assert_close(single.values, padded.values[e : e + 1], atol=1e-5, rtol=1e-5)
            acted += int(single.actions[0, Head.OP] != Op.WAIT)
        obs, _, _, _, info = env.step(padded.actions.numpy())
    assert acted > 3


def test_padded_slots_are_disabled_and_never_legal(file: Path) -> None:
    backend = FamilyBackend(FamilyTasks(family_of(file)))
    env = GrowthVectorEnv(backend, varied_worlds(file))
    env.reset()
    exists = np.arange(5) < np.array([[2], [5], [3]])
    np.testing.assert_array_equal(backend.table.enabled, exists)
    assert not (env.legal[:, 1:] & ~exists[:, None]).any()
    assert (env.legal[:, Op.GERMINATE] == exists).all()


# ---- episodes of different lengths


def test_ended_environment_waits_unchanged_until_all_have_ended(file: Path) -> None:
    backend = FamilyBackend(FamilyTasks(family_of(file)))
    env = GrowthVectorEnv(backend, varied_worlds(file))
    env.reset()
    plant = wait_everywhere(3)
    plant[:, Head.OP] = Op.GERMINATE
    plant[:, Head.BLUEPRINT] = np.nonzero(backend.hosts[0].table.takes[0])[0][0]
    steps = [env.step(plant if step == 1 else wait_everywhere(3)) for step in range(9)]
    ended = np.array([row[2] for row in steps])
    for e, length in enumerate((4, 6, 9)):
        np.testing.assert_array_equal(ended[:, e], np.arange(9) >= length - 1)
        assert not any(row[1][e] for row in steps[length:])
        for row in steps[length:]:
            np.testing.assert_array_equal(row[0][e], steps[length - 1][0][e])
    assert env.over
    assert backend.table.step.tolist() == [4, 6, 9]
    assert (env.utility != 0).any()


def test_environment_among_others_equals_the_same_world_alone(file: Path) -> None:
    worlds = varied_worlds(file)
    backend = FamilyBackend(FamilyTasks(family_of(file)))
    env = GrowthVectorEnv(backend, worlds)
    env.reset()
    single = backend.host(worlds[1])
    plant = wait_everywhere(3)
    plant[:, Head.OP] = Op.GERMINATE
    plant[:, Head.BLUEPRINT] = np.nonzero(single.table.takes[0])[0][0]
    for step in range(6):
        actions = plant if step == 1 else wait_everywhere(3)
        env.step(actions)
        single.step(actions[1:2])
    assert backend.table.quality[1] == single.table.quality[0]
    assert backend.baseline_quality[1] == single.baseline_quality[0]


# ---- training


def start(settings: TrainConfig, run: Path, **kwargs: Any) -> Any:
    with record("test", out=run, level="debug") as recorded:
        return train_ppo_vectorized(settings, recorded.hub, directory=run, **kwargs)


def test_training_on_a_family_records_every_step_once(file: Path, tmp_path: Path) -> None:
    settings, family = config(file), family_of(file)
    result = start(settings, tmp_path / "run")
    ends = [e.data for e in read(tmp_path / "run") if e.kind == "episode"]
    assert len(ends) == 12
    for end in ends:
        assert end["steps"] == family.task(end["world"]).epochs
    steps = [e.data for e in read(tmp_path / "run") if e.kind == "step"]
    assert len(steps) == result.env_steps == sum(end["steps"] for end in ends)
    assert len({(s["env"], s["episode"], s["step"]) for s in steps}) == len(steps)
    assert len({end["host_params"] for end in ends}) > 1
    assert len({len(family.task(end["world"]).slots) for end in ends}) > 1
    best = GrownHost.load(tmp_path / "run" / BEST_HOST)
    assert best.task.host_kwargs == family.task(best.world).host_kwargs
    best.body()  # raises if the rebuilt host differs


class Interrupted(Exception):
    """Represents whatever ends a process."""


def test_run_on_a_family_resumes_bit_for_bit(file: Path, tmp_path: Path) -> None:
    settings = config(file)
    start(settings, tmp_path / "calm")
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls == 24:
            raise Interrupted

    with pytest.raises(Interrupted):
        start(settings, tmp_path / "run", poll=stop)
    saved = Checkpoints(tmp_path / "run" / CHECKPOINTS).newest()
    assert saved is not None
    assert 0 < run_metadata(saved)["done"] < 3
    with record_on(tmp_path / "run", run_metadata(saved)["next_seq"], level="debug") as recorded:
        train_ppo_vectorized(settings, recorded.hub, directory=tmp_path / "run", resume=saved)
    assert outcome_of(tmp_path / "run") == outcome_of(tmp_path / "calm")
    assert is_whole(tmp_path / "run")


def test_changed_family_file_is_noticed_on_resuming(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "small.toml"
    copy.write_text(TEXT)
    before = make_env(config(copy)).backend.data_hash
    assert before == make_env(config(file)).backend.data_hash
    copy.write_text(TEXT.replace("0.2", "0.3"))
    assert make_env(config(copy)).backend.data_hash != before


def test_default_pool_of_a_family_has_256_worlds(file: Path) -> None:
    assert load_config(sets=[f"task={file}"]).pool == 256
    assert load_config(sets=["task=digits"]).pool == 64
    assert config(file).pool == 6


# ---- commands


@pytest.mark.slow
def test_commands_work_with_a_family_and_workers_change_nothing(file: Path, tmp_path: Path) -> None:
    small = ["--task", file, "--rounds", "2", "--envs", "4", "--set", "worlds=5", "--set", "ppo.minibatches=2"]
    for name, run, more in (("one", esper_in_process, []), ("two", esper, ["--workers", "2"])):
        done = run("train", *small, *more, "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert "learned" in done.stdout
    assert outcome_of(tmp_path / "one") == outcome_of(tmp_path / "two")
    named = ["heuristic", "best-schedule", "random", "none", "from-start", "wider", "deeper"]
    done = esper_in_process("eval", tmp_path / "one", *named, "--worlds", "3", "--search-episodes", "16", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) == 8
    assert all(len(row["utility"]["worlds"]) == 3 for row in rows)
    grow = ["grow", "--task", file, "--seed", "10003", "--controller", tmp_path / "one", "--out", tmp_path / "g"]
    done = esper_in_process(*grow)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "g" / "manifest.json").read_text())
    assert manifest["config"]["task"]["data_seed"] == 10_003
