"""Gradient statistics of seeds, sampled on the device every few batches and read once per epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from esper.kasmina.sharding import norms_of

VANISHING, EXPLODING = 1e-7, 10.0
"""A gradient tensor counts as dead if its norm is below the first, as exploding if it is above the second."""
RATIO_CAP, RATIO_KEEP = 10.0, 0.9


@dataclass(frozen=True, slots=True)
class GradientStats:
    """Gradient statistics of one seed."""

    norm: float
    ratio: float
    """Seed gradient over host gradient, each divided by the square root of its parameter count; smoothed."""
    health: float
    """1 minus half the share of dead tensors; 0 if any tensor explodes or is not finite."""


@dataclass(slots=True)
class GradientMeter:
    """Keep the latest sample per slot as device tensors."""

    stride: int = 10
    latest: dict[str, Tensor] = field(default_factory=dict)  # slot → [norm, ratio, health]
    smoothed: dict[str, float] = field(default_factory=dict)

    def due(self, batch: int) -> bool:
        """Return whether this batch is sampled: every `stride`-th, none if `stride` is 0."""
        return self.stride > 0 and batch % self.stride == 0

    def take(self, host: Tensor, seeds: dict[str, Tensor], host_size: int, sizes: dict[str, int]) -> None:
        """Sample from the norms of the gradient tensors of the host and of each seed. Does not sync the device."""
        per_host = torch.linalg.vector_norm(host) / max(host_size, 1) ** 0.5
        for slot, norms in seeds.items():
            if not norms.numel():
                continue
            total = torch.linalg.vector_norm(norms)
            ratio = total / max(sizes[slot], 1) ** 0.5 / per_host.clamp(min=1e-30)
            ratio = torch.where(per_host < 1e-8, 0.0, ratio.clamp(max=RATIO_CAP))
            alive = 1.0 - 0.5 * (norms < VANISHING).float().mean()
            sound = torch.isfinite(norms).all() & (norms <= EXPLODING).all()
            self.latest[slot] = torch.stack([total, ratio, torch.where(sound, alive, 0.0)])

    def pending(self) -> Tensor:
        """Return the samples since the last `read`, three numbers per slot, on the device."""
        return torch.cat(list(self.latest.values())) if self.latest else torch.zeros(0)

    def read(self, numbers: Sequence[float]) -> dict[str, GradientStats]:
        """Return statistics from the numbers of `pending`. A slot that was not sampled is absent."""
        stats = {}
        for i, slot in enumerate(self.latest):
            norm, ratio, health = numbers[3 * i : 3 * i + 3]
            if math.isfinite(ratio):  # a non-finite ratio is reported but kept out of the moving average
                ratio = RATIO_KEEP * self.smoothed.get(slot, ratio) + (1 - RATIO_KEEP) * ratio
                self.smoothed[slot] = ratio
            stats[slot] = GradientStats(norm, ratio, health)
        self.latest = {}
        return stats

    def forget(self, slot: str) -> None:
        """Remove the samples of a slot."""
        self.latest.pop(slot, None)
        self.smoothed.pop(slot, None)


def gradient_norms(params: list[nn.Parameter]) -> Tensor:
    """Return the norm of each gradient, on the device."""
    grads = [p.grad for p in params if p.grad is not None]
    return norms_of(grads) if grads else torch.zeros(0)
