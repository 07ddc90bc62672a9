"""Comparing controllers: the same worlds for all, differences world by world, and how sure they are.

    grown = play(ground, controller, worlds, reward)        # one episode per world
    compare(grown.utility, other.utility)                   # mean difference, bootstrap 95 % interval

All controllers live through the same worlds (initial weights, order of data), so what a world finds hard cancels out
of a difference. Worlds and, for the reported accuracy, the test split had no part in training a policy.

Legend: W worlds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from esper.kasmina.blueprints import blueprint_name
from esper.leyline.actions import Operator
from esper.leyline.costs import live_costs, network_params
from esper.leyline.slot_table import Floats
from esper.leyline.stages import SeedStage
from esper.simic.ground import Ground, HostGround
from esper.simic.rewards import Frame, RewardConfig, utility
from esper.simic.simulator import Simulator
from esper.tamiyo.controllers import Controller, Random, Schedule, Wait
from esper.tamiyo.controllers.learned import Learned
from esper.tolaria.engine import Engine
from esper.tolaria.rollout import rollout
from esper.tolaria.tasks import Task

AT_ONCE = 8
"""Worlds that live side by side: enough to keep overheads small, few enough for any memory."""
Structure = dict[str, tuple[str, Operator]]


@dataclass(slots=True)
class Played:
    """How one controller, or one kind of host, did in every world. NaN where a ground has no such figure."""

    name: str
    worlds: list[int]
    quality: Floats  # [W] on the validation split, at the end
    test: Floats  # [W] on the test split
    params: Floats  # [W] of the network that an export holds
    macs: Floats  # [W] multiply-adds on one sample
    utility: Floats  # [W]
    structures: list[Structure] = field(default_factory=list)

    @classmethod
    def gather(cls, name: str, parts: Sequence[Played]) -> Played:
        columns = {
            column: np.concatenate([getattr(p, column) for p in parts])
            for column in ("quality", "test", "params", "macs", "utility")
        }
        return cls(
            name, [w for p in parts for w in p.worlds], structures=[s for p in parts for s in p.structures], **columns
        )


class Difference(NamedTuple):
    mean: float
    low: float
    high: float

    @property
    def is_sure(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.low > 0 or self.high < 0


def compare(ours: Floats, theirs: Floats, *, repeats: int = 10_000, seed: int = 0) -> Difference:
    """Mean difference over worlds, with its bootstrap 95 % interval."""
    difference = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = difference[rng.integers(0, len(difference), (repeats, len(difference)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Difference(float(difference.mean()), float(low), float(high))


def play(
    ground: Ground,
    controller: Controller,
    worlds: Sequence[int],
    reward: RewardConfig,
    name: str = "",
    on_step: Callable[[], None] = lambda: None,
) -> Played:
    """One episode in every world under one controller."""
    parts = []
    for some in chunks(worlds, AT_ONCE if isinstance(ground, HostGround) else len(worlds)):
        if isinstance(ground, Simulator):
            ground = Simulator(ground.config, some, ground.rules)
        ground.reset(some)
        if isinstance(controller, Learned):
            controller.bind(ground.context, some)
        elif isinstance(controller, Random):
            controller.bind(some)
        for _ in rollout(ground, controller, ground.context.horizon):
            on_step()
        parts.append(judged(ground, reward, name))
    return Played.gather(name, parts)


def judged(ground: Ground, reward: RewardConfig, name: str) -> Played:
    """How the environments of a ground stand now."""
    frame = Frame.of(ground.table, ground.context, ground.twin_quality)
    params, macs = network_params(ground.table, ground.context.host_params), live_costs(ground.table, ground.context)[1]
    test, structures = np.full(len(frame.quality), np.nan), []
    if isinstance(ground, HostGround):
        engine = ground.engine
        test = np.array([plot.test(engine.data.test)[0] for plot in engine.networks])
        structures = [structure_of(engine, e) for e in range(len(engine.networks))]
    sizes = (params.astype(np.float64), macs.astype(np.float64))
    return Played(name, list(ground.worlds), frame.quality, test, *sizes, utility(frame, reward), structures)


def structure_of(engine: Engine, env: int) -> Structure:
    """What has grown in an environment, as `Engine.plant_fossils` takes it."""
    return {
        name: (slot.blueprint, Operator(slot.operator))
        for name, slot in engine.networks[env].body.slots.items()
        if slot.seed is not None and slot.stage >= SeedStage.BLENDING
    }


def from_start(ground: HostGround, grown: Played, reward: RewardConfig, name: str) -> Played:
    """The structures that grew, trained from the first step as parts of the host."""
    parts = []
    for i in range(0, len(grown.worlds), AT_ONCE):
        ground.reset(grown.worlds[i : i + AT_ONCE])
        for env, structure in enumerate(grown.structures[i : i + AT_ONCE]):
            ground.engine.plant_fossils(env, structure)
        for _ in rollout(ground, Wait(), ground.context.horizon):
            pass
        parts.append(judged(ground, reward, name))
    return Played.gather(name, parts)


def static(ground: HostGround, task: Task, worlds: Sequence[int], reward: RewardConfig, name: str) -> Played:
    """Another host without growth, with the same budget of epochs; charged against the ground's own host."""
    other = HostGround(task, rules=ground.rules, config=ground.config, data=ground.data)
    parts = []
    for some in chunks(worlds, AT_ONCE):
        other.reset(some)
        ground.reset(some)
        for _ in rollout(other.engine, Wait(), task.epochs):
            pass
        params, macs = (np.full(len(some), float(x)) for x in (other.context.host_params, other.context.host_macs))
        ground.table.step[:] = task.epochs
        frame = Frame.of(ground.table, ground.context, ground.twin_quality)
        frame = frame.measured(other.table.quality.astype(np.float64), params, macs)
        test = np.array([plot.test(other.data.test)[0] for plot in other.engine.networks])
        parts.append(Played(name, list(some), frame.quality, test, params, macs, utility(frame, reward)))
    return Played.gather(name, parts)


def best_schedule_on(
    ground: HostGround, worlds: Sequence[int], reward: RewardConfig, on_try: Callable[[str], None] = lambda text: None
) -> tuple[Schedule, str]:
    """The fixed schedule with the highest mean utility in these worlds, and what it is.

    Searched: which blueprint, and in how many slots, from the first; each planted as soon as the rules allow and
    committed as soon as it has been measured.
    """
    best: tuple[float, Schedule, str] | None = None
    table = ground.table
    taken = [b for b in range(table.takes.shape[1]) if table.takes[:, b].any()]
    for blueprint, slots in itertools.product(taken, range(1, table.num_slots + 1)):
        schedule = Schedule([blueprint], slots=slots)
        told = f"{blueprint_name(blueprint)} in the first {slots}"
        value = float(play(ground, schedule, worlds, reward).utility.mean())
        on_try(f"{told}: {value:+.4f}")
        if best is None or value > best[0]:
            best = value, schedule, told
    assert best is not None
    return best[1], best[2]


def chunks(worlds: Sequence[int], size: int) -> Iterator[list[int]]:
    for i in range(0, len(worlds), size):
        yield list(worlds[i : i + size])
