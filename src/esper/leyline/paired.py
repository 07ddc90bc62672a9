"""Paired comparison of two arms: the mean difference over worlds and its bootstrap interval.

All comparisons use these functions: `esper eval`, studies, `esper compare`, the report and the live page. Both arms are
measured in the same worlds, so a world's difficulty cancels out of the difference.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

REPEATS = 10_000
"""Bootstrap resamples of the worlds."""


class Difference(msgspec.Struct, frozen=True):
    """A mean difference and the bounds of its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def is_sure(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


class Lead(Difference, frozen=True):
    """A paired difference, and the number of worlds in which it is above, at and below 0."""

    wins: int
    ties: int
    losses: int

    @property
    def is_sure(self) -> bool:
        """Whether the interval excludes 0. One world has no interval."""
        return super().is_sure and self.wins + self.ties + self.losses > 1


def compare(ours: npt.ArrayLike, theirs: npt.ArrayLike, *, repeats: int = REPEATS, rng_seed: int = 0) -> Difference:
    """Return the mean of ours − theirs over worlds, with its percentile bootstrap 95 % interval."""
    difference = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    rng = np.random.default_rng(rng_seed)
    means = difference[rng.integers(0, len(difference), (repeats, len(difference)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Difference(float(difference.mean()), float(low), float(high))


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Lead | None:
    """Return ours − theirs over the worlds that both have; None if there is none."""
    worlds = sorted(ours.keys() & theirs.keys())
    if not worlds:
        return None
    a, b = (np.array([values[world] for world in worlds]) for values in (ours, theirs))
    both = compare(a, b)
    return Lead(both.mean, both.low, both.high, int((a > b).sum()), int((a == b).sum()), int((a < b).sum()))
