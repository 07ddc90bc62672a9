"""`esper plans`: a config file with a plan for each world."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from esper.commands import plans
from esper.commands.plans import run_plans
from esper.kasmina.blueprints import blueprint_index
from esper.leyline.errors import ConfigError
from esper.simic.evaluation.plan_search import Plan, follow, read_plan_table
from esper.simic.family_backend import FamilyBackend
from esper.simic.rewards import RewardConfig
from esper.simic.training.config import load_config
from tests.support.command_line import esper_in_process

Plans = list[Plan]
Follow = Callable[[Sequence[Plan], Sequence[int]], list[list[float]]]
FAMILY = """
host = "mlp"
datasets = ["digits"]
widths = [8]
blocks = [2]
epochs = [4]
batches_per_epoch = 4
val_size = 100
"""


@pytest.mark.slow
def test_command_writes_a_config_file_that_train_accepts(tmp_path: Path) -> None:
    family, out = tmp_path / "small.toml", tmp_path / "plans.toml"
    family.write_text(FAMILY)
    command = ["plans", str(family), "--worlds", "3", "--episodes", "20", "--least-gain", "-1", "--out", str(out)]
    command += ["--set", "reward.rent_macs=0.04"]
    done = esper_in_process(*command)
    assert done.returncode == 0, done.stderr
    assert "world 3 of 3" in done.stdout
    assert "one per impairment and block: U " in done.stdout
    assert read_plan_table(out.with_suffix(".json")).reward.rent_macs == 0.04
    config = load_config(file=out, sets=["imitation=1"])
    assert config.task == str(family)
    assert config.reward == RewardConfig(rent_macs=0.04)
    assert sorted(config.plans) == ["0", "1", "2"]
    slots = config.family().longest()
    assert all(slot in slots for plan in config.plans.values() for slot in plan)
    again = esper_in_process(*command)
    assert again.returncode == 2
    assert "exists" in again.stderr


def test_world_gets_the_plan_that_gains_most_there_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = blueprint_index("norm")
    good = [Plan(norm, 1), Plan(norm, 2), Plan(norm, 1, first=1)]

    played: list[tuple[Plan, int]] = []

    class Pool:
        def map(self, _play: object, jobs: list[tuple[Plan, int]]) -> Iterator[float]:
            played.extend(jobs)
            return (0.1 if world < 3 and plan == good[world] else 0.001 for plan, world in jobs)

    def best_plans(
        _all: object, _worlds: object, _episodes: int, _keep: int, follow_all: Follow, _say: object
    ) -> Plans:
        follow_all(good, [1, 2, 1])
        return good

    family = tmp_path / "small.toml"
    family.write_text(FAMILY)
    monkeypatch.setattr(plans, "worker_pool", lambda _size: nullcontext(Pool()))
    monkeypatch.setattr(plans, "best_plans", best_plans)
    run_plans(str(family), [], worlds=4, episodes=20, least_gain=0.01, workers=1, out=tmp_path / "plans.toml")
    config = load_config(file=tmp_path / "plans.toml")
    first, second, *_ = config.family().longest()
    assert [list(config.plans[str(w)]) for w in range(4)] == [[first], [first, second], [second], []]
    table = read_plan_table(tmp_path / "plans.json")
    assert (table.task, table.plans, table.worlds, table.episodes) == (str(family), good, [0, 1, 2, 3], 12)
    assert table.utility == [[0.1 if w == p else 0.001 for w in range(4)] for p in range(3)]
    assert sorted(played, key=repr) == sorted(itertools.product(good, range(4)), key=repr)  # each of them once


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "plans.toml").write_text("mine")
    with pytest.raises(ConfigError, match="--out"):
        run_plans("digits", [], worlds=1, episodes=2, least_gain=0, workers=1, out=tmp_path / "plans.toml")
    assert (tmp_path / "plans.toml").read_text() == "mine"
    with pytest.raises(ConfigError, match=r"such as plans\.toml"):
        run_plans("digits", [], worlds=1, episodes=2, least_gain=0, workers=1, out=tmp_path / "other.json")
    for directory in (Path(), Path("/")):  # paths without a name
        with pytest.raises(ConfigError, match="exists"):
            run_plans("digits", [], worlds=1, episodes=2, least_gain=0, workers=1, out=directory)


def test_least_gain_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="least-gain"):
        run_plans("digits", [], worlds=1, episodes=2, least_gain=float("nan"), workers=1, out=tmp_path / "plans.toml")


def test_plan_counted_from_the_end_names_the_last_slots_of_each_host(tmp_path: Path) -> None:
    family = tmp_path / "small.toml"
    family.write_text(FAMILY.replace("blocks = [2]", "blocks = [1, 3]"))
    _, backend = plans._prepared(str(family), ())
    assert isinstance(backend, FamilyBackend)
    for blocks, last, before in ((3, "r0c2", "r0c1"), (1, "r0c0", "r0c0")):
        world = next(w for w in range(20) if backend.tasks.family.draw(w).blocks == blocks)
        for first, slot in ((-1, last), (-2, before)):
            plan = Plan(blueprint_index("norm"), 1, first=first)
            assert plans._planted(plan, backend, world) == f'{{ {slot} = "norm" }}'
            assert list(follow(backend, plan, [world], RewardConfig()).structures[0]) == [slot]


def test_missing_directory_is_reported_before_the_search(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no directory"):
        run_plans("digits", [], worlds=1, episodes=2, least_gain=0, workers=1, out=tmp_path / "missing" / "plans.toml")
