"""Gradient statistics of seeds: measured on the device every few batches, read once per epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

VANISHING, EXPLODING = 1e-7, 10.0
"""A gradient tensor's norm below the first is dead, above the second it is on its way to infinity."""
RATIO_CAP, RATIO_KEEP = 10.0, 0.9


@dataclass(frozen=True, slots=True)
class GradientStats:
    norm: float
    ratio: float
    """Seed gradient over host gradient, each per square root of its parameters; smoothed."""
    health: float
    """1 − half the share of dead tensors; 0 as soon as one explodes or is not finite."""


@dataclass(slots=True)
class GradientMeter:
    """Keeps the newest sample per slot as device tensors."""

    stride: int = 10
    latest: dict[str, Tensor] = field(default_factory=dict)  # slot → [norm, ratio, health]
    smoothed: dict[str, float] = field(default_factory=dict)

    def due(self, batch: int) -> bool:
        return self.stride > 0 and batch % self.stride == 0

    def take(self, host: Tensor, seeds: dict[str, Tensor], host_size: int, sizes: dict[str, int]) -> None:
        """From the norms of each gradient tensor of the host and of each seed; no sync."""
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
        """What was sampled since the last reading, three numbers per slot, still on the device."""
        return torch.cat(list(self.latest.values())) if self.latest else torch.zeros(0)

    def read(self, numbers: Sequence[float]) -> dict[str, GradientStats]:
        """From the numbers of `pending`; a slot that was not sampled is absent, not zero."""
        stats = {}
        for i, slot in enumerate(self.latest):
            norm, ratio, health = numbers[3 * i : 3 * i + 3]
            if math.isfinite(ratio):  # else said once: a mean would never forget it
                ratio = RATIO_KEEP * self.smoothed.get(slot, ratio) + (1 - RATIO_KEEP) * ratio
                self.smoothed[slot] = ratio
            stats[slot] = GradientStats(norm, ratio, health)
        self.latest = {}
        return stats

    def forget(self, slot: str) -> None:
        self.latest.pop(slot, None)
        self.smoothed.pop(slot, None)


def gradient_norms(params: list[nn.Parameter]) -> Tensor:
    """The norm of each gradient, on the device."""
    grads = [p.grad for p in params if p.grad is not None]
    return torch.stack(torch._foreach_norm(grads)) if grads else torch.zeros(0)
