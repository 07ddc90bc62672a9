"""Backend of a task family: every environment has its own host, data, slots and episode length.

    backend = FamilyBackend(get_family("mend"))
    backend.reset([0, 1, 2])     # three worlds, three tasks

Each environment is a `HostBackend` of one world. The table that the others see is their concatenation, padded to the
family's largest number of slots; padded slots are disabled. An environment whose episode has ended waits, unchanged,
until all have ended.

Legend: E environments, S slots of the largest host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from esper.leyline.lifecycle import Outcome, Rules
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable
from esper.simic.attribution import Worth
from esper.simic.env import HostBackend, Part
from esper.tamiyo.policy.action_masks import padded_legal
from esper.tolaria.data import Dataset, load_data
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.families import Family
from esper.tolaria.governor import Alarm
from esper.tolaria.rollout import PhaseTimers
from esper.tolaria.tasks import Task


class FamilyTasks:
    """Tasks of a family with their data, of which each data set is read once."""

    def __init__(self, family: Family, data_root: Path | None = None) -> None:
        self.family = family
        self.sets: dict[str, Dataset] = {name: load_data(name, data_root) for name in dict.fromkeys(family.datasets)}

    def task(self, world: int) -> Task:
        """Return the task of a world, with its data."""
        task = self.family.task(world)
        return dataclasses.replace(task, data=self.sets[task.dataset])

    @property
    def data_hash(self) -> str:
        """Hash of the family's definition and of its data sets."""
        return "+".join([self.family.fingerprint()[:16], *(data.sha256[:16] for data in self.sets.values())])


class FamilyBackend:
    """E environments of one family.

    No-growth baselines are trained once per world and cached in the directories `baselines`.
    """

    def __init__(
        self,
        tasks: FamilyTasks,
        *,
        rules: Rules | None = None,
        config: EngineConfig | None = None,
        baselines: Sequence[Path] = (),
        phases: PhaseTimers | None = None,
    ) -> None:
        self.tasks = tasks
        self.rules = rules or Rules()
        self.config = config or EngineConfig()
        self.phases = phases or PhaseTimers()
        self.on_pause: Callable[[], None] = lambda: None
        self.slots = tasks.family.longest()
        self.horizon = max(tasks.family.epochs)
        self.data_hash = tasks.data_hash
        self._directories = list(baselines)
        self._curves: dict[int, list[float]] = {}
        self.reset([0])

    def store_baselines_in(self, directory: Path) -> None:
        """Cache no-growth baselines in this directory, too, from the next episode on."""
        self._directories.append(directory)

    def reset(self, worlds: Sequence[int]) -> None:
        """Build new hosts, one per world."""
        self.worlds = list(worlds)
        self.hosts = [self.host(world) for world in worlds]
        self.worth: list[Worth] = []
        self._join()

    def host(self, world: int) -> HostBackend:
        """Return a new backend of this world alone."""
        host = HostBackend(
            self.tasks.task(world), rules=self.rules, config=self.config, baselines=self._directories,
            phases=self.phases, world=world,
        )  # fmt: skip
        host.on_pause = lambda: self.on_pause()
        host.add_baselines({world: self._curves[world]} if world in self._curves else {})
        return host

    def _join(self) -> None:
        self.table = SlotTable.joined([host.table for host in self.hosts], len(self.slots))

    @property
    def parts(self) -> list[Part]:
        """One part per environment."""
        return [part for host in self.hosts for part in host.parts]

    @property
    def host_params(self) -> Ints:
        """[E] parameters of each host without seeds."""
        return np.array([host.context.host_params for host in self.hosts])

    def step(self, actions: Ints) -> Outcome:
        """Step every environment whose episode has not ended."""
        happened = np.ones(len(self.hosts), dtype=bool)
        effects = []
        self.alarms: list[Alarm] = []
        for e, host in enumerate(self.hosts):
            if host.table.step[0] >= host.horizon:
                continue
            outcome = host.step(actions[e : e + 1])
            happened[e] = outcome.happened[0]
            effects += [effect._replace(env=e) for effect in outcome.effects]
            self.alarms += [dataclasses.replace(alarm, env=e) for alarm in host.alarms]
        self.worth = [host.worth[0] for host in self.hosts]
        self._join()
        return Outcome(happened, effects)

    @property
    def legal(self) -> Bools:
        """[E, O, S] operations that are legal now."""
        return np.concatenate([padded_legal(host.legal, len(self.slots)) for host in self.hosts])

    @property
    def baseline_quality(self) -> Floats:
        """[E] quality of each world's no-growth baseline at the current step; NaN before the first step."""
        quality = np.concatenate([host.baseline_quality for host in self.hosts])
        for host in self.hosts:
            self._curves |= host.baseline_curves()
        return quality

    def baseline_curves(self) -> dict[int, list[float]]:
        """Return the no-growth baselines computed so far, by world."""
        for host in self.hosts:
            self._curves |= host.baseline_curves()
        return dict(self._curves)

    def add_baselines(self, curves: Mapping[int, list[float]]) -> None:
        """Add no-growth baselines computed earlier, by world."""
        self._curves |= curves
