"""The engine: train E environments for an epoch, validate them with their coalitions, record the results.

    engine = Engine(task, worlds=[0, 1, 2, 3])
    engine.step(actions)      # apply, tick, train an epoch, validate, roll back failing environments, record

`HostNetwork` is one environment: a task's host as a growing network, in one world. Environments are independent: a
plain loop over them is the reference for anything faster. The governor (`governor.py`) handles an error in one
environment; the others are not affected.

`ComputeMeter` counts multiply-adds: matrix products and convolutions. Training is forward and backward of the host, its
live seeds and the shadow passes. Measuring (validation, coalitions, statistics of norms) is counted apart. The counts
are exact because they come from the operations that the passes run, on a copy of the body.

Legend: E environments, K configurations, N validation samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints import blueprint_index, count_macs
from esper.leyline.actions import Operator
from esper.leyline.lifecycle import (
    Effect,
    EffectKind,
    Outcome,
    Rules,
    apply,
    legal,
    record_contribution,
    record_epoch,
    tick,
)
from esper.leyline.rng import derive_seed
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable
from esper.leyline.stages import SeedStage
from esper.tolaria.batched_training import BatchedTrainer, faster_strategy
from esper.tolaria.coalitions import CALIBRATION_SAMPLES, Coalitions, Measured, Score, evaluate, statistics
from esper.tolaria.data import Dataset, Split
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.governor import Alarm, Governor
from esper.tolaria.growing_network import (
    GrowingNetwork,
    WeightAverage,
    estimated_statistics,
    largest,
    own_generator,
    train_epoch,
    vital_tensors,
)
from esper.tolaria.host_building import build_body, build_optimizer
from esper.tolaria.host_costs import takes_of
from esper.tolaria.rollout import PhaseTimers
from esper.tolaria.tasks import Task, per_sample_correct, per_sample_loss


def train_batch_loss(body: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss of a batch and the number of correct samples."""
    output = body(x)
    return F.cross_entropy(output.flatten(0, -2), y.flatten()), per_sample_correct(output.detach(), y).sum()


def score(output: Tensor, target: Tensor) -> Tensor:
    """Return correctness and log-probability of every sample, [B, 2]; for both, higher is better."""
    return torch.stack([per_sample_correct(output, target), -per_sample_loss(output, target)], dim=-1)


class HostNetwork(GrowingNetwork):
    """The host of one environment: a growing network that trains on a task's data in one world's order."""

    average: WeightAverage

    def __init__(self, task: Task, data: Dataset, world: int, config: EngineConfig) -> None:
        self.task = task
        self.data = data
        self.world = world
        self.config = config
        self.forward = torch.compile(train_batch_loss) if config.compile else train_batch_loss
        body = build_body(task, data, world, config.device)
        super().__init__(
            body,
            build_optimizer(task, list(body.parameters())),
            rng_seed=derive_seed(world, "seeds"),
            incubation=config.incubation,
            gradient_stride=config.gradient_telemetry_stride,
            ema_decay=config.ema_decay,
            max_norm=task.clip,
            lr=task.seed_lr,
        )

    def regroup(self) -> None:
        """Recompute the groups, and which modules affect the host's output."""
        super().regroup()
        active = [slot for slot in self.body.slots.values() if slot.stage >= SeedStage.BLENDING]
        self._active = [self.body.model, *active]

    @property
    def vital(self) -> Tensor:
        """Largest magnitude of the state that affects the host's output, on the device; finite only if all of it is."""
        return largest(vital_tensors(self._active, self.average, self.optimizer))

    # -- training

    def set_learning_rate(self, factor: float) -> None:
        """Set the learning rate of host and seeds to `factor` times the task's."""
        for number, group in enumerate(self.optimizer.param_groups):
            group["lr"] = factor * (self.task.seed_lr if number == self.optimizer_sync.seed_group else self.task.lr)

    def train_epoch(self, step: int) -> Tensor:
        """Train on this step's minibatches; return mean loss and accuracy, still on the device.

        Dropout is seeded by world and step, so it does not depend on which other environments run.
        """
        self.body.train()
        self.average.start_epoch()
        with own_generator(derive_seed(self.world, "dropout", step), self.config.device):
            batches = self.task.minibatches(self.data, self.world, step)
            return train_epoch(self, batches, shadow_every=self.config.shadow_every)

    def forward_backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Run the main pass; return mean loss and accuracy, detached and still on the device."""
        loss, correct = self.forward(self.body, x, y)
        loss.backward()
        return torch.stack([loss.detach(), correct / len(y)])

    def shadow_backward(self, x: Tensor, y: Tensor) -> None:
        """Add the gradient of each TRAINING seed, computed with that seed switched on."""
        if self.has_learner:
            self.body.shadow_backward(lambda: self.batch_loss(self.body, x, y))

    def batch_loss(self, body: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch, not compiled."""
        return train_batch_loss(body, x, y)[0]

    # -- measuring

    def validate(self, split: Split, calibration: Tensor, phases: PhaseTimers | None = None) -> Coalitions:
        """Evaluate every configuration of this epoch on the averaged weights: scores [K, N, 2]."""
        return self.evaluate(split.portions(), score, calibration=calibration, phases=phases)

    @contextmanager
    def final(self) -> Iterator[None]:
        """Within the context the body is what a user takes home: averaged weights, statistics of norms that fit them.

        The statistics are those of random training samples, the same in every world. The averages that an epoch's
        validation uses cost nothing, but are far from them for some epochs after activations changed suddenly.
        """
        count = min(ESTIMATED_ON, len(self.data.train))
        with (
            self.averaged(),
            estimated_statistics(self.body, lambda: self.data.few(count, derive_seed("norm_statistics")).train.x),
        ):
            yield

    def test(self, split: Split) -> tuple[float, float]:
        """Return accuracy and loss of the final network on a split, with the live seeds on."""
        live = tuple(True for _ in self.body.players()) + tuple(False for _ in self.body.training_slots)
        with self.final():
            result = evaluate(self.body, split.portions(), score, configs=[live])
        accuracy, log_prob = result.scores[0].double().mean(0).tolist()  # sync: only for reports
        return accuracy, -log_prob


ESTIMATED_ON = 512
"""Number of training samples on which the statistics of norms of a final network are estimated."""
SAMPLES = 2
"""Samples of the counted batch. BatchNorm needs two; multiply-adds are proportional to the number of samples."""


class PassMacs(NamedTuple):
    """Multiply-adds per sample of the passes of a training batch, forward and backward."""

    main: int
    shadow: int
    """All shadow passes of a batch that has them; 0 if no seed is TRAINING in isolation."""


class MeasuringMacs(NamedTuple):
    """Multiply-adds of measuring, per validation sample and per calibration sample, over all configurations."""

    validation: int
    calibration: int


def pass_macs(network: HostNetwork, *, bare: bool = False) -> PassMacs:
    """Count the passes of one training batch on a copy of the body, without its seeds if it is to be `bare`."""
    body = copy.deepcopy(network.body)
    body.train()
    for slot in body.slots.values() if bare else ():
        slot.remove_seed()
    split = network.data.train
    x, y = split.take(torch.arange(SAMPLES, device=split.y.device))

    def loss() -> torch.Tensor:
        return network.batch_loss(body, x, y)

    with torch.random.fork_rng(devices=[]):
        main = count_macs(lambda: loss().backward())
        shadow = count_macs(lambda: body.shadow_backward(loss)) if network.has_learner and not bare else 0
    return PassMacs(main // SAMPLES, shadow // SAMPLES)


def measuring_macs(network: HostNetwork, score: Score) -> MeasuringMacs:
    """Count the configurations of one validation on a copy of the body. The network is not changed."""
    body = copy.deepcopy(network.body)
    body.forking.proven.update(point for point in body.forking.points.values() if point is not None)  # no extra checks
    split = network.data.train
    x, y = split.take(torch.arange(2 * SAMPLES, device=split.y.device))
    calibration = x[:SAMPLES]

    def count(samples: int) -> int:
        batch = [(x[:samples], y[:samples])]
        return count_macs(lambda: evaluate(body, batch, score, calibration=calibration))

    with torch.random.fork_rng(devices=[]):
        few, twice = count(SAMPLES), count(2 * SAMPLES)
    return MeasuringMacs((twice - few) // SAMPLES, (2 * few - twice) // SAMPLES)


class ComputeMeter:
    """Counts multiply-adds of networks of one task; each structure is counted once."""

    def __init__(self) -> None:
        self._counted: dict[tuple[object, ...], PassMacs] = {}
        self._measured: dict[tuple[object, ...], MeasuringMacs] = {}

    def epoch_macs(self, network: HostNetwork, *, bare: bool = False) -> int:
        """Return the multiply-adds of one training epoch of this network as it is now, or of its host alone."""
        key = () if bare else structure_key(network)
        if key not in self._counted:
            self._counted[key] = pass_macs(network, bare=bare)
        each, task = self._counted[key], network.task
        shadowed = ceil(task.batches_per_epoch / network.config.shadow_every)
        return task.batch * (task.batches_per_epoch * each.main + shadowed * each.shadow)

    def measuring_macs(self, network: HostNetwork, score: Score, samples: int, calibration: int) -> int:
        """Return the multiply-adds of one validation with this many samples and calibration samples."""
        key = (*structure_key(network), *(slot.name for slot in network.body.players()))
        if key not in self._measured:
            self._measured[key] = measuring_macs(network, score)
        each = self._measured[key]
        return samples * each.validation + min(calibration, CALIBRATION_SAMPLES) * each.calibration


def structure_key(network: HostNetwork) -> tuple[object, ...]:
    """Return what the compute of a network's passes depends on."""
    return tuple(
        (slot.blueprint, slot.operator, slot.stage, any(p.requires_grad for p in slot.parameters()))
        for slot in network.body.slots.values()
    )


NOTHING = Coalitions((), 0, [()], torch.full((1, 1, 2), torch.nan))
"""The coalitions of an environment that could not be validated."""


@dataclass(slots=True)
class EpochResults:
    """The results of one epoch's validation; NaN where nothing was measured."""

    envs: int
    slots: int
    coalitions: list[Coalitions] = field(default_factory=list)  # one per environment
    quality: Floats = field(init=False)  # [E], as the next three
    val_loss: Floats = field(init=False)
    train_loss: Floats = field(init=False)
    vital: Floats = field(init=False)
    worth: Floats = field(init=False)  # [2, E, S] contributions and their standard errors

    def __post_init__(self) -> None:
        self.quality, self.val_loss, self.train_loss, self.vital = np.full((4, self.envs), np.nan)
        self.worth = np.full((2, self.envs, self.slots), np.nan)


class Engine:
    """E environments of one task and their slot table.

    Args:
        task: What the environments train.
        worlds: The world of each environment.
        rules: Lifecycle settings; None is `Rules()`.
        config: How hosts are trained and evaluated; None is `EngineConfig()`.
        data: The data; None loads the task's.
        phases: Timers of the surrounding loop.

    Raises:
        ConfigError: The settings do not fit the task or the machine.
        DataError: The data is missing or does not fit the host.

    Example:
        >>> task = esper.Task.from_tensors("mine", torch.randn(100, 6), torch.arange(100) % 3)
        >>> engine = esper.Engine(task, worlds=[0, 1])
        >>> engine.legal.shape  # environments, operations, slots
        (2, 6, 3)
    """

    def __init__(
        self,
        task: Task,
        worlds: Sequence[int],
        *,
        rules: Rules | None = None,
        config: EngineConfig | None = None,
        data: Dataset | None = None,
        phases: PhaseTimers | None = None,
    ) -> None:
        self.task = task
        self.worlds = list(worlds)
        self.phases = phases or PhaseTimers()
        self.rules, self.config = rules or Rules(), config or EngineConfig()
        self.data = (data or task.load_data()).to(self.config.device)
        self.networks = [HostNetwork(task, self.data, world, self.config) for world in self.worlds]
        self.table = SlotTable.empty(len(self.networks), len(task.slots), takes=takes_of(self.networks[0].body))
        strategy = self.config.strategy if len(self.networks) > 1 else "loop"
        self.strategy = faster_strategy(self.networks) if strategy == "auto" else strategy
        self.batched = BatchedTrainer(self.networks) if self.strategy == "stacked" else None
        self.compute = ComputeMeter()
        self.lr_factor: Callable[[int], float] | None = None if task.lr_schedule == "constant" else task.lr_factor
        """Function from a step to its factor of the learning rates; None does not touch them."""
        # inputs that norms behind slots are calibrated on: the same training samples for every epoch and environment
        self.calibration = self.data.train.x[:128]
        self.coalitions: list[Coalitions] = []  # the last epoch's coalitions, one per environment
        self.governor = Governor(self.networks, self.table, self.config.governor, self.data.classes)

    def step(self, actions: Ints) -> Outcome:
        """Apply one action per environment, tick, train an epoch, validate, roll back failing environments, record."""
        table = self.table
        governor = self.governor
        with self.phases("apply"):
            governor.begin(table)
            outcome = apply(table, actions, self.rules)
            self._operate(outcome.effects)
            ticked = tick(table, self.rules)
            self._operate(ticked)
        with self.phases("train"):
            trained = self._train()
        with self.phases("validate"):
            results = self._validate(trained)
            failing = governor.judge(table, results.val_loss, results.train_loss, results.vital)
            undone = [effect for e in failing for effect in self._roll_back(e, results)]
            record_epoch(table, quality=results.quality, val_loss=results.val_loss, train_loss=results.train_loss)
            record_contribution(table, results.worth[0], results.worth[1])
            self.coalitions = results.coalitions
            governor.end(table)
        return Outcome(outcome.happened, outcome.effects + ticked + undone)

    @property
    def legal(self) -> Bools:
        """[E, O, S] the operations that are legal now."""
        return legal(self.table, self.rules)

    @property
    def alarms(self) -> list[Alarm]:
        """The governor's alarms of the last step."""
        return self.governor.alarms

    def apply_effects(self, effects: list[Effect]) -> None:
        """Carry out the effects in the networks they belong to."""
        for env, network in enumerate(self.networks):
            network.apply_effects(effects, self.table, env)

    def _operate(self, effects: list[Effect]) -> None:
        """Change the structure, guarded per environment; take a new snapshot where a seed was committed."""
        for env, network in enumerate(self.networks):
            self.governor.guard(env, network.apply_effects, effects, self.table, env)
        for env in {effect.env for effect in effects if effect.kind == EffectKind.COMMIT}:
            self.governor.guard(env, self.governor.keep, env, self.table)

    def _train(self) -> list[Tensor | None]:
        """Train one epoch of every environment; return mean loss and accuracy, or None for one that failed."""
        guard, steps = self.governor.guard, [int(step) - 1 for step in self.table.step]
        for e, network in enumerate(self.networks):
            self.table.train_macs[e] += guard(e, self.compute.epoch_macs, network) or 0
            self.table.host_train_macs[e] += guard(e, self.compute.epoch_macs, network, bare=True) or 0
            if self.lr_factor is not None:
                network.set_learning_rate(self.lr_factor(steps[e]))
        if self.batched is None:
            return [guard(e, network.train_epoch, steps[e]) for e, network in enumerate(self.networks)]
        self.batched.train_epoch(steps)
        return [guard(e, self.batched.result, e) for e in range(len(self.networks))]

    def _validate(self, trained: list[Tensor | None]) -> EpochResults:
        results = EpochResults(*self.table.stage.shape)
        for e in range(len(self.networks)):
            results.coalitions.append(self._measure(e))
        for e, train in enumerate(trained):
            if train is not None:
                self.governor.guard(e, self._read, e, train, results)
        return results

    def _measure(self, e: int) -> Coalitions:
        """Validate one environment and count the compute; NOTHING if it failed."""
        network, guard = self.networks[e], self.governor.guard
        sizes = len(self.data.val), len(self.calibration)
        self.table.measure_macs[e] += guard(e, self.compute.measuring_macs, network, score, *sizes) or 0
        result = guard(e, network.validate, self.data.val, self.calibration, self.phases)
        return NOTHING if result is None else result

    def _read(self, e: int, train: Tensor, results: EpochResults) -> None:
        """Read everything measured of one environment in this epoch, in one transfer from the device."""
        network, result = self.networks[e], results.coalitions[e]
        main = result.configs.index(result.main)
        parts = [train, torch.stack([-result.scores[main, :, 1].mean(), network.vital])]
        parts += [statistics(result, result.scores[..., 0]), network.meter.pending()]
        pieces = [p.double() for p in parts]
        flat = torch.cat(pieces).tolist()  # sync: once per environment and epoch
        ends = np.cumsum([p.numel() for p in pieces])
        measured = Measured.read(result, flat[ends[1] : ends[2]])
        results.quality[e], results.train_loss[e] = measured.quality, flat[0]
        results.val_loss[e], results.vital[e] = flat[2:4]
        results.worth[:, e] = network.write_scores(self.table, e, measured)
        network.write_gradients(self.table, e, network.meter.read(flat[ends[2] :]))

    def _roll_back(self, e: int, results: EpochResults) -> list[Effect]:
        """Restore an environment and validate it again: the reward of the step is computed from the restored state."""
        governor, table = self.governor, self.table
        undone = governor.roll_back(e, table)
        remembered = float(table.train_loss[e])
        results.quality[e], results.val_loss[e] = table.quality[e], table.val_loss[e]
        results.train_loss[e] = remembered
        results.worth[:, e] = np.nan
        results.coalitions[e] = self._measure(e)
        if results.coalitions[e] is not NOTHING:  # otherwise the values recorded with the snapshot stay
            governor.guard(e, self._read, e, torch.full((2,), remembered, device=self.config.device), results)
        return undone

    def plant_fossils(self, env: int, structure: dict[str, tuple[str, Operator]]) -> None:
        """Build these seeds as fossils with alpha 1, so that the environment starts with this structure."""
        table, network = self.table, self.networks[env]
        effects = []
        for name, (blueprint, operator) in structure.items():
            at = env, network.slot_names.index(network.body.slot(name).name)
            table.blueprint[at], table.operator[at] = blueprint_index(blueprint), operator
            table.serial[at] = table.next_serial[env]
            table.next_serial[env] += 1
            table.stage[at] = SeedStage.FOSSILIZED
            table.alpha[at], table.alpha_to[at] = 1.0, 1.0
            effects += [Effect(EffectKind.BUILD, *at), Effect(EffectKind.COMMIT, *at)]
        self.apply_effects(effects)
