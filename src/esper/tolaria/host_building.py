"""Build what a task's network starts from: its host with grafted slots, and its optimiser."""

from __future__ import annotations

import torch
from torch import nn

from esper.kasmina.body import Body
from esper.kasmina.graft import graft
from esper.tolaria.data import Dataset
from esper.tolaria.tasks import Task


def build_body(task: Task, data: Dataset, world: int, device: str = "cpu") -> Body:
    """Build the task's host of one world and graft the task's slots; images use channels_last throughout."""
    host = task.build_host(world).to(device)
    if data.kind == "image":
        host = host.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sites = host.sites()
    probe = data.train.x[:3]
    return graft(host, {slot: sites[slot] for slot in task.slots}, probe=probe, blueprints=task.blueprints)


def build_optimizer(task: Task, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Build the task's optimiser, SGD or AdamW."""
    if task.optimiser == "adamw":
        return torch.optim.AdamW(params, lr=task.lr, weight_decay=task.weight_decay, fused=True)
    return torch.optim.SGD(params, lr=task.lr, momentum=task.momentum, weight_decay=task.weight_decay, fused=True)
