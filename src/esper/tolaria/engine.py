"""The engine: train E environments for an epoch, validate them with their coalitions, record the results.

    engine = Engine(task, worlds=[0, 1, 2, 3])
    engine.step(actions)      # apply, tick, train an epoch, validate, roll back failing environments, record

Environments are independent: a plain loop over them is the reference for anything faster. The governor (`governor.py`)
handles an error in one environment; the others are not affected.

Legend: E environments, K configurations, N validation samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.blueprints import blueprint_index, registered
from esper.kasmina.body import Body
from esper.kasmina.lifecycle import Effect, EffectKind, Outcome, Rules, apply, legal, record, record_contribution, tick
from esper.leyline.actions import Curve, Operator
from esper.leyline.profiler import PhaseTimers
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable
from esper.leyline.stages import SeedStage
from esper.tolaria.batched_training import BatchedTrainer, choose
from esper.tolaria.coalitions import Coalitions, Measured, statistics
from esper.tolaria.compute import ComputeMeter
from esper.tolaria.data import Dataset
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.governor import Alarm, Governor
from esper.tolaria.host_network import HostNetwork, score
from esper.tolaria.tasks import Task

NOTHING = Coalitions((), 0, [()], torch.full((1, 1, 2), torch.nan))
"""The coalitions of an environment that could not be validated."""


@dataclass(slots=True)
class EpochResults:
    """The results of one epoch's validation; NaN where nothing was measured."""

    envs: int
    slots: int
    judged: list[Coalitions] = field(default_factory=list)  # one per environment
    quality: Floats = field(init=False)  # [E], as the next three
    val_loss: Floats = field(init=False)
    train_loss: Floats = field(init=False)
    vital: Floats = field(init=False)
    worth: Floats = field(init=False)  # [2, E, S] contributions and their standard errors

    def __post_init__(self) -> None:
        self.quality, self.val_loss, self.train_loss, self.vital = np.full((4, self.envs), np.nan)
        self.worth = np.full((2, self.envs, self.slots), np.nan)


class Engine:
    """E environments of one task and their slot table."""

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
        self.task, self.worlds, self.phases = task, list(worlds), phases or PhaseTimers()
        self.rules, self.config = rules or Rules(), config or EngineConfig()
        self.data = (data or task.load_data()).to(self.config.device)
        self.networks = [HostNetwork(task, self.data, world, self.config) for world in self.worlds]
        self.table = SlotTable.empty(len(self.networks), len(task.slots), takes=takes_of(self.networks[0].body))
        strategy = self.config.strategy if len(self.networks) > 1 else "loop"
        self.strategy = choose(self.networks) if strategy == "auto" else strategy
        self.batched = BatchedTrainer(self.networks) if self.strategy == "stacked" else None
        self.compute = ComputeMeter()
        self.lr_factor: Callable[[int], float] | None = None if task.lr_schedule == "constant" else task.lr_factor
        """Function from a step to its factor of the learning rates; None does not touch them."""
        # inputs that norms behind slots are calibrated on: the same training samples for every epoch and environment
        self.calibration = self.data.train.x[:128]
        self.judged: list[Coalitions] = []  # the last epoch's coalitions, one per environment
        self.governor = Governor(self.networks, self.table, self.config.governor, self.data.classes)

    def step(self, actions: Ints) -> Outcome:
        """Apply one action per environment, tick, train an epoch, validate, roll back failing environments, record."""
        table, governor, phases = self.table, self.governor, self.phases
        with phases("apply"):
            governor.begin(table)
            outcome = apply(table, actions, self.rules)
            self._operate(outcome.effects)
            ticked = tick(table, self.rules)
            self._operate(ticked)
        with phases("train"):
            trained = self._train()
        with phases("validate"):
            results = self._validate(trained)
            failing = governor.judge(table, results.val_loss, results.train_loss, results.vital)
            undone = [effect for e in failing for effect in self._roll_back(e, results)]
            record(table, quality=results.quality, val_loss=results.val_loss, train_loss=results.train_loss)
            record_contribution(table, results.worth[0], results.worth[1])
            self.judged = results.judged
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
            if self.lr_factor is not None:
                network.set_learning_rate(self.lr_factor(steps[e]))
        if self.batched is None:
            return [guard(e, network.train_epoch, steps[e]) for e, network in enumerate(self.networks)]
        self.batched.train_epoch(steps)
        return [guard(e, self.batched.result, e) for e in range(len(self.networks))]

    def _validate(self, trained: list[Tensor | None]) -> EpochResults:
        results = EpochResults(*self.table.stage.shape)
        for e in range(len(self.networks)):
            results.judged.append(self._measure(e))
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
        network, result = self.networks[e], results.judged[e]
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
        results.quality[e], results.val_loss[e], results.train_loss[e] = table.quality[e], table.val_loss[e], remembered
        results.worth[:, e] = np.nan
        results.judged[e] = self._measure(e)
        if results.judged[e] is not NOTHING:  # otherwise the values recorded with the snapshot stay
            governor.guard(e, self._read, e, torch.full((2,), remembered, device=self.config.device), results)
        return undone

    def plant_fossils(self, env: int, structure: dict[str, tuple[str, Operator]], *, ramp: int = 0) -> None:
        """Build these seeds before the first step, so that the environment starts with this structure.

        They are fossils with alpha 1. With a `ramp`, they are growing seeds whose alpha rises linearly from 0 to 1:
        the last of them over `ramp` epochs, the i-th of n over i/n of it.
        """
        table, network = self.table, self.networks[env]
        effects = []
        for i, (name, (blueprint, operator)) in enumerate(structure.items(), start=1):
            at = env, network.slot_names.index(network.body.slot(name).name)
            table.blueprint[at], table.operator[at] = blueprint_index(blueprint), operator
            table.serial[at] = table.next_serial[env]
            table.next_serial[env] += 1
            effects.append(Effect(EffectKind.BUILD, *at))
            if ramp:
                table.stage[at], table.alpha_to[at], table.curve[at] = SeedStage.BLENDING, 1.0, Curve.LINEAR
                table.ramp_len[at] = -(-ramp * i // len(structure))
            else:
                table.stage[at], table.alpha[at], table.alpha_to[at] = SeedStage.FOSSILIZED, 1.0, 1.0
                effects.append(Effect(EffectKind.COMMIT, *at))
        self.apply_effects(effects)


def takes_of(body: Body) -> Bools:
    """Return which blueprints each slot accepts, [S, B]."""
    numbers = {name: blueprint_index(name) for name in registered()}
    takes = np.zeros((len(body.slots), max(numbers.values()) + 1), dtype=bool)
    for s, names in enumerate(body.valid_blueprints().values()):
        takes[s, [numbers[b] for b in names]] = True
    return takes
