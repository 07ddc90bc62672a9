"""Statistics of a study: paired differences with bootstrap intervals, frontiers and verdicts.

Differences are taken world by world, over the worlds that both arms have. Intervals are 95 % percentile bootstrap
intervals of the mean over worlds (`leyline.paired.compare`: 10,000 resamples, fixed rng_seed).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from esper.leyline.paired import Difference, Lead, compare, paired
from esper.studies.contract import Claim, Point, Study
from esper.studies.mixing import Mixing, mixing_times

EQUAL_COMPUTE = 1.05
"""Ratio of training multiply-adds up to which two arms count as equal. Trainings end after whole epochs."""
Results: TypeAlias = Mapping[tuple[str, str, int], Sequence[Point]]
"""Points by task, arm and world."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One arm at one budget. A budget of None is the best-so-far frontier; its cost is that of the last budget."""

    task: str
    budget: float | None
    arm: str
    worlds: int
    value: Difference  # mean and interval of the metric
    lead: Lead | None  # over the reference arm; None for the reference, and without a common world
    full_trainings: float | None  # training multiply-adds; the unit is the reference arm's, at its largest budget
    params: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a claim on one task at one budget."""

    task: str
    claim: Claim
    outcome: Literal["won", "lost", "undecided", "refused"]
    reason: str  # why it is refused, else empty
    lead: Lead | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """All tables and verdicts of a study."""

    metric: str
    rows: list[Row]
    verdicts: list[Verdict]
    mixing: list[Mixing] = []


def frontier_height(points: Sequence[Point], metric: str) -> float:
    """Return the area under the best-so-far frontier, divided by its width; for one point, its metric.

    At each budget the best point so far is the one of highest validation quality, so the metric does not select it.
    Each doubling of the budget has the same weight.
    """
    best = [max(points[: i + 1], key=lambda p: p.val_quality) for i in range(len(points))]
    heights = [float(getattr(point, metric)) for point in best]
    if len(points) == 1:
        return heights[0]
    at = [math.log2(point.budget) for point in points]
    area = sum((b - a) * (x + y) / 2 for (a, b), (x, y) in zip(pairwise(at), pairwise(heights), strict=True))
    return area / (at[-1] - at[0])


def summarize(study: Study, results: Results, metric: str) -> Summary:
    """Return all tables and verdicts for a metric: `study.metric`, or `val_quality` for tuning."""
    verdicts = [
        _verdict(study, results, task, msgspec.structs.replace(claim, budget=budget), metric)
        for task in study.task
        for claim in study.claims
        for budget in ((claim.budget,) if claim.budget or claim.at == "frontier area" else study.budgets)
    ]
    rows = [row for task in study.task for row in _rows(study, results, task, metric)]
    mixing = list(mixing_times(study, results, metric))
    return Summary(metric=metric, rows=rows, verdicts=verdicts, mixing=mixing)


def _rows(study: Study, results: Results, task: str, metric: str) -> Iterator[Row]:
    """Yield the tables of one task: one per budget, then the frontier."""
    reference = study.arms[0].name
    largest = [points[-1] for (t, arm, _), points in results.items() if (t, arm) == (task, reference)]
    full_macs = np.mean([point.train_macs / point.budget for point in largest]) if largest else None
    for budget in (*study.budgets, None) if len(study.budgets) > 1 else study.budgets:
        base = _values(_points(study, results, task, reference, budget), metric)
        for arm in study.arms:
            points = _points(study, results, task, arm.name, budget)
            values = _values(points, metric)
            if values:
                macs = np.mean([p[-1].train_macs for p in points.values()])
                yield Row(
                    task=task, budget=budget, arm=arm.name, worlds=len(values),
                    value=compare(np.array(list(values.values())), np.zeros(len(values))),
                    lead=paired(values, base) if arm.name != reference else None,
                    full_trainings=float(macs / full_macs) if full_macs else None,
                    params=float(np.mean([p[-1].params for p in points.values()])),
                )  # fmt: skip


def _points(study: Study, results: Results, task: str, arm: str, budget: float | None) -> dict[int, Sequence[Point]]:
    """Return, by world, the point at a budget, or (None) the points at all budgets. Incomplete worlds are left out."""
    chosen = {
        world: [point for point in points if budget in (None, point.budget)]
        for (t, a, world), points in sorted(results.items(), key=lambda item: item[0])
        if (t, a) == (task, arm)
    }
    return {world: points for world, points in chosen.items() if len(points) == (1 if budget else len(study.budgets))}


def _values(points: Mapping[int, Sequence[Point]], metric: str) -> dict[int, float]:
    return {world: frontier_height(some, metric) for world, some in points.items()}


def _verdict(study: Study, results: Results, task: str, claim: Claim, metric: str) -> Verdict:
    """Test one claim on one task.

    Refuse it if there are too few worlds, or if the arm used more compute and the claim does not say so.
    """
    ours = _points(study, results, task, claim.arm, claim.budget)
    if claim.at == "equal steps":
        candidates = {world: results.get((task, claim.against, world), ()) for world in ours}
        equal = {
            world: [p for p in some if p.epochs == ours[world][0].epochs][:1] for world, some in candidates.items()
        }
        theirs: Mapping[int, Sequence[Point]] = {world: points for world, points in equal.items() if points}
    else:
        theirs = _points(study, results, task, claim.against, claim.against_budget or claim.budget)
    worlds = ours.keys() & theirs.keys()
    lead = paired(_values(ours, metric), _values(theirs, metric))
    macs, other_macs = (sum(p.train_macs for world in worlds for p in side[world]) for side in (ours, theirs))
    reason = ""
    if len(worlds) < study.min_worlds:
        reason = f"{len(worlds)} paired worlds, needs {study.min_worlds}"
    elif claim.at != "equal steps" and claim.against_budget is None and macs > EQUAL_COMPUTE * other_macs:
        reason = f"{claim.arm} used {macs / other_macs:.2f} times the compute"
    outcome: Literal["won", "lost", "undecided", "refused"] = "refused"
    if lead is not None and not reason:
        is_above, is_below = lead.low > 0, lead.high < 0
        won, lost = (is_above, is_below) if claim.direction == "higher" else (is_below, is_above)
        outcome = "won" if won else "lost" if lost else "undecided"
    return Verdict(task=task, claim=claim, outcome=outcome, reason=reason, lead=lead)
