"""The bare PyTorch loop that `benchmarks.train` compares with: hosts with their seeds as plain modules."""

from __future__ import annotations

import statistics

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.hosts import plant
from benchmarks.measure import timed
from esper.kasmina.harden import harden
from esper.tolaria.engine import Engine
from esper.tolaria.host_building import build_optimizer
from esper.tolaria.tasks import Task


class BareLoop:
    """Forward, backward, optimiser step and one validation pass of the same hosts on the same batches."""

    def __init__(self, task: Task, envs: int, blueprints: tuple[str, ...]) -> None:
        engine = Engine(task, list(range(envs)))
        plant(engine, blueprints)
        self.task = task
        self.data = engine.data
        self.models = [harden(p.body) if blueprints else p.body.model for p in engine.networks]
        if self.data.kind == "image":
            self.models = [m.to(memory_format=torch.channels_last) for m in self.models]  # type: ignore[call-overload]
        self.optimizers = [build_optimizer(task, list(m.parameters())) for m in self.models]
        self.steps = 0

    def step(self) -> None:
        for world, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            model.train()
            for x, y in self.task.minibatches(self.data, world, self.steps):
                optimizer.zero_grad(set_to_none=True)
                loss_of(model, x, y).backward()
                optimizer.step()
            self.validate(model)
        self.steps += 1

    @torch.no_grad()
    def validate(self, model: nn.Module) -> float:
        model.eval()
        val = self.data.val
        return float(loss_of(model, val.x, val.y))

    def validate_all(self) -> None:
        for model in self.models:
            self.validate(model)

    def validation_s(self, repeats: int) -> float:
        """Return the median CPU seconds of one validation pass of every host."""
        self.validate_all()
        return statistics.median(timed(self.validate_all) for _ in range(repeats))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())
