"""A task's host as a growing network: its data, its world, its training epoch and its validation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.body import Body
from esper.kasmina.graft import graft
from esper.leyline.profiler import PhaseTimers
from esper.leyline.rng import derive_seed
from esper.leyline.stages import SeedStage
from esper.tolaria.coalitions import Coalitions
from esper.tolaria.data import Dataset, Split
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.growing_network import GrowingNetwork, own_generator, train_epoch
from esper.tolaria.snapshot import largest, vital_tensors
from esper.tolaria.tasks import Task, per_sample_correct, per_sample_loss
from esper.tolaria.weight_average import WeightAverage


def process_train_batch(body: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss of a batch and the number of correct samples."""
    output = body(x)
    return F.cross_entropy(output.flatten(0, -2), y.flatten()), per_sample_correct(output.detach(), y).sum()


def score(output: Tensor, target: Tensor) -> Tensor:
    """Return correctness and log-probability of every sample, [B, 2]; for both, higher is better."""
    return torch.stack([per_sample_correct(output, target), -per_sample_loss(output, target)], dim=-1)


def build_body(task: Task, data: Dataset, world: int, device: str = "cpu") -> Body:
    """Build the task's host of one world and graft the task's slots; images use channels_last throughout."""
    host = task.build_host(world).to(device)
    if data.kind == "image":
        host = host.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sites = host.sites()
    probe = data.train.x[:3]
    return graft(host, {slot: sites[slot] for slot in task.slots}, probe=probe)


def build_optimizer(task: Task, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Build the task's optimiser, SGD or AdamW."""
    if task.optimiser == "adamw":
        return torch.optim.AdamW(params, lr=task.lr, weight_decay=task.weight_decay, fused=True)
    return torch.optim.SGD(params, lr=task.lr, momentum=task.momentum, weight_decay=task.weight_decay, fused=True)


class HostNetwork(GrowingNetwork):
    """The host of one environment: a growing network that trains on a task's data in one world's order."""

    average: WeightAverage

    def __init__(self, task: Task, data: Dataset, world: int, config: EngineConfig) -> None:
        self.task, self.data, self.world, self.config = task, data, world, config
        self.forward = torch.compile(process_train_batch) if config.compile else process_train_batch
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
            group["lr"] = factor * (self.task.seed_lr if number == self.optimizer_sync.seeds else self.task.lr)

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
        return process_train_batch(body, x, y)[0]

    # -- measuring

    def validate(self, split: Split, calibration: Tensor, phases: PhaseTimers | None = None) -> Coalitions:
        """Evaluate every configuration of this epoch on the averaged weights: scores [K, N, 2]."""
        return self.evaluate(split.portions(), score, calibration=calibration, phases=phases)

    def test(self, split: Split) -> tuple[float, float]:
        """Return accuracy and loss on a split with the live seeds on, on the averaged weights."""
        live = tuple(True for _ in self.body.players()) + tuple(False for _ in self.body.training_slots)
        result = self.evaluate(split.portions(), score, configs=[live])
        accuracy, log_prob = result.scores[0].double().mean(0).tolist()  # sync: only for reports
        return accuracy, -log_prob
