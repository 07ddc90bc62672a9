"""An exponential moving average of the weights, on which quality is measured.

At a constant learning rate the accuracy of raw weights varies by points from batch to batch, that of their average by
a tenth of a point. Gates and rewards need the latter.

The statistics of BatchNorms are averaged like the weights: averaged weights with the running statistics of the live
ones can lose 30 points of accuracy for some epochs (docs/studies/stability.md). What is averaged is the statistics of
each batch, which follow from the change of the running ones. An average of running statistics, which are averages
themselves, would lag behind the weights.
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
        self.start_epoch()
        self._params = self.tensors[: len(self.tensors) - len(self._norms.running)]

    def start_epoch(self) -> None:
        """Note the running statistics of norms, from which the next update computes those of its batch."""
        self._norms = BatchStatistics(self.module)

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
        values = [*self._params, *self._norms.of_batch()]
        torch._foreach_lerp_(self.average, values, averaging_rate(self.decay, self.updates))

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


class BatchStatistics:
    """Statistics of the last training batch in every BatchNorm of a module, computed from its running statistics."""

    def __init__(self, module: nn.Module) -> None:
        self.running = norm_statistics(module)
        self.before = [b.clone() for b in self.running]
        self.inverse_momenta = inverse_momenta(module)

    @torch.no_grad()
    def of_batch(self) -> list[Tensor]:
        """Return means and variances of the batch since the last call; the running ones where no batch was seen."""
        if not self.running:
            return []
        change = torch._foreach_sub(self.running, self.before)
        torch._foreach_mul_(change, self.inverse_momenta)
        torch._foreach_add_(change, self.before)
        torch._foreach_copy_(self.before, self.running)
        return list(change)


def inverse_momenta(module: nn.Module) -> list[float]:
    """Return 1 / momentum for each of `norm_statistics`; 1 for norms without a momentum."""
    norms = [m for m in module.modules() if isinstance(m, Norm)]
    pairs = [(m.momentum, b) for m in norms for b in (m.running_mean, m.running_var)]
    return [1.0 / momentum if momentum else 1.0 for momentum, b in pairs if b is not None]


def norm_statistics(module: nn.Module) -> list[Tensor]:
    """Return the running means and variances of the BatchNorms in a module."""
    norms = [m for m in module.modules() if isinstance(m, Norm)]
    return [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]


def averaging_rate(decay: float, updates: int) -> float:
    """Return the interpolation weight of update number `updates`; it is larger during the warm-up."""
    return 1.0 - min(decay, (1 + updates) / (10 + updates))
