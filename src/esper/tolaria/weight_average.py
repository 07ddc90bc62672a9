"""An exponential moving average of the weights, on which quality is measured.

At a constant learning rate the accuracy of raw weights varies by points from batch to batch, that of their average by
a tenth of a point. Gates and rewards need the latter.

The running statistics of norms are averaged like the weights. Averaged weights with the statistics of the live ones
can lose 30 points of accuracy for some epochs (docs/studies/stability.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from esper.kasmina.forking import Norm
from esper.leyline.errors import ConfigError


class WeightAverage:
    """Exponential moving average of a module's parameters and norm statistics, with warm-up."""

    def __init__(self, module: nn.Module, decay: float = 0.98) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"the decay of the weight average must lie in [0, 1), got {decay}")
        self.module, self.decay, self.updates = module, decay, 0
        self.tensors: list[Tensor] = []
        """The live tensors: the parameters, then the running statistics of norms."""
        self.average: list[Tensor] = []
        self.resync()

    def resync(self) -> None:
        """Follow a structural change: kept tensors keep their average, new ones start from their values."""
        before = self.by_tensor()
        self.tensors = [*self.module.parameters(), *norm_statistics(self.module)]
        self.average = [before[t] if t in before else t.detach().clone() for t in self.tensors]

    def restart(self) -> None:
        """Restart the average from the current weights."""
        self.updates, self.tensors, self.average = 0, [], []
        self.resync()

    def by_tensor(self) -> dict[Tensor, Tensor]:
        """Return the average of each live tensor."""
        return dict(zip(self.tensors, self.average, strict=True))

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights; call it once per batch."""
        self.updates += 1
        torch._foreach_lerp_(self.average, self.tensors, averaging_rate(self.decay, self.updates))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the context the module has the averaged weights. No data is copied."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for t, a in zip(self.tensors, self.average, strict=True):
            t.data, a.data = a.data, t.data


def norm_statistics(module: nn.Module) -> list[Tensor]:
    """Return the running means and variances of the BatchNorms in a module."""
    norms = [m for m in module.modules() if isinstance(m, Norm)]
    return [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]


def averaging_rate(decay: float, updates: int) -> float:
    """Return the interpolation weight of update number `updates`; it is larger during the warm-up."""
    return 1.0 - min(decay, (1 + updates) / (10 + updates))
