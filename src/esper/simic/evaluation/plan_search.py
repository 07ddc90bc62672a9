"""Baselines that search for a fixed plan: in training worlds, per kind of host, or in the evaluated world.

    plan = fit_plan(backend, worlds, reward, episodes=200)       # successive halving over plans in training worlds
    plans = fit_plans_by_kind(backend, worlds, reward, 200, visible_kind)      # one plan for each kind of host
    search_in_world(backend, world, reward, budget_macs)         # what a search tool would do with the same compute
    table = read_plan_table(path)                                # results of `esper plans`, to use instead of a search

A plan is a blueprint, the slots to plant it in, and the first epoch to plant at; or no growth at all.

Legend: W worlds.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from esper.kasmina.blueprints import blueprint_name, registered
from esper.leyline.atomic_io import read_regular
from esper.leyline.errors import ConfigError
from esper.leyline.slot_table import SlotTable, live_costs, network_params
from esper.simic.env import HostBackend
from esper.simic.evaluation.comparison import Compute, Played, measured_on_test, play, structure_of
from esper.simic.family_backend import FamilyBackend
from esper.simic.rewards import Frame, RewardConfig, utility
from esper.tamiyo.controllers import Controller, Schedule, Wait
from esper.tolaria.families import Draw, Family
from esper.tolaria.rollout import rollout

MOST_BYTES = 1 << 24
"""Maximum size of a table of plans in bytes."""
START_SHARES = (0.0, 0.25)
"""Plans plant from the first epoch on, or after this share of the episode."""
KindOf = Callable[[Draw], str]
"""Function that returns the kind of host of a world; "" is no kind."""


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fixed plan of growth; without a blueprint, no growth."""

    blueprint: int | None = None
    slots: int = 0
    """This many slots, ≥ 0, are planted from `first` on; hosts with fewer slots plant all that they have of these."""
    start_share: float = 0.0
    """Planting begins after this share of the episode, 0 to 1."""
    first: int = 0
    """The first slot that is planted has this number, from 0; below 0 it is counted from the last slot of each host,
    −1."""

    def __post_init__(self) -> None:
        count = len(registered())
        if self.blueprint is not None and not 0 <= self.blueprint < count:
            raise ConfigError(
                f"there is no blueprint with the number {self.blueprint}; known ones have 0 to {count - 1}"
            )
        if self.slots < 0 or not 0 <= self.start_share <= 1:
            raise ConfigError(
                f"a plan needs slots ≥ 0 and start_share from 0 to 1, got {self.slots} and {self.start_share}"
            )

    def controller(self, horizon: int) -> Controller:
        """Return a controller that follows the plan in episodes of this length."""
        if self.blueprint is None:
            return Wait()
        start = max(1, round(self.start_share * horizon))
        return Schedule([self.blueprint], slots=self.slots, first=self.first, start=start)

    def __str__(self) -> str:
        if self.blueprint is None:
            return "no growth"
        when = "at once" if not self.start_share else f"after {self.start_share:.0%} of the epochs"
        number = self.first + 1 if self.first >= 0 else f"{-self.first} from the end"
        where = f"in slot {number} only" if self.first else f"in the first {self.slots}"
        return f"{blueprint_name(self.blueprint)} {where}, {when}"


def all_plans(table: SlotTable, *, from_end: bool = False) -> list[Plan]:
    """Return every plan: no growth, and each blueprint that some slot takes, in the first 1, 2, 4, … and all slots.

    Plans at once also use one slot other than the first, with `from_end` also the last and the last but one of each
    host: where hosts have different numbers of slots, these are other plans.
    """
    takes = table.takes[table.enabled.any(axis=0)]  # slots that pad the table take every blueprint
    plantable = np.nonzero(takes.any(axis=0))[0].tolist()
    counts = sorted({n for n in (1, 2, 4, 8) if n < table.num_slots} | {table.num_slots})
    others = [*range(1, table.num_slots), *((-1, -2) if from_end else ())]
    single = [Plan(b, 1, first=slot) for b, slot in itertools.product(plantable, others)]
    return [Plan(), *(Plan(b, n, share) for b, n, share in itertools.product(plantable, counts, START_SHARES)), *single]


class PlanTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Utilities of some plans in training worlds of a task, as `esper plans` writes them."""

    task: str
    """The task or family."""
    episodes: int
    """Number of episodes that the search took, those that selected the plans included."""
    worlds: list[int]
    plans: list[Plan]
    utility: list[list[float]]
    """One list per plan, one value per world."""
    reward: RewardConfig = RewardConfig()
    """The settings of the utility."""

    def __post_init__(self) -> None:
        shape = {len(self.worlds), *map(len, self.utility)}
        if not self.plans or len(self.plans) != len(self.utility) or len(shape) != 1 or not self.worlds:
            raise ConfigError("a table of plans needs a utility of every plan in every world")
        if len(set(self.plans)) < len(self.plans) or len(set(self.worlds)) < len(self.worlds) or min(self.worlds) < 0:
            raise ConfigError("the plans and the worlds of a table must be different ones, the worlds ≥ 0")

    def best(self, worlds: Sequence[int] | None = None) -> Plan:
        """Return the plan with the highest mean utility in these worlds of the table; by default in all."""
        chosen = np.isin(self.worlds, self.worlds if worlds is None else worlds)
        return self.plans[int(np.array(self.utility)[:, chosen].mean(axis=1).argmax())]

    def best_by_kind(self, family: Family, kind_of: KindOf) -> dict[str, Plan]:
        """Return the best plan of each kind of host with several worlds. The entry "" is the best of all."""
        kinds: dict[str, list[int]] = defaultdict(list)
        for world in self.worlds:
            kinds[kind_of(family.draw(world))].append(world)
        return {"": self.best()} | {kind: self.best(members) for kind, members in kinds.items() if len(members) > 1}

    def gain_by_group(self, family: Family) -> dict[str, float]:
        """Return what plans gain in a family if the best one is chosen by each of `PLAN_GROUPS`.

        Plans are chosen in one half of the worlds, every second one, and measured in the other: a plan chosen in the
        same worlds gains too much, by chance. A policy can gain where a later entry exceeds the first.
        """
        if len(self.worlds) < 2:
            raise ConfigError("what plans gain in other worlds needs at least two worlds, got one")
        draws = [family.draw(world) for world in self.worlds]
        return {name: self._cross_fitted([group(draw) for draw in draws]) for name, group in PLAN_GROUPS.items()}

    def _cross_fitted(self, groups: Sequence[str]) -> float:
        """Return the mean utility of the best plan of each group of worlds, chosen in the other half of the worlds.

        A group without a world in that half uses the best plan of all groups.
        """
        utility = np.array(self.utility)
        worlds = np.array(self.worlds)
        of_group = np.array(groups)
        total = 0.0
        for half in (0, 1):
            fits = np.arange(len(worlds)) % 2 == half
            for name in set(groups):
                chosen = worlds[fits & (of_group == name)]
                plan = self.plans.index(self.best((chosen if len(chosen) else worlds[fits]).tolist()))
                total += float(utility[plan, ~fits & (of_group == name)].sum())
        return total / len(worlds)


def read_plan_table(path: Path) -> PlanTable:
    """Return the table of plans in a file of `esper plans`."""
    try:
        return msgspec.json.decode(read_regular(path, MOST_BYTES, follow=True), type=PlanTable)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}. `esper plans` writes one beside its config file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a table of `esper plans`: {error}") from error


def plans_of(backend: HostBackend | FamilyBackend) -> list[Plan]:
    """Return every plan for the hosts of a backend."""
    return all_plans(backend.table, from_end=isinstance(backend, FamilyBackend))


def fit_plan(
    backend: HostBackend | FamilyBackend,
    worlds: Sequence[int],
    reward: RewardConfig,
    episodes: int,
    on_rung: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Return the plan with the highest mean utility, by successive halving over at most `episodes` episodes."""

    def follow_all(plans: Sequence[Plan], some: Sequence[int]) -> list[list[float]]:
        return [utilities(backend, plan, some, reward) for plan in plans]

    return best_plans(plans_of(backend), worlds, episodes, 1, follow_all, on_rung)[0]


def best_plans(
    plans: list[Plan],
    worlds: Sequence[int],
    episodes: int,
    keep: int,
    follow_all: Callable[[Sequence[Plan], Sequence[int]], Iterable[list[float]]],
    on_rung: Callable[[str], None] = lambda _: None,
) -> list[Plan]:
    """Return the `keep` best plans by mean utility, best first, by successive halving.

    `follow_all` returns the utilities of some plans in some worlds, one list per plan.

    Every rung plays the remaining plans in further worlds, the same for all of them, and keeps the better half. It
    uses half of the episodes that are left, the last rung all, so each rung sees about as many worlds: where worlds
    differ, many plans in one world tell little. With fewer episodes than plans, an evenly spread selection is tried.
    """
    if episodes < 2 or not len(worlds):
        raise ConfigError(f"a search for a plan needs at least one world and two episodes, got {episodes}")
    if len(plans) > episodes // 2:
        picks = np.linspace(0, len(plans) - 1, max(1, episodes // 2)).round().astype(int)
        plans = [plans[i] for i in dict.fromkeys(picks.tolist())]
    values: dict[Plan, list[float]] = {plan: [] for plan in plans}
    first = played = 0
    while len(plans) > keep:
        share = 1 if len(plans) // 2 <= keep else 2
        count = max(1, (episodes - played) // share // len(plans))
        some = [worlds[(first + i) % len(worlds)] for i in range(count)]
        first, played = first + count, played + count * len(plans)
        for plan, more in zip(plans, follow_all(plans, some), strict=True):
            values[plan] += more
        plans = sorted(plans, key=lambda plan: -float(np.mean(values[plan])))
        on_rung(f"{len(plans)} plans in {count} worlds; best: {plans[0]}, U {np.mean(values[plans[0]]):+.4f}")
        plans = plans[: max(keep, len(plans) // 2)]
    return plans


def utilities(
    backend: HostBackend | FamilyBackend, plan: Plan, worlds: Sequence[int], reward: RewardConfig
) -> list[float]:
    """Return the utility of a plan in each world."""
    return [float(follow(backend, plan, [world], reward).utility[0]) for world in worlds]


def follow(
    backend: HostBackend | FamilyBackend, plan: Plan, worlds: Sequence[int], reward: RewardConfig, name: str = "",
    compute: Compute | None = None,
) -> Played:  # fmt: skip
    """Follow a plan in these worlds. Its start depends on the length of each episode. For `compute` see `play`."""
    if isinstance(backend, HostBackend):
        return play(backend, plan.controller(backend.horizon), worlds, reward, name, compute=compute)
    parts = [
        play(host, plan.controller(host.horizon), [world], reward, name, compute=compute)
        for world in worlds
        for host in [backend.host(world)]
    ]
    return Played.gather(name, parts)


def visible_kind(draw: Draw) -> str:
    """Return what shapes of activations show of a host without training it: blocks, and a narrow or missing one."""
    visible = draw.impairment if draw.impairment in ("width", "missing") else "whole"
    return f"{draw.blocks} blocks, {visible}"


def impairment_and_block(draw: Draw) -> str:
    """Return what is impaired and, unless nothing is, in which block: what a reader of the host's code knows."""
    return "none" if draw.impairment == "none" else f"{draw.impairment} {draw.impaired}"


PLAN_GROUPS: dict[str, KindOf] = {
    "one plan": lambda _: "",
    "one per visible kind of host": visible_kind,
    "one per impairment": lambda draw: draw.impairment,
    "one per impairment and block": impairment_and_block,
}
"""What a plan may depend on: nothing, what the shapes of a host show, its impairment, which only training or its code
may show, or also which block is impaired."""


def fit_plans_by_kind(
    backend: FamilyBackend, worlds: Sequence[int], reward: RewardConfig, episodes: int, kind_of: KindOf
) -> dict[str, Plan]:
    """Return the best plan of each kind of host, found in training worlds of that kind.

    Each kind gets its share of the episodes; the entry "" is the best plan for kinds with fewer than two.
    """
    family = backend.tasks.family
    groups: dict[str, list[int]] = defaultdict(list)
    for world in worlds:
        groups[kind_of(family.draw(world))].append(world)
    plans = {}
    for kind, members in groups.items():
        share = episodes * len(members) // len(worlds)
        if share >= 2:
            plans[kind] = fit_plan(backend, members, reward, share)
    most = max(groups.values(), key=len)
    return plans | {"": plans.get(kind_of(family.draw(most[0])), Plan())}


def follow_by_kind(
    backend: FamilyBackend, plans: Mapping[str, Plan], kind_of: KindOf, worlds: Sequence[int], reward: RewardConfig,
    name: str, compute: Compute | None = None,
) -> Played:  # fmt: skip
    """Follow in each world the plan of its kind of host."""
    kinds = [kind_of(backend.tasks.family.draw(world)) for world in worlds]
    parts = [
        follow(backend, plans.get(kind, plans[""]), [world], reward, name, compute)
        for kind, world in zip(kinds, worlds, strict=True)
    ]
    return Played.gather(name, parts)


def search_in_world(
    backend: HostBackend | FamilyBackend,
    world: int,
    reward: RewardConfig,
    budget_macs: float,
    name: str,
    plans: int = 8,
) -> Played:
    """Search for a plan in this world by successive halving, with `budget_macs` multiply-adds of training in total.

    Each rung trains the remaining plans further with an equal share of the budget and keeps the better half by
    utility. The last plan is trained with the rest, at most for the length of an episode. Its utility is relative to
    the host without growth after a whole episode.
    """
    hosts = [_fresh(backend, world) for _ in range(plans)]
    pool = all_plans(hosts[0].table)
    picks = np.linspace(0, len(pool) - 1, plans).round().astype(int)
    running = [
        (host, pool[i].controller(host.horizon)) for host, i in zip(hosts, dict.fromkeys(picks.tolist()), strict=False)
    ]
    rungs = int(np.ceil(np.log2(len(running)))) + 1
    spent = 0.0
    for rung in range(rungs):
        goal = (budget_macs - spent) / (rungs - rung) / len(running)
        for host, controller in running:
            before = float(host.table.train_macs[0])
            for _ in rollout(host, controller, host.horizon - int(host.table.step[0])):
                if float(host.table.train_macs[0]) - before >= goal:
                    break
            spent += float(host.table.train_macs[0]) - before
        if len(running) > 1:
            running.sort(key=lambda pair: -_utility_at_end(pair[0], reward))
            running = running[: max(1, len(running) // 2)]
    best = running[0][0]
    params = network_params(best.table, best.context.host_params).astype(np.float64)
    macs = live_costs(best.table, best.context)[1].astype(np.float64)
    quality = best.table.quality.astype(np.float64)
    test = measured_on_test(best)
    value = np.array([_utility_at_end(best, reward)])
    grown = [structure_of(best.engine, 0)]
    equal_test = test if isinstance(backend, FamilyBackend) else np.empty(0)  # at equal compute, in families only
    return Played(name, [world], quality, test, params, macs, value, np.array([spent]), grown, equal_test)


def _fresh(backend: HostBackend | FamilyBackend, world: int) -> HostBackend:
    if isinstance(backend, FamilyBackend):
        return backend.host(world)
    host = HostBackend(backend.task, rules=backend.rules, config=backend.config, data=backend.data, world=world)
    host.baselines = backend.baselines
    return host


def _utility_at_end(host: HostBackend, reward: RewardConfig) -> float:
    """Return the utility of a host relative to its no-growth baseline after a whole episode."""
    final = host.baselines.curves(host.worlds)[:, -1]
    return float(utility(Frame.of(host.table, host.context, final), reward)[0])
