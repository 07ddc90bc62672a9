"""The engine: train each of E bodies for an epoch, validate them with their coalitions, write it down.

    engine = Engine(task, worlds=[0, 1, 2, 3])
    engine.step(actions)      # apply, tick, train an epoch, validate, roll back who is sick, record

Bodies are independent: a plain loop over them is the reference for anything faster. Whatever goes wrong in one of them
is the governor's business (`governor.py`) and no other body's.

Legend: E environments, K configurations, N validation samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints import blueprint_index, registered, seeded
from esper.kasmina.body import Body, Incubation
from esper.kasmina.gradients import GradientMeter, GradientStats
from esper.kasmina.graft import graft
from esper.kasmina.lifecycle import Effect, EffectKind, Outcome, Rules, apply, record, record_contribution, tick
from esper.kasmina.surgery import Surgeon, clip_separately
from esper.leyline.actions import Operator
from esper.leyline.errors import ConfigError
from esper.leyline.phases import Phases
from esper.leyline.seeding import derive_seed
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable
from esper.leyline.stages import SeedStage
from esper.tolaria.coalitions import Coalitions, Measured, evaluate, statistics
from esper.tolaria.data import Dataset, Split
from esper.tolaria.ema import WeightAverage
from esper.tolaria.governor import Alarm, Governor, GovernorConfig, largest, vital_tensors
from esper.tolaria.stacked import Stack, Strategy, choose
from esper.tolaria.tasks import Task, per_sample_correct, per_sample_loss

Score = Callable[[Tensor, Tensor], Tensor]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How hosts are trained and measured, whatever the task."""

    incubation: Incubation = "shadow"
    """How a TRAINING seed learns: by a pass of its own, or straight-through in the main pass."""
    shadow_every: int = 2
    """A shadow pass every so many batches: half the lessons teach nearly as much (docs/incubation.md)."""
    gradient_telemetry_stride: int = 10
    """Gradient statistics every so many batches."""
    ema_decay: float = 0.98
    """Of the weight average that quality is measured on."""
    device: str = "cpu"
    compile: bool = False
    """Compile the forward passes. Off: on a CPU it loses."""
    governor: GovernorConfig = GovernorConfig()
    """When a host counts as sick."""
    strategy: Strategy = "loop"
    """Train environments one by one (`loop`), small ones as one stack (`stacked`), or as a short measurement at the
    start finds faster (`auto`). The last bits of a stack depend on how many it holds, and a measurement on the mood of
    the machine: only `loop` gives the same run bit for bit in any company."""

    def __post_init__(self) -> None:
        if self.shadow_every < 1 or self.gradient_telemetry_stride < 1:
            raise ConfigError("shadow_every and gradient_telemetry_stride must be ≥ 1")
        if not 0.0 <= self.ema_decay < 1.0:
            raise ConfigError(f"ema_decay must lie in [0, 1), got {self.ema_decay}")
        try:
            torch.device(self.device)
        except RuntimeError:
            raise ConfigError(f"device is one that torch knows, such as cpu or cuda:0, got {self.device!r}") from None
        if self.strategy not in ("loop", "stacked", "auto"):
            raise ConfigError(f"strategy must be 'loop', 'stacked' or 'auto', got {self.strategy!r}")
        if self.incubation not in ("shadow", "straight_through"):
            raise ConfigError(f"incubation must be 'shadow' or 'straight_through', got {self.incubation!r}")


def process_train_batch(body: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """One host, one batch: the mean loss, and how many samples were right."""
    output = body(x)
    return F.cross_entropy(output.flatten(0, -2), y.flatten()), per_sample_correct(output.detach(), y).sum()


def score(output: Tensor, target: Tensor) -> Tensor:
    """Correctness and log-probability of every sample, [B, 2]: for both, higher is better."""
    return torch.stack([per_sample_correct(output, target), -per_sample_loss(output, target)], dim=-1)


def build_body(task: Task, data: Dataset, world: int, device: str = "cpu") -> Body:
    """The task's host of one world, grafted at the task's slots; maps in channels_last throughout."""
    host = task.build_host(world).to(device)
    if data.kind == "image":
        host = host.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sites = host.sites()
    probe = data.train.x[:3]
    return graft(host, {slot: sites[slot] for slot in task.slots}, probe=probe)


def build_optimizer(task: Task, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    if task.optimiser == "adamw":
        return torch.optim.AdamW(params, lr=task.lr, weight_decay=task.weight_decay, fused=True)
    return torch.optim.SGD(params, lr=task.lr, momentum=task.momentum, weight_decay=task.weight_decay, fused=True)


class Plot:
    """One environment: a body, its optimiser, its weight average, and what is sampled of its gradients."""

    def __init__(self, task: Task, data: Dataset, world: int, config: EngineConfig) -> None:
        self.task, self.data, self.world, self.config = task, data, world, config
        self.body = build_body(task, data, world, config.device)
        self.body.incubation = config.incubation
        self.optimizer = build_optimizer(task, list(self.body.parameters()))
        self.surgeon = Surgeon(self.body, self.optimizer, seed=derive_seed(world, "seeds"), lr=task.seed_lr)
        self.average = WeightAverage(self.body, config.ema_decay)
        self.meter = GradientMeter(config.gradient_telemetry_stride)
        self.forward = torch.compile(process_train_batch) if config.compile else process_train_batch
        self.host_size = sum(p.numel() for p in self.body.model.parameters())
        self.regroup()

    @property
    def params(self) -> int:
        """Parameters of host, seeds and gates, frozen ones too."""
        return sum(p.numel() for p in self.body.parameters())

    def carry_out(self, effects: list[Effect], table: SlotTable, env: int) -> None:
        self.surgeon.carry_out(effects, table, env)
        changed = [e for e in effects if e.env == env]
        for effect in changed:
            if effect.kind == EffectKind.BUILD:
                self.meter.forget(self.surgeon.names[effect.slot])
        if changed:
            self.average.resync()
        if changed or self._stages != [slot.stage for slot in self.body.slots.values()]:
            self.regroup()

    def regroup(self) -> None:
        """Who is clipped with whom: the host with its fossils, and each growing seed alone. And what must be finite."""
        self._stages = [slot.stage for slot in self.body.slots.values()]
        host = list(self.body.model.parameters())
        self.growing: dict[str, list[nn.Parameter]] = {}
        for name, slot in self.body.slots.items():
            params = list(slot.parameters())
            if slot.stage == SeedStage.FOSSILIZED:
                host += params
            elif params:
                self.growing[name] = params
        self.clip_groups = [host, *self.growing.values()]
        self.sizes = {name: sum(p.numel() for p in params) for name, params in self.growing.items()}
        self.has_learner = bool(self.body.training_slots) and self.config.incubation == "shadow"
        self._felt = [self.body.model, *(s for s in self.body.slots.values() if s.stage >= SeedStage.BLENDING)]

    @property
    def vital(self) -> Tensor:
        """One number that is finite as long as everything is that the host feels; on the device."""
        return largest(vital_tensors(self._felt, self.average, self.optimizer))

    def train_epoch(self, step: int) -> Tensor:
        """Train on this step's minibatches; mean loss and accuracy, still on the device.

        Dropout falls by (world, step), so that no environment's luck hangs on another's.
        """
        with own_luck(derive_seed(self.world, "dropout", step), self.config.device):
            return self._train_epoch(step)

    def _train_epoch(self, step: int) -> Tensor:
        body, optimizer, config = self.body, self.optimizer, self.config
        body.train()
        total = torch.zeros(2, device=config.device)
        for i, (x, y) in enumerate(self.task.minibatches(self.data, self.world, step)):
            optimizer.zero_grad(set_to_none=True)
            loss, correct = self.forward(body, x, y)
            loss.backward()
            if self.has_learner and i % config.shadow_every == 0:
                body.shadow_backward(partial(_loss, body, x, y))
            norms = clip_separately(self.clip_groups, self.task.clip)
            if self.meter.due(i):
                seeds = dict(zip(self.growing, norms[1:], strict=True))
                self.meter.take(norms[0], seeds, self.host_size, self.sizes)
            optimizer.step()
            self.average.update()
            total += torch.stack([loss.detach(), correct / len(y)])
        return total / self.task.batches_per_epoch

    def validate(self, split: Split, calibration: Tensor, phases: Phases | None = None) -> Coalitions:
        """Every configuration of this epoch on the averaged weights: scores [K, N, 2]."""
        with self.average.applied():
            return evaluate(self.body, split.portions(), score, calibration=calibration, phases=phases)

    def test(self, split: Split) -> tuple[float, float]:
        """Accuracy and loss on a split, as the network stands, on the averaged weights."""
        with self.average.applied():
            live = tuple(True for _ in self.body.live) + tuple(False for _ in self.body.training_slots)
            result = evaluate(self.body, split.portions(), score, configs=[live])
        accuracy, log_prob = result.scores[0].double().mean(0).tolist()  # sync: only for reports
        return accuracy, -log_prob


@contextmanager
def own_luck(seed: int, device: str) -> Iterator[None]:
    """Within, the random numbers of the processor and of this device come from `seed`; after, all is as it was."""
    if torch.device(device).type != "cuda":
        with seeded(seed):
            yield
        return
    with torch.random.fork_rng(devices=[device]), seeded(seed), torch.cuda.device(device):
        torch.cuda.manual_seed(seed)
        yield


def _loss(body: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return process_train_batch(body, x, y)[0]


NOTHING = Coalitions((), 0, [()], torch.full((1, 1, 2), torch.nan))
"""Stands for the coalitions of an environment that could not be validated."""


@dataclass(slots=True)
class Found:
    """What an epoch's validation found; NaN where it found nothing."""

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
    """E environments of one task, and their table."""

    def __init__(
        self,
        task: Task,
        worlds: Sequence[int],
        *,
        rules: Rules | None = None,
        config: EngineConfig | None = None,
        data: Dataset | None = None,
        phases: Phases | None = None,
    ) -> None:
        self.task, self.worlds, self.phases = task, list(worlds), phases or Phases()
        self.rules, self.config = rules or Rules(), config or EngineConfig()
        self.data = (data or task.load_data()).to(self.config.device)
        self.plots = [Plot(task, self.data, world, self.config) for world in self.worlds]
        self.table = SlotTable.empty(len(self.plots), len(task.slots), takes=takes_of(self.plots[0].body))
        wanted = self.config.strategy if len(self.plots) > 1 else "loop"
        self.strategy = choose(self.plots) if wanted == "auto" else wanted
        self.stack = Stack(self.plots) if self.strategy == "stacked" else None
        # fixed inputs for norms behind slots: training images, the same for every epoch and environment
        self.calibration = self.data.train.x[:128]
        self.judged: list[Coalitions] = []  # the last epoch's coalitions, one per environment
        self.governor = Governor(self.plots, self.table, self.config.governor, self.data.classes)

    def step(self, actions: Ints) -> Outcome:
        """One decision per environment: apply, tick, train an epoch, validate, roll back who is sick, record."""
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
            found = self._validate(trained)
            sick = governor.judge(table, found.val_loss, found.train_loss, found.vital)
            undone = [effect for e in sick for effect in self._roll_back(e, found)]
            record(table, quality=found.quality, val_loss=found.val_loss, train_loss=found.train_loss)
            record_contribution(table, found.worth[0], found.worth[1])
            self.judged = found.judged
            governor.end(table)
        return Outcome(outcome.happened, outcome.effects + ticked + undone)

    @property
    def alarms(self) -> list[Alarm]:
        """What the governor saw in the last step."""
        return self.governor.alarms

    def carry_out(self, effects: list[Effect]) -> None:
        for env, plot in enumerate(self.plots):
            plot.carry_out(effects, self.table, env)

    def _operate(self, effects: list[Effect]) -> None:
        """Surgery under guard; what was committed is part of the next snapshot at once."""
        for env, plot in enumerate(self.plots):
            self.governor.guard(env, plot.carry_out, effects, self.table, env)
        for env in {effect.env for effect in effects if effect.kind == EffectKind.COMMIT}:
            self.governor.guard(env, self.governor.keep, env, self.table)

    def _train(self) -> list[Tensor | None]:
        """An epoch of every environment: mean loss and accuracy, or None of one that failed."""
        guard, steps = self.governor.guard, [int(step) - 1 for step in self.table.step]
        if self.stack is None:
            return [guard(e, plot.train_epoch, steps[e]) for e, plot in enumerate(self.plots)]
        self.stack.train_epoch(steps)
        return [guard(e, self.stack.result, e) for e in range(len(self.plots))]

    def _validate(self, trained: list[Tensor | None]) -> Found:
        found = Found(*self.table.stage.shape)
        for e, plot in enumerate(self.plots):
            result = self.governor.guard(e, plot.validate, self.data.val, self.calibration, self.phases)
            found.judged.append(NOTHING if result is None else result)
        for e, train in enumerate(trained):
            if train is not None:
                self.governor.guard(e, self._read, e, train, found)
        return found

    def _read(self, e: int, train: Tensor, found: Found) -> None:
        """One transfer: everything measured of an environment this epoch."""
        plot, result = self.plots[e], found.judged[e]
        main = result.configs.index(result.main)
        parts = [train, torch.stack([-result.scores[main, :, 1].mean(), plot.vital])]
        parts += [statistics(result, result.scores[..., 0]), plot.meter.pending()]
        pieces = [p.double() for p in parts]
        flat = torch.cat(pieces).tolist()  # sync: once per environment and epoch
        ends = np.cumsum([p.numel() for p in pieces])
        measured = Measured.read(result, flat[ends[1] : ends[2]])
        found.quality[e], found.train_loss[e] = measured.quality, flat[0]
        found.val_loss[e], found.vital[e] = flat[2:4]
        self.table.committed_quality[e] = measured.committed
        self._note_seeds(e, plot, measured, plot.meter.read(flat[ends[2] :]), found.worth[:, e])

    def _roll_back(self, e: int, found: Found) -> list[Effect]:
        """Restore an environment, then measure what was restored: the step is paid by that."""
        governor, table, plot = self.governor, self.table, self.plots[e]
        undone = governor.roll_back(e, table)
        remembered = float(table.train_loss[e])
        found.quality[e], found.val_loss[e], found.train_loss[e] = table.quality[e], table.val_loss[e], remembered
        found.worth[:, e] = np.nan
        result = governor.guard(e, plot.validate, self.data.val, self.calibration, self.phases)
        found.judged[e] = NOTHING if result is None else result
        if result is not None:  # else it stands as the snapshot remembers it
            governor.guard(e, self._read, e, torch.full((2,), remembered, device=self.config.device), found)
        return undone

    def _note_seeds(self, e: int, plot: Plot, measured: Measured, grads: dict[str, GradientStats], worth: Any) -> None:
        table = self.table
        for s, name in enumerate(plot.surgeon.names):
            if name in measured.contribution:
                worth[:, s] = measured.contribution[name]
            if name in measured.prospect:
                table.prospect[e, s], table.prospect_se[e, s] = measured.prospect[name]
            if name in grads:
                stats = grads[name]
                table.grad_norm[e, s], table.grad_ratio[e, s], table.grad_health[e, s] = (
                    stats.norm,
                    stats.ratio,
                    stats.health,
                )

    def plant_fossils(self, env: int, structure: dict[str, tuple[str, Operator]]) -> None:
        """Begin this environment with these seeds already part of the host: the same structure from step 0."""
        table, plot = self.table, self.plots[env]
        effects = []
        for name, (blueprint, operator) in structure.items():
            at = env, plot.surgeon.names.index(plot.body.slot(name).name)
            table.stage[at], table.alpha[at], table.alpha_to[at] = SeedStage.FOSSILIZED, 1.0, 1.0
            table.blueprint[at], table.operator[at] = blueprint_index(blueprint), operator
            table.serial[at] = table.next_serial[env]
            table.next_serial[env] += 1
            effects += [Effect(EffectKind.BUILD, *at), Effect(EffectKind.COMMIT, *at)]
        self.carry_out(effects)


def takes_of(body: Body) -> Bools:
    """[S, B] which blueprints each slot takes."""
    numbers = {name: blueprint_index(name) for name in registered()}
    takes = np.zeros((len(body.slots), max(numbers.values()) + 1), dtype=bool)
    for s, names in enumerate(body.lawful_blueprints().values()):
        takes[s, [numbers[b] for b in names]] = True
    return takes
