"""An average of the weights over the last batches: quality is measured on it.

At a constant learning rate raw weights scatter by points of accuracy from batch to batch, their average by
a tenth of a point; no gate or reward can work on the former. BatchNorm's buffers stay live.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from esper.leyline.errors import ConfigError


class WeightAverage:
    """Exponential average of a module's parameters, with warm-up."""

    def __init__(self, module: nn.Module, decay: float = 0.98) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"the decay of the weight average must lie in [0, 1), got {decay}")
        self.module, self.decay, self.updates = module, decay, 0
        self.params: list[Tensor] = []
        self.average: list[Tensor] = []
        self.resync()

    def resync(self) -> None:
        """Follow a change of structure: survivors keep their average, newcomers begin with their weights."""
        known = {id(p): a for p, a in zip(self.params, self.average, strict=True)}
        self.params = list(self.module.parameters())
        self.average = [known[id(p)] if id(p) in known else p.detach().clone() for p in self.params]

    def restart(self) -> None:
        """Begin again from the present weights."""
        self.updates, self.params, self.average = 0, [], []
        self.resync()

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        torch._foreach_lerp_(self.average, self.params, averaging_rate(self.decay, self.updates))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within: the module has the averaged weights. No data is copied."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for p, a in zip(self.params, self.average, strict=True):
            p.data, a.data = a.data, p.data


def averaging_rate(decay: float, updates: int) -> float:
    """How far the average moves towards the weights on its n-th update: faster during the warm-up."""
    return 1.0 - min(decay, (1 + updates) / (10 + updates))
