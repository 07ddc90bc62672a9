"""Searches for fixed plans: in training worlds, per kind of host, and in the evaluated world at equal compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from esper.kasmina.blueprints import blueprint_index
from esper.leyline.errors import ConfigError
from esper.simic.env import HostBackend
from esper.simic.evaluation import plan_search
from esper.simic.evaluation.comparison import Played, measured_on_test, play
from esper.simic.evaluation.plan_search import (
    KindOf,
    Plan,
    PlanTable,
    all_plans,
    best_plans,
    fit_plan,
    fit_plans_by_kind,
    follow,
    follow_by_kind,
    impairment_and_block,
    plans_of,
    read_plan_table,
    search_in_world,
    visible_kind,
)
from esper.simic.family_backend import FamilyBackend, FamilyTasks
from esper.simic.rewards import RewardConfig
from esper.tamiyo.controllers import Wait
from esper.tolaria.families import Family
from esper.tolaria.rollout import rollout
from esper.tolaria.tasks import get_task

REWARD = RewardConfig()
FAMILY = Family(
    name="small", host="mlp", datasets=("digits",), widths=(8,), blocks=(2, 3), impairments=("none", "missing"),
    samples=(100,), epochs=(4, 6), batch=(8,), batches_per_epoch=2, val_size=40,
)  # fmt: skip


@pytest.fixture(scope="module")
def backend() -> FamilyBackend:
    return FamilyBackend(FamilyTasks(FAMILY))


def by_table(monkeypatch: pytest.MonkeyPatch, best: Plan, tried: list[tuple[Plan, int]]) -> None:
    """Replace episodes by a table in which one plan is better than all others."""

    def utilities(_backend: object, plan: Plan, worlds: list[int], _reward: object) -> list[float]:
        tried.extend((plan, world) for world in worlds)
        return [1.0 if plan == best else 0.1 * np.sin(hash((plan, world)) % 97) for world in worlds]

    monkeypatch.setattr(plan_search, "utilities", utilities)


def test_plans_cover_no_growth_and_every_blueprint_that_fits() -> None:
    backend = FamilyBackend(FamilyTasks(FAMILY))
    backend.reset([next(w for w in range(9) if FAMILY.draw(w).blocks == 2)])
    plans = all_plans(backend.table)
    assert plans[0] == Plan()
    fitting = backend.hosts[0].table.takes.any(axis=0)
    assert len(backend.hosts[0].slots) < len(backend.slots)  # padded slots take every blueprint
    assert {p.blueprint for p in plans[1:]} == set(np.nonzero(fitting)[0].tolist())
    assert {(p.first, p.slots) for p in plans[1:]} == {(0, 1), (0, 2), (0, 3), (1, 1), (2, 1)}
    assert len(set(plans)) == len(plans)


def test_search_finds_the_best_plan_within_its_episodes(
    backend: FamilyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = all_plans(backend.table)
    for best, episodes in ((plans[7], 200), (plans[0], 90)):
        tried: list[tuple[Plan, int]] = []
        by_table(monkeypatch, best, tried)
        assert fit_plan(backend, range(8), REWARD, episodes) == best
        assert len(tried) <= episodes
        assert {world for _, world in tried} <= set(range(8))
    with pytest.raises(ConfigError, match="two episodes"):
        fit_plan(backend, range(8), REWARD, 1)


@pytest.mark.parametrize(("count", "keep"), [(16, 8), (17, 8), (12, 1), (3, 1)])
def test_last_rung_uses_all_episodes_that_are_left(count: int, keep: int) -> None:
    rungs: list[int] = []

    def follow_all(plans: Sequence[Plan], some: Sequence[int]) -> list[list[float]]:
        rungs.append(len(plans) * len(some))
        return [[float(plan.slots)] * len(some) for plan in plans]

    plans = [Plan(0, n) for n in range(count)]
    best = best_plans(plans, range(64), 1_000, keep, follow_all)
    assert best == plans[::-1][:keep]
    assert 1_000 - count < sum(rungs) <= 1_000


def test_kind_of_host_shows_only_what_its_shapes_show() -> None:
    draw = FAMILY.draw(0)
    kinds = {
        name: visible_kind(type(draw)(**{f: getattr(draw, f) for f in draw.__struct_fields__} | {"impairment": name}))
        for name in ("none", "kernel", "width", "missing")
    }
    assert kinds["none"] == kinds["kernel"]
    assert len(set(kinds.values())) == 3


def test_impairment_and_block_are_those_of_the_draw() -> None:
    draw = FAMILY.draw(0)
    sound, first, second = (
        [msgspec.structs.replace(draw, impairment=name, impaired=block) for block in (0, 1)]
        for name in ("none", "kernel", "missing")
    )
    assert [impairment_and_block(each) for each in sound] == ["none", "none"]  # no block is impaired
    assert [impairment_and_block(each) for each in first] == ["kernel 0", "kernel 1"]
    assert [impairment_and_block(each) for each in second] == ["missing 0", "missing 1"]


@pytest.mark.parametrize("kind_of", [visible_kind, impairment_and_block])
def test_each_kind_of_host_gets_its_own_plan(
    backend: FamilyBackend, monkeypatch: pytest.MonkeyPatch, kind_of: KindOf
) -> None:
    plans = all_plans(backend.table)
    kinds = sorted({kind_of(FAMILY.draw(world)) for world in range(40)})
    best_plans = dict(zip(kinds, plans[3:], strict=False))

    def utilities(_backend: object, plan: Plan, worlds: list[int], _reward: object) -> list[float]:
        return [float(plan == best_plans[kind_of(FAMILY.draw(world))]) for world in worlds]

    monkeypatch.setattr(plan_search, "utilities", utilities)
    fitted = fit_plans_by_kind(backend, range(40), REWARD, 4000, kind_of)
    assert {kind: fitted[kind] for kind in kinds} == best_plans
    assert fitted[""] in best_plans.values()
    followed: list[tuple[Plan, int]] = []

    def follow_one(
        _backend: object, plan: Plan, worlds: list[int], _reward: object, name: str = "", _compute: object = None
    ) -> Played:
        followed.extend((plan, world) for world in worlds)
        return Played(name, worlds, *([np.zeros(1)] * 6))

    monkeypatch.setattr(plan_search, "follow", follow_one)
    follow_by_kind(backend, fitted, kind_of, [10_000, 10_001], REWARD, "kinds")
    assert followed == [(best_plans[kind_of(FAMILY.draw(w))], w) for w in (10_000, 10_001)]


def test_plan_without_growth_equals_waiting_and_another_plants(backend: FamilyBackend) -> None:
    waiting = play(backend, Wait(), [3, 4], REWARD)
    nothing = follow(backend, Plan(), [3, 4], REWARD)
    np.testing.assert_array_equal(nothing.quality, waiting.quality)
    np.testing.assert_array_equal(nothing.train_macs, waiting.train_macs)
    grown = follow(backend, all_plans(backend.table)[-2], [3, 4], REWARD)
    assert (grown.params > nothing.params).all()
    assert (grown.train_macs > nothing.train_macs).all()
    assert all(grown.structures)


def test_plan_for_one_slot_plants_there_only(backend: FamilyBackend) -> None:
    plan = next(p for p in all_plans(backend.table) if p.first == 1)
    grown = follow(backend, plan, [3], REWARD)
    assert list(grown.structures[0]) == [backend.host(3).task.slots[1]]
    assert "in slot 2 only" in str(plan)


@pytest.mark.parametrize("blocks", [2, 3])
def test_plan_counted_from_the_end_plants_in_the_last_slots_of_every_host(backend: FamilyBackend, blocks: int) -> None:
    world = next(w for w in range(20) if FAMILY.draw(w).blocks == blocks)
    plans = {p.first: p for p in plans_of(backend) if p.blueprint == blueprint_index("norm") and p.slots == 1}
    assert {-1, -2} <= set(plans)
    assert not any(p.first < 0 for p in all_plans(backend.table))
    for first in (-1, -2):
        grown = follow(backend, plans[first], [world], REWARD)
        assert list(grown.structures[0]) == [backend.host(world).slots[first]]
    assert "in slot 1 from the end only" in str(plans[-1])


def test_equal_compute_is_measured_within_or_after_the_episode(backend: FamilyBackend) -> None:
    waiting = play(backend, Wait(), [3, 4], REWARD)
    macs = dict(zip(waiting.worlds, waiting.train_macs.tolist(), strict=True))
    for share, longer in ((0.5, False), (1.0, False), (2.0, True)):
        limit = {world: share * value for world, value in macs.items()}
        again = play(backend, Wait(), [3, 4], REWARD, compute=limit)
        for column in ("quality", "test", "utility", "train_macs"):  # of the episode, whatever the limit is
            np.testing.assert_array_equal(getattr(again, column), getattr(waiting, column))
        for i, world in enumerate([3, 4]):
            host = backend.host(world)
            steps = round(share * host.horizon)
            for _ in rollout(host, Wait(), steps):
                pass
            assert host.table.train_macs[0] >= limit[world]
            assert again.equal_test[i] == measured_on_test(host)[0]
            assert (steps > host.horizon) == longer
    assert play(backend, Wait(), [3], REWARD).equal_test.size == 0


@pytest.mark.parametrize("kind_of", [visible_kind, impairment_and_block])
def test_table_of_plans_names_the_best_of_all_worlds_and_of_each_kind(tmp_path: Path, kind_of: KindOf) -> None:
    worlds = list(range(12))
    kinds = [kind_of(FAMILY.draw(world)) for world in worlds]
    most = max(set(kinds), key=kinds.count)
    plans = [Plan(), Plan(1, 1), Plan(2, 1, first=-1)]
    utility = [[0.0] * 12, [0.3 if kind == most else -0.1 for kind in kinds], [0.2] * 12]
    table = PlanTable(task="small", episodes=50, worlds=worlds, plans=plans, utility=utility)
    (tmp_path / "plans.json").write_bytes(msgspec.json.encode(table))
    table = read_plan_table(tmp_path / "plans.json")
    assert table.best() == plans[int(np.mean(utility, axis=1).argmax())]
    best = table.best_by_kind(FAMILY, kind_of)
    assert best[most] == plans[1]
    assert {best[kind] for kind in best if kind not in ("", most)} == {plans[2]}
    assert best[""] == table.best()
    assert all(kinds.count(kind) > 1 for kind in best if kind)


def test_gain_by_group_is_measured_in_other_worlds() -> None:
    worlds = list(range(40))
    missing = np.array([FAMILY.draw(world).impairment == "missing" for world in worlds])
    plans = [Plan(), Plan(1, 1), Plan(2, 1)]
    utility = [np.zeros(40), np.where(missing, 0.3, -0.1), np.where(missing, -0.3, 0.2)]

    def by_group(rows: Sequence[np.ndarray]) -> dict[str, float]:
        values = [row.tolist() for row in rows]
        return PlanTable(task="small", episodes=9, worlds=worlds, plans=plans, utility=values).gain_by_group(FAMILY)

    gains = by_group(utility)
    assert gains["one per impairment"] == pytest.approx(np.where(missing, 0.3, 0.2).mean())
    assert gains["one plan"] < gains["one per impairment"]
    first = np.array([d.impairment == "missing" and d.impaired == 0 for d in map(FAMILY.draw, worlds)])
    gains = by_group([np.zeros(40), np.where(first, 0.3, -0.1), np.where(first, -0.3, 0.2)])
    assert gains["one per impairment and block"] == pytest.approx(np.where(first, 0.3, 0.2).mean())
    assert gains["one per impairment"] < gains["one per impairment and block"]
    even = np.where(np.arange(40) % 2 == 0, 1.0, -1.0)  # what is best in one half of the worlds is worst in the other
    assert list(by_group([np.zeros(40), even, -even]).values()) == pytest.approx([-1.0] * 4)
    one = PlanTable(task="small", episodes=3, worlds=[0], plans=plans, utility=[[0.0], [0.1], [0.2]])
    with pytest.raises(ConfigError, match="two worlds"):
        one.gain_by_group(FAMILY)


def one_plan(worlds: str, plan: str) -> str:
    """Return a table of one plan in one world, as text."""
    return f'{{"task":"a","episodes":1,"worlds":{worlds},"plans":[{plan}],"utility":[[0.5]]}}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        ("{}", "not a table"),
        ('{"task":"a","episodes":1,"worlds":[0],"plans":[],"utility":[]}', "every"),
        (one_plan("[0]", '{"blueprnt":3}'), "unknown field `blueprnt`"),
        (one_plan("[0]", '{"x":' + "[" * 100_000 + "]" * 100_000 + "}"), "unknown field"),
        (one_plan("[0]", '{"blueprint":999,"slots":1}'), "no blueprint with the number 999"),
        (one_plan("[0]", '{"blueprint":-1,"slots":1}'), "no blueprint with the number -1"),
        (one_plan("[0]", '{"blueprint":3,"slots":-1}'), "slots ≥ 0"),
        (one_plan("[0]", '{"blueprint":3,"slots":1,"start_share":1e308}'), "start_share from 0 to 1"),
        (one_plan("[-1]", "{}"), "worlds ≥ 0"),
        ('{"task":"a","episodes":1,"worlds":[0,0],"plans":[{}],"utility":[[0,1]]}', "different"),
        ('{"task":"a","episodes":1,"worlds":[0],"plans":[{},{}],"utility":[[0],[1]]}', "different"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "none",
)
def test_unusable_table_of_plans_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "plans.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_plan_table(file)


@pytest.mark.parametrize("kind", ["family", "task"])
def test_search_in_a_world_keeps_to_its_compute(kind: str, backend: FamilyBackend) -> None:
    single = HostBackend(dataclasses.replace(get_task("digits"), epochs=6, batches_per_epoch=2))
    where = backend if kind == "family" else single
    budget = float(play(where, Wait(), [5], REWARD).train_macs[0])
    result = search_in_world(where, 5, REWARD, 3 * budget, "search")
    assert result.worlds == [5]
    epoch = 4 * budget / 4  # a plan stops after the epoch in which its share is used up
    assert 0.5 * budget < result.train_macs[0] <= 3 * budget + 8 * epoch
    assert np.isfinite(result.utility).all()
    assert np.isfinite(result.test).all()
    assert result.equal_test.size == (kind == "family")  # of no other controller if all worlds have the same host
