"""Run controllers and static hosts in the same worlds, to compare them with `leyline.paired.compare`.

    grown = play(backend, controller, worlds, reward)        # one episode per world
    compare(grown.utility, other.utility)                   # mean difference, bootstrap 95 % interval

All controllers run in the same worlds (initial weights, data order), so a world's difficulty cancels out of the
difference. Neither these worlds nor the test split, used for the reported accuracy, are used in policy training.

Legend: W worlds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from esper.leyline.actions import Operator
from esper.leyline.slot_table import Floats, live_costs, network_params
from esper.leyline.stages import SeedStage
from esper.simic.env import Backend, HostBackend
from esper.simic.family_backend import FamilyBackend
from esper.simic.rewards import Frame, RewardConfig, utility
from esper.simic.simulator import Simulator
from esper.tamiyo.controllers import Controller, Random, Wait
from esper.tamiyo.controllers.learned import Learned
from esper.tolaria.engine import Engine
from esper.tolaria.rollout import rollout
from esper.tolaria.tasks import Task

AT_ONCE = 8
"""Number of worlds that run in parallel: enough to amortise overheads, few enough to fit into memory."""
LONGEST = 4
"""A controller gets at most the epochs of this many episodes to spend a given training compute."""
Structure = dict[str, tuple[str, Operator]]
Compute = Mapping[int, float]
"""Training multiply-adds by world."""


@dataclass(slots=True)
class Played:
    """Results of one controller, or one kind of host, per world. NaN where the backend has no such number."""

    name: str
    worlds: list[int]
    quality: Floats  # [W] on the validation split, at the end
    test: Floats  # [W] on the test split
    params: Floats  # [W] parameters of the exported network
    macs: Floats  # [W] multiply-adds on one sample
    utility: Floats  # [W]
    train_macs: Floats  # [W] multiply-adds spent on training
    structures: list[Structure] = field(default_factory=list)
    equal_test: Floats = field(default_factory=lambda: np.empty(0))
    """[W] on the test split after a given training compute, the same for all controllers; empty if none was given."""

    @classmethod
    def gather(cls, name: str, parts: Sequence[Played]) -> Played:
        """Return the concatenation of several results."""
        columns = {
            column: np.concatenate([getattr(p, column) for p in parts])
            for column in ("quality", "test", "params", "macs", "utility", "train_macs", "equal_test")
        }
        return cls(
            name, [w for p in parts for w in p.worlds], structures=[s for p in parts for s in p.structures], **columns
        )


def play(
    backend: Backend,
    controller: Controller,
    worlds: Sequence[int],
    reward: RewardConfig,
    name: str = "",
    on_step: Callable[[], None] = lambda: None,
    compute: Compute | None = None,
) -> Played:
    """Run one episode per world under one controller and return the results.

    `compute` gives the training multiply-adds, by world, after which `equal_test` is measured; it needs backends of one
    environment. A controller that has spent less at the end of the episode goes on, for at most `LONGEST` episodes.
    """
    parts = []
    for some in episodes(backend, worlds):
        if isinstance(controller, Learned):
            controller.bind(some.context, some.worlds)
        elif isinstance(controller, Random):
            controller.bind(some.worlds)
        limit = None if compute is None else compute[some.worlds[0]]
        equal_test, result = None, None
        for step in rollout(some, controller, some.horizon * (1 if limit is None else LONGEST)):
            on_step()
            if limit is not None and equal_test is None and some.table.train_macs[0] >= limit:
                equal_test = measured_on_test(some)
            if step.number + 1 == some.horizon:
                result = results_of(some, reward, name)
            if result is not None and (limit is None or equal_test is not None):
                break
        assert result is not None
        if limit is not None:
            result.equal_test = measured_on_test(some) if equal_test is None else equal_test
        parts.append(result)
    return Played.gather(name, parts)


def measured_on_test(backend: HostBackend | Simulator) -> Floats:
    """Return the quality [E] of a backend's environments on the test split; NaN for simulated hosts."""
    if isinstance(backend, Simulator):
        return np.full(len(backend.worlds), np.nan)
    return np.array([network.test(backend.engine.data.test)[0] for network in backend.engine.networks])


def episodes(backend: Backend, worlds: Sequence[int]) -> Iterator[HostBackend | Simulator]:
    """Yield backends at the start of an episode in these worlds, several of them at once if hosts are equal."""
    if isinstance(backend, Simulator):
        yield Simulator(backend.config, worlds, backend.rules)
    elif isinstance(backend, FamilyBackend):
        yield from map(backend.host, worlds)
    else:
        assert isinstance(backend, HostBackend)
        for some in chunks(worlds, AT_ONCE):
            backend.reset(some)
            yield backend


def results_of(backend: HostBackend | Simulator, reward: RewardConfig, name: str) -> Played:
    """Return the current results of a backend's environments."""
    frame = Frame.of(backend.table, backend.context, backend.baseline_quality)
    params, macs = (
        network_params(backend.table, backend.context.host_params),
        live_costs(backend.table, backend.context)[1],
    )
    structures = []
    if isinstance(backend, HostBackend):
        structures = [structure_of(backend.engine, e) for e in range(len(backend.engine.networks))]
    sizes = (params.astype(np.float64), macs.astype(np.float64))
    train_macs = backend.table.train_macs.astype(np.float64)
    return Played(
        name, list(backend.worlds), frame.quality, measured_on_test(backend), *sizes, utility(frame, reward),
        train_macs, structures,
    )  # fmt: skip


def structure_of(engine: Engine, env: int) -> Structure:
    """Return the grown structure of an environment, as `Engine.plant_fossils` expects it."""
    return {
        name: (slot.blueprint, Operator(slot.operator))
        for name, slot in engine.networks[env].body.slots.items()
        if slot.seed is not None and slot.stage >= SeedStage.BLENDING
    }


def from_start(backend: HostBackend | FamilyBackend, grown: Played, reward: RewardConfig, name: str) -> Played:
    """Train the grown structures as parts of the host from the first step, and return the results."""
    parts = []
    structures = dict(zip(grown.worlds, grown.structures, strict=True))
    for some in episodes(backend, grown.worlds):
        assert isinstance(some, HostBackend)
        for env, world in enumerate(some.worlds):
            some.engine.plant_fossils(env, structures[world])
        for _ in rollout(some, Wait(), some.horizon):
            pass
        parts.append(results_of(some, reward, name))
    return Played.gather(name, parts)


def static(backend: HostBackend, task: Task, worlds: Sequence[int], reward: RewardConfig, name: str) -> Played:
    """Train another host without growth for the same number of epochs.

    Utility is relative to the backend's own host.
    """
    other = HostBackend(task, rules=backend.rules, config=backend.config, data=backend.data)
    parts = []
    for some in chunks(worlds, AT_ONCE):
        other.reset(some)
        backend.reset(some)
        for _ in rollout(other.engine, Wait(), task.epochs):
            pass
        params, macs = (np.full(len(some), float(x)) for x in (other.context.host_params, other.context.host_macs))
        backend.table.step[:] = task.epochs
        frame = Frame.of(backend.table, backend.context, backend.baseline_quality)
        frame = frame.measured(other.table.quality.astype(np.float64), params, macs)
        test = measured_on_test(other)
        train_macs = other.table.train_macs.astype(np.float64)
        parts.append(Played(name, list(some), frame.quality, test, params, macs, utility(frame, reward), train_macs))
    return Played.gather(name, parts)


def chunks(worlds: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield consecutive parts of `worlds` of at most `size` each."""
    for i in range(0, len(worlds), size):
        yield list(worlds[i : i + size])
