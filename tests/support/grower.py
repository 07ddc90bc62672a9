"""A small grafted CNN, learnable batches, permissive rules and a telemetry sink for the tests of `Grower`."""

from __future__ import annotations

import torch
from torch import nn

import esper
from esper.leyline.stages import Thresholds

EASY = esper.Rules(
    birth="isolated",
    thresholds=Thresholds(blend_dwell=0, blend_health=None, fossil_contribution=None),
    auto_train=False,
    auto_blend=False,
    auto_hold=False,
    min_prune_age=0,
    one_at_a_time=False,
)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
        nn.Dropout(0.2),
        nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def make_body() -> esper.Body:
    return esper.graft(make_model(), at={"first": "0", "second": "2"}, probe=torch.randn(3, 1, 6, 6))


def batch(seed: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images whose class is the position of a bright column."""
    noise = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (size,), generator=noise)
    x = torch.randn(size, 1, 6, 6, generator=noise)
    x[torch.arange(size), 0, :, 2 * y] += 1.5
    return x, y


class EventList(list):
    """A telemetry sink that wants every event and keeps it."""

    def wants(self, kind: type) -> bool:
        return True

    emit = list.append
