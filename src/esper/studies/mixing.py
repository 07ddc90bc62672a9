"""Mixing time: how long a network that was grown needs to match the same structure trained from step 0.

A seed that is planted later than the mixing time before the end of training does not reach what the structure can do.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from esper.studies.arms import SITUATION
from esper.studies.contract import Arm, Point, Study

Curve: TypeAlias = Sequence[tuple[float, float]]
"""Pairs of epochs and quality, higher is better, in ascending order of epochs."""
TOLERANCE = {"test_loss": 0.01}
"""Gap up to which two curves count as equal, by metric; 0.005, half a point, for qualities."""


class Mixing(msgspec.Struct, frozen=True, kw_only=True):
    """The mixing time of one arm on one task."""

    task: str
    arm: str
    against: str  # the arm that trains the same structure from step 0
    tolerance: float
    epochs: float | None  # from the first seed on; None if the curves did not meet
    observed: float  # epochs from the first seed to the last point that could be compared


def mixing_time(grown: Curve, reference: Curve, *, start: float, tolerance: float) -> tuple[float | None, float]:
    """Return the epochs from `start` until the grown curve meets the reference for good, and the epochs observed.

    The curves meet where the grown one is at most `tolerance` below the other. Both are linear between their points.
    Only epochs that both curves cover are compared. The first value is None if they have not met there.
    """
    at, height = zip(*reference, strict=True)
    gaps = [(e, float(np.interp(e, at, height)) - q) for e, q in grown]
    gaps = [(e, gap) for e, gap in gaps if at[0] <= e <= at[-1]]
    observed = gaps[-1][0] - start if gaps else 0.0
    apart = [i for i, (_, gap) in enumerate(gaps) if gap > tolerance]
    if not gaps or (apart and apart[-1] == len(gaps) - 1):
        return None, observed
    if not apart:
        return gaps[0][0] - start, observed
    before, wide = gaps[apart[-1]]
    after, narrow = gaps[apart[-1] + 1]
    return before + (after - before) * (wide - tolerance) / (wide - narrow) - start, observed


def mixing_times(
    study: Study, results: Mapping[tuple[str, str, int], Sequence[Point]], metric: str
) -> Iterator[Mixing]:
    """Yield the mixing time of every arm that plants a structure which another arm trains from step 0."""
    tolerance = TOLERANCE.get(metric, 0.005)
    for task in study.task:
        for arm in study.arms:
            against = _from_start(study, arm, {name for t, name, _ in results if t == task})
            worlds = [
                world for t, name, world in results if against and (t, name) == (task, arm.name)
                and (task, against, world) in results
            ]  # fmt: skip
            if against and worlds:
                curves = (_mean_curve([results[task, name, w] for w in worlds], metric) for name in (arm.name, against))
                epochs, observed = mixing_time(*curves, start=arm.settings["start"], tolerance=tolerance)
                yield Mixing(
                    task=task, arm=arm.name, against=against, tolerance=tolerance, epochs=epochs, observed=observed
                )


def _from_start(study: Study, arm: Arm, finished: Container[str]) -> str | None:
    """Return the finished arm that trains the structure of a planting arm from step 0, or None.

    An arm of equal steps is preferred.
    """
    if "start" not in arm.settings or "pretrain" in arm.settings:
        return None
    same = {name: value for name, value in arm.settings.items() if name in ("structure", "slots", *SITUATION)}
    others = [
        other for other in study.arms
        if other.kind == "static" and other.name in finished
        and {k: v for k, v in other.settings.items() if k != "epochs"} == {"structure": "full", **same}
    ]  # fmt: skip
    return max(others, key=lambda other: "epochs" in other.settings).name if others else None


def _mean_curve(worlds: Sequence[Sequence[Point]], metric: str) -> Curve:
    """Return the mean over worlds of epochs and metric at each budget that all of them have."""
    sign = -1.0 if metric == "test_loss" else 1.0
    budgets = sorted(set.intersection(*({p.budget for p in points} for points in worlds)))
    at = [[p for points in worlds for p in points if p.budget == budget] for budget in budgets]
    return [
        (float(np.mean([p.epochs for p in points])), sign * float(np.mean([getattr(p, metric) for p in points])))
        for points in at
    ]
