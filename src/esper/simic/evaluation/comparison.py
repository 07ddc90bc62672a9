"""Run controllers and static hosts in the same worlds, to compare them with `leyline.paired.compare`.

    grown = play(backend, controller, worlds, reward)        # one episode per world
    compare(grown.utility, other.utility)                   # mean difference, bootstrap 95 % interval

All controllers run in the same worlds (initial weights, data order), so a world's difficulty cancels out of the
difference. Neither these worlds nor the test split, used for the reported accuracy, are used in policy training.

Legend: W worlds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
Structure = dict[str, tuple[str, Operator]]


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

    @classmethod
    def gather(cls, name: str, parts: Sequence[Played]) -> Played:
        """Return the concatenation of several results."""
        columns = {
            column: np.concatenate([getattr(p, column) for p in parts])
            for column in ("quality", "test", "params", "macs", "utility", "train_macs")
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
) -> Played:
    """Run one episode per world under one controller and return the results."""
    parts = []
    for some in episodes(backend, worlds):
        if isinstance(controller, Learned):
            controller.bind(some.context, some.worlds)
        elif isinstance(controller, Random):
            controller.bind(some.worlds)
        for _ in rollout(some, controller, some.horizon):
            on_step()
        parts.append(results_of(some, reward, name))
    return Played.gather(name, parts)


def episodes(backend: Backend, worlds: Sequence[int]) -> Iterator[HostBackend | Simulator]:
    """Yield backends at the start of an episode in each of these worlds, several of them at once if hosts are equal."""
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
    test, structures = np.full(len(frame.quality), np.nan), []
    if isinstance(backend, HostBackend):
        engine = backend.engine
        test = np.array([network.test(engine.data.test)[0] for network in engine.networks])
        structures = [structure_of(engine, e) for e in range(len(engine.networks))]
    sizes = (params.astype(np.float64), macs.astype(np.float64))
    train_macs = backend.table.train_macs.astype(np.float64)
    return Played(
        name, list(backend.worlds), frame.quality, test, *sizes, utility(frame, reward), train_macs, structures
    )


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
        test = np.array([network.test(other.data.test)[0] for network in other.engine.networks])
        train_macs = other.table.train_macs.astype(np.float64)
        parts.append(Played(name, list(some), frame.quality, test, params, macs, utility(frame, reward), train_macs))
    return Played.gather(name, parts)


def chunks(worlds: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield consecutive parts of `worlds` of at most `size` each."""
    for i in range(0, len(worlds), size):
        yield list(worlds[i : i + size])
