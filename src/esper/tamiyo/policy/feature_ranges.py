"""Ranges of the observations that a policy was trained with, to tell when a model lies outside them.

    ranges.add(observations)                 # during training
    ranges.outside(observation, slots)       # names and values beyond the ranges, when the policy is used

Legend: N observations, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from esper.leyline.errors import DataError
from esper.tamiyo.policy.feature_table import BASE, ENV_FEATURES, PER_SLOT, SLOT_COLUMN, SLOT_FEATURES

COLUMNS = BASE + PER_SLOT + 1
"""Columns of an environment, columns of any slot, and the number of slots."""
TOLERANCE = 0.02
"""A value counts as outside if it is beyond the range by more than this; all columns lie in −1 to 1."""
_ENABLED = SLOT_COLUMN["enabled"]


@dataclass(frozen=True, slots=True)
class Excess:
    """A value beyond the range of training."""

    name: str
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.name} {self.value:.3g} (trained with {self.low:.3g} to {self.high:.3g})"


class FeatureRanges:
    """Smallest and largest value of every column, and of the number of slots, over all observations so far."""

    def __init__(self, bounds: Tensor | None = None) -> None:
        if bounds is None:
            bounds = torch.tensor([[np.inf], [-np.inf]]).repeat(1, COLUMNS)
        if bounds.shape != (2, COLUMNS):
            raise DataError(f"feature ranges must have shape {(2, COLUMNS)}, got {tuple(bounds.shape)}")
        self.bounds = bounds.to(torch.float32)  # [2, BASE + PER_SLOT + 1]

    @property
    def is_known(self) -> bool:
        """Whether any observation was added."""
        return bool(self.bounds.isfinite().all())

    def add(self, obs: Tensor) -> None:
        """Widen the ranges to contain these observations [N, F]. Slots that are not enabled do not count."""
        if not len(obs):
            return
        slots = obs[:, BASE:].unflatten(-1, (-1, PER_SLOT))
        real = slots[..., _ENABLED] > 0
        count = real.sum(-1, keepdim=True).to(obs.dtype)
        for row, reduce, pick in ((0, torch.amin, torch.minimum), (1, torch.amax, torch.maximum)):
            new = torch.cat([reduce(obs[:, :BASE], 0), reduce(slots[real], 0), reduce(count, 0)])
            self.bounds[row] = pick(self.bounds[row], new)

    def outside(self, obs: Tensor, slots: Sequence[str]) -> list[Excess]:
        """Return what lies beyond the ranges in one observation [F] of a host with these slots."""
        rows = obs[BASE:].unflatten(-1, (-1, PER_SLOT))
        real = torch.nonzero(rows[:, _ENABLED] > 0).flatten().tolist()
        low, high = self.bounds
        excesses = []
        if not float(low[-1]) <= len(real) <= float(high[-1]):
            excesses.append(Excess("number of slots", len(real), float(low[-1]), float(high[-1])))
        excesses += self._beyond(obs[:BASE], 0, [f.name for f in ENV_FEATURES])
        for s in real:
            excesses += self._beyond(rows[s], BASE, [f"{f.name} of {slots[s]}" for f in SLOT_FEATURES])
        return excesses

    def _beyond(self, values: Tensor, first: int, names: Sequence[str]) -> list[Excess]:
        low, high = (bound[first : first + len(values)] for bound in self.bounds)
        where = (values < low - TOLERANCE) | (values > high + TOLERANCE)
        return [
            Excess(names[i], float(values[i]), float(low[i]), float(high[i]))
            for i in torch.nonzero(where).flatten().tolist()
        ]
