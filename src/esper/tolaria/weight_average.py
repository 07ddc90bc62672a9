"""An exponential moving average of the weights, on which quality is measured.

At a constant learning rate the accuracy of raw weights varies by points from batch to batch, that of their average by
a tenth of a point. Gates and rewards need the latter. BatchNorm's buffers are not averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from esper.leyline.errors import ConfigError


class WeightAverage:
    """Exponential moving average of a module's parameters, with warm-up."""

    def __init__(self, module: nn.Module, decay: float = 0.98) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"the decay of the weight average must lie in [0, 1), got {decay}")
        self.module, self.decay, self.updates = module, decay, 0
        self.params: list[Tensor] = []
        self.average: list[Tensor] = []
        self.resync()

    def resync(self) -> None:
        """Follow a structural change: kept parameters keep their average, new ones start from their weights."""
        averages = {id(p): a for p, a in zip(self.params, self.average, strict=True)}
        self.params = list(self.module.parameters())
        self.average = [averages[id(p)] if id(p) in averages else p.detach().clone() for p in self.params]

    def restart(self) -> None:
        """Restart the average from the current weights."""
        self.updates, self.params, self.average = 0, [], []
        self.resync()

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights; call it once per batch."""
        self.updates += 1
        torch._foreach_lerp_(self.average, self.params, averaging_rate(self.decay, self.updates))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the context the module has the averaged weights. No data is copied."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for p, a in zip(self.params, self.average, strict=True):
            p.data, a.data = a.data, p.data


def averaging_rate(decay: float, updates: int) -> float:
    """Return the interpolation weight of update number `updates`; it is larger during the warm-up."""
    return 1.0 - min(decay, (1 + updates) / (10 + updates))
