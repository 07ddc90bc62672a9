"""Training within compute budgets: one trunk at a constant learning rate, one decay branch per budget.

    session = Session(task, world, unit=full_training_macs(task), rules=Rules(birth="open"))
    points = session.run(Schedule(["conv_heavy"], start=8), budgets=[0.5, 1.0])

Budgets are multiples of one full training: `task.epochs` epochs of the full structure. A branch copies the trunk when
the remaining budget equals the decay, lowers the learning rate linearly to 0 without growth, and is measured at its
end. So every budget has its own decay, and no decay begins before the growth within the budget has ended.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Sequence
from dataclasses import replace

from esper.kasmina.blueprints import blueprint, registered
from esper.kasmina.blueprints.builtin import transformer_block
from esper.leyline.actions import Operator
from esper.leyline.lifecycle import Rules
from esper.leyline.rng import derive_seed
from esper.leyline.slot_table import live_costs, network_params
from esper.simic.env import context_of
from esper.simic.evaluation.comparison import structure_of
from esper.studies.contract import Point
from esper.tamiyo.controllers import Controller, Wait
from esper.tolaria.data import Dataset, Split
from esper.tolaria.engine import Engine
from esper.tolaria.network_state import engine_state, load_engine
from esper.tolaria.rollout import rollout
from esper.tolaria.tasks import Task, decay_factor

Structure = dict[str, str]
"""Blueprint by slot."""
WATCHED = 256
"""Number of validation samples in epochs between two points. Only the governor uses their loss."""
FULL = {"map": "conv_heavy", "sequence": "block", "vector": "mlp"}
"""Blueprint of the full structure by layout of the features."""


def full_structure(task: Task) -> Structure:
    """Return the full structure of a task: the largest blueprint in every slot; for text, a transformer layer."""
    slots = Engine(task, [0], data=shared_data(task)).networks[0].body.slots
    structure = {name: FULL[slot.spec.layout] for name, slot in slots.items()}
    if "block" in structure.values() and "block" not in registered():
        blueprint("block", layouts="sequence")(transformer_block)
    return structure


class Session:
    """Training of one network in one world, measured at several budgets.

    task        the task; its learning rates follow warm-up, constant, decay
    world       the world: initialisation, data order, weights of seeds
    unit        multiply-adds of one full training, the unit of budgets
    rules       lifecycle rules of growing arms
    structure   seeds that belong to the host from step 0
    change      before this epoch of the trunk, training sees the first half of the classes only; 0: never
    samples     number of training samples, drawn by the world; 0: all
    max_epochs  a trunk ends after this many epochs, also if its budgets are not used up; None sets no limit
    """

    def __init__(
        self,
        task: Task,
        world: int,
        *,
        unit: int,
        rules: Rules | None = None,
        structure: Structure | None = None,
        change: int = 0,
        samples: int = 0,
        max_epochs: int | None = None,
    ) -> None:
        self.task = replace(task, lr_schedule="wsd")
        self.world = world
        self.unit = unit
        self.rules = rules or Rules()
        self.max_epochs = max_epochs
        self.data = few_samples(shared_data(task), samples, world)
        self.change = change
        self.watched = few_validation(self.data)
        self.few_classes = first_classes(self.data, self.data.classes // 2) if change else self.data
        self.engine = self._engine()
        self.engine.lr_factor = self.task.warmup_factor
        if structure:
            self.engine.plant_fossils(0, {slot: (name, Operator.ADD) for slot, name in structure.items()})
        self.started = time.monotonic()
        self.branch_seconds = 0.0

    @property
    def spent(self) -> int:
        """Training multiply-adds of the trunk so far."""
        return int(self.engine.table.train_macs[0])

    @property
    def epoch_macs(self) -> int:
        """Multiply-adds of an epoch of the trunk as it is now."""
        return self.engine.compute.epoch_macs(self.engine.networks[0])

    @property
    def epochs(self) -> int:
        """Epochs of the trunk so far."""
        return int(self.engine.table.step[0])

    @property
    def quality(self) -> float:
        """Validation quality of the trunk after its last epoch."""
        return float(self.engine.table.quality[0])

    def epochs_within(self, budget: float) -> int:
        """Return the epochs, decay included, of a point at this budget if the structure stays as it is."""
        return self.epochs + max(1, (int(budget * self.unit) - self.spent) // self.epoch_macs)

    def pretrain(self, epochs: int) -> None:
        """Train the host without growth for these epochs, decay included, as a model that exists already.

        Its compute does not count. Afterwards the learning rates warm up again.
        """
        if not epochs:
            return
        self.engine.lr_factor = replace(self.task, epochs=epochs).lr_factor
        for _ in rollout(self.engine, Wait(), epochs):
            pass
        self.engine.table.train_macs[:] = 0
        self.engine.lr_factor = lambda step: self.task.warmup_factor(step - epochs)

    def copy(self, structure: Structure | None = None) -> Session:
        """Return an independent copy of the trunk as it is now, with further seeds if a structure is given."""
        other = copy.copy(self)
        other.engine = self._fork()
        other.engine.lr_factor = self.engine.lr_factor
        if structure:
            other.engine.plant_fossils(0, {slot: (name, Operator.ADD) for slot, name in structure.items()})
        return other

    def advance(self, controller: Controller, macs: int) -> None:
        """Train the trunk for as many whole epochs as fit into `macs` multiply-adds since its start."""
        while self.spent + self.epoch_macs <= macs:
            self._step(controller)

    def run(self, controller: Controller, budgets: Sequence[float]) -> list[Point]:
        """Train the trunk under a controller and return one point per budget, in ascending order."""
        points = []
        for budget in budgets:
            macs = int(budget * self.unit)
            if isinstance(controller, Wait):
                self.engine.data = self.watched
            while not self._decay_is_due(macs) and self._step_within(controller, macs):
                pass
            self.engine.data = self.data
            points.append(self.branch(budget, macs))
        return points

    def _step_within(self, controller: Controller, macs: int) -> bool:
        """Train the trunk for an epoch, unless it plants a seed after which no epoch of decay fits into `macs`.

        In that case the trunk stays as it was, and the step is left to the next budget.
        """
        before = None if isinstance(controller, Wait) else self.copy().engine
        self._step(controller)
        if before is None or self.spent + self.epoch_macs <= macs:
            return True
        self.engine = before
        return False

    def _step(self, controller: Controller) -> None:
        self.engine.networks[0].data = self.few_classes if self.epochs < self.change else self.data
        next(rollout(self.engine, controller, 1))

    def _decay_is_due(self, macs: int) -> bool:
        if self.max_epochs is not None and self.epochs >= self.max_epochs:
            return True
        return macs - self.spent - self.epoch_macs < max(self.task.decay_share * macs, self.epoch_macs)

    def branch(self, budget: float, macs: int) -> Point:
        """Decay a copy of the trunk within what is left of `macs`, and measure it."""
        started = time.monotonic()
        fork = self._fork()
        epochs = max(1, (macs - self.spent) // self.epoch_macs)
        if self.max_epochs is not None:
            epochs = min(epochs, max(1, round(self.task.decay_share * self.max_epochs)))
        begin = self.epochs
        fork.lr_factor = lambda step: decay_factor(step - begin, epochs, 1.0)
        fork.data = self.watched
        for _ in rollout(fork, Wait(), epochs):
            pass
        point = self._measure(fork, budget, started)
        self.branch_seconds += time.monotonic() - started
        return point

    def _measure(self, engine: Engine, budget: float, started: float) -> Point:
        table = engine.table
        network = engine.networks[0]
        context = context_of(network.body, self.task.epochs, self.rules.thresholds, self.data.classes)
        accuracy, loss = network.test(self.data.test)
        trunk = started - self.started - self.branch_seconds
        return Point(
            budget=budget,
            train_macs=int(table.train_macs[0]),
            val_quality=network.test(self.data.val)[0],
            test_quality=accuracy,
            test_loss=loss,
            params=int(network_params(table, context.host_params)[0]),
            macs_per_sample=int(live_costs(table, context)[1][0]),
            epochs=int(table.step[0]),
            structure={slot: blueprint for slot, (blueprint, _) in structure_of(engine, 0).items()},
            seconds=trunk + time.monotonic() - started,
        )

    def _fork(self) -> Engine:
        fork = self._engine()
        load_engine(fork, engine_state(self.engine))
        return fork

    def _engine(self) -> Engine:
        return Engine(self.task, [self.world], rules=self.rules, data=self.data)


def first_classes(data: Dataset, count: int) -> Dataset:
    """Return the data with the training samples of the first `count` classes only."""
    keep = data.train.y < count
    return replace(data, train=Split(data.train.x[keep], data.train.y[keep]))


def shared_data(task: Task) -> Dataset:
    """Return the data of a task. The sessions of a process share it: a search trains many networks."""
    key = (task.dataset, task.shrink, task.val_size, str(task.host_kwargs), os.environ.get("ESPER_DATA"), id(task.data))
    if key not in _SHARED:
        _SHARED.clear()
        _SHARED[key] = task.load_data()
    return _SHARED[key]


_SHARED: dict[tuple[object, ...], Dataset] = {}


def few_validation(data: Dataset) -> Dataset:
    """Return the data with the first `WATCHED` validation samples only."""
    return replace(data, val=Split(data.val.x[:WATCHED], data.val.y[:WATCHED]))


def few_samples(data: Dataset, count: int, world: int) -> Dataset:
    """Return the data with `count` random training samples, different ones in each world; 0 keeps all."""
    if not count:
        return data
    return data.few(count, derive_seed(world, "few_samples"))


def full_training_macs(task: Task) -> int:
    """Return the multiply-adds of one full training: `task.epochs` epochs of the full structure."""
    engine = Engine(task, [0], data=shared_data(task))
    engine.plant_fossils(0, {slot: (name, Operator.ADD) for slot, name in full_structure(task).items()})
    return task.epochs * engine.compute.epoch_macs(engine.networks[0])
