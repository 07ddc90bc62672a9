"""Backends of growth environments: real hosts here, simulated ones in `simulator.py`.

    backend.reset(worlds)        new hosts, one per world
    backend.step(actions)        apply, tick, train an epoch, validate, record → Outcome

A backend owns the table, the prices and the no-growth baselines. Observations and rewards are computed in `env.py`.

Legend: E environments, S slots, B blueprints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Protocol

import numpy as np

from esper.kasmina.body import Body
from esper.kasmina.lifecycle import Outcome, Rules
from esper.leyline.profiler import PhaseTimers
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable
from esper.leyline.stages import Thresholds
from esper.simic.attribution import CounterfactualHelper, Worth
from esper.simic.evaluation.no_growth_baseline import NoGrowthBaselines
from esper.tamiyo.policy.features import ObsContext
from esper.tolaria.data import Dataset
from esper.tolaria.engine import Engine
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.governor import Alarm
from esper.tolaria.host_costs import blueprint_costs, host_macs_and_order
from esper.tolaria.tasks import Task


@dataclass(frozen=True, slots=True)
class Part:
    """Environments of a backend that share one host structure: what observations and rewards are computed from."""

    table: SlotTable
    context: ObsContext
    baseline_quality: Floats  # [E] of each world's no-growth baseline


class Backend(Protocol):
    """Interface of a backend: E environments that are stepped together."""

    table: SlotTable
    rules: Rules
    slots: tuple[str, ...]
    worlds: list[int]
    data_hash: str
    """Hash of the data that the hosts are trained on."""
    worth: list[Worth]
    """Worth measured in the last step, one per environment; empty if nothing was measured."""
    on_pause: Callable[[], None]
    """Called at points where long computations can be interrupted. It may raise."""

    @property
    def horizon(self) -> int:
        """Steps of the longest episode."""
        ...

    @property
    def parts(self) -> list[Part]:
        """The environments in order, grouped by host structure."""
        ...

    @property
    def host_params(self) -> Ints:
        """[E] parameters of each host without seeds."""
        ...

    @property
    def alarms(self) -> list[Alarm]:
        """Alarms of the governor in the last step."""
        ...

    @property
    def legal(self) -> Bools:
        """[E, O, S] operations that are legal now."""
        ...

    @property
    def baseline_quality(self) -> Floats:
        """[E] quality of each world's no-growth baseline at the current step of its environment."""
        ...

    def baseline_curves(self) -> dict[int, list[float]]:
        """Return the no-growth baselines computed so far, by world."""
        ...

    def add_baselines(self, curves: Mapping[int, list[float]]) -> None:
        """Add no-growth baselines computed earlier, by world."""
        ...

    def reset(self, worlds: Sequence[int]) -> None:
        """Start new episodes, one per world."""
        ...

    def step(self, actions: Ints) -> Outcome:
        """Apply actions [E, 8], tick, train an epoch, validate and record."""
        ...


class HostBackend:
    """Backend of real hosts of one task.

    No-growth baselines are trained once per world and cached in the directories `baselines`. Before the first `reset`
    there is one environment, of `world`.
    """

    def __init__(
        self,
        task: Task,
        *,
        rules: Rules | None = None,
        config: EngineConfig | None = None,
        data: Dataset | None = None,
        baselines: Sequence[Path] = (),
        phases: PhaseTimers | None = None,
        world: int = 0,
    ) -> None:
        self.task, self.rules, self.config = task, rules or Rules(), config or EngineConfig()
        self.data = data or task.load_data()
        self.phases = phases or PhaseTimers()
        self.baselines = NoGrowthBaselines(task, self.data, self.config, baselines)
        self.on_pause: Callable[[], None] = lambda: None
        self.baselines.on_progress = lambda *_: self.on_pause()
        self.slots, self.data_hash = task.slots, self.data.sha256
        self._helper = CounterfactualHelper()
        self.reset([world])
        self.context = context_of(self.engine.networks[0].body, task.epochs, self.rules.thresholds, self.data.classes)

    def reset(self, worlds: Sequence[int]) -> None:
        """Build new hosts, one per world."""
        self.worlds = list(worlds)
        self.worth: list[Worth] = []
        self._curves: Floats | None = None  # [E, T] no-growth baselines of these worlds, computed on first use
        self.engine = Engine(
            self.task, self.worlds, rules=self.rules, config=self.config, data=self.data, phases=self.phases
        )
        self.table = self.engine.table

    def step(self, actions: Ints) -> Outcome:
        """Apply actions [E, 8], train an epoch, validate and compute the worth of the seeds."""
        outcome = self.engine.step(actions)
        with self.phases("worth"):
            self.worth = self._helper.process_batch(self.engine)
        return outcome

    @property
    def horizon(self) -> int:
        """Steps of an episode."""
        return self.context.horizon

    @property
    def parts(self) -> list[Part]:
        """All environments: they share one host structure."""
        return [Part(self.table, self.context, self.baseline_quality)]

    @property
    def host_params(self) -> Ints:
        """[E] parameters of each host without seeds."""
        return np.full(len(self.worlds), self.context.host_params)

    @property
    def alarms(self) -> list[Alarm]:
        """Alarms of the governor in the last step."""
        return self.engine.alarms

    @property
    def legal(self) -> Bools:
        """[E, O, S] operations that are legal now."""
        return self.engine.legal

    @property
    def baseline_quality(self) -> Floats:
        """[E] quality of each world's no-growth baseline at the current step; NaN before the first step."""
        step = self.table.step
        if not step.any():  # no environment has been validated yet
            return np.full(len(step), np.nan)
        if self._curves is None:
            with self.phases("twins"):
                self._curves = self.baselines.curves(self.worlds)
        now = self._curves[np.arange(len(step)), np.clip(step, 1, self._curves.shape[1]) - 1]
        return np.where(step > 0, now, np.nan)

    def store_baselines_in(self, directory: Path) -> None:
        """Cache no-growth baselines in this directory, too."""
        self.baselines.store_in(directory)

    def baseline_curves(self) -> dict[int, list[float]]:
        """Return the no-growth baselines computed so far, by world."""
        return dict(self.baselines.cached)

    def add_baselines(self, curves: Mapping[int, list[float]]) -> None:
        """Add no-growth baselines computed earlier, by world."""
        self.baselines.cached.update(curves)


def context_of(body: Body, horizon: int, thresholds: Thresholds, classes: int | None = None) -> ObsContext:
    """Return the host's sizes and the cost of every blueprint, which a policy observes besides the table.

    Host sizes exclude seeds. `classes` is None if the loss has no chance level.
    """
    slots = list(body.slots.values())
    params, macs = blueprint_costs(body)
    host_macs, reached = host_macs_and_order(body)
    depth = [reached.index(slot.name) for slot in slots]
    return ObsContext(
        horizon=horizon,
        host_params=sum(p.numel() for p in body.model.parameters()),
        host_macs=max(1, host_macs),
        slot_width=np.array([slot.site.dim for slot in slots]),
        slot_params=params,
        slot_macs=macs,
        slot_depth=np.array(depth) / max(1, len(slots) - 1),
        chance_loss=log(classes) if classes and classes > 1 else None,
        thresholds=thresholds,
    )
