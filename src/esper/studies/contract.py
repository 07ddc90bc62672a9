"""What a study is: arms, budgets, worlds, claims, and the points that trainers return.

study = Study(name="…", question="…", task=("rescue",), arms=(…), budgets=(0.5, 1.0), worlds=(100, 16), …)
points = TRAINERS[arm.kind](arm, task, world, study.budgets)  # at most one Point per budget, ascending
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from esper.leyline.errors import ConfigError, unknown_name

REPORTING_FROM = 100
"""First world of reported results. Settings are tuned on worlds below it."""
NAME = re.compile(r"[a-z][a-z0-9_]{0,19}")
"""Names of studies and arms. They are file names and table cells."""


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One of the methods that a study compares."""

    name: str  # unique in its study
    kind: str  # key in `TRAINERS` of the function that trains it
    settings: dict[str, Any] = {}  # read by the trainer; a change invalidates the finished jobs of this arm only


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A statement that a study tests: the metric of `arm` lies above, or below, that of `against`."""

    arm: str
    against: str
    budget: float | None = None  # None: one verdict for each budget of the study, or the frontier over all of them
    at: Literal["equal compute", "equal steps", "frontier area"] = "equal compute"  # which points are compared
    direction: Literal["higher", "lower"] = "higher"
    against_budget: float | None = None
    """The other arm is taken at this budget of the study instead of `budget`, which must be given and differ from it.

    Such a claim states the compute of both sides, so it is not refused for unequal compute. None: the same budget.
    """


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the study table. The first arm is the reference of the printed differences."""

    name: str
    question: str  # what a user asks
    task: tuple[str, ...]  # each task has its own tables and verdicts
    arms: tuple[Arm, ...]
    budgets: tuple[float, ...]  # training multiply-adds as multiples of one full training, > 0 and ascending
    worlds: tuple[int, int]  # first world, ≥ 100, and number of worlds of the reported results
    tuning_worlds: tuple[int, int] = (0, 5)  # the same for choosing settings by validation quality; all < 100
    candidates: tuple[Arm, ...] = ()  # the chosen arm and those it was chosen from on the tuning worlds, if any
    claims: tuple[Claim, ...] = ()
    min_worlds: int = 8  # number of paired worlds below which a verdict is refused, ≥ 2
    metric: Literal["test_quality", "test_loss"] = "test_quality"  # field of `Point` that the claims are about

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        ascending = all(a < b for a, b in zip((0.0, *self.budgets), self.budgets, strict=False))
        for is_valid, message in (
            (all(map(NAME.fullmatch, [self.name, *names])), "names are a letter, then at most 19 of a-z, 0-9 and _"),
            (names and len(set(names)) == len(names), f"arms must have different names, got {names}"),
            (self.task, "one or more tasks are needed"),
            (self.budgets and ascending, f"budgets must be positive and ascending, got {self.budgets}"),
            (self.min_worlds >= 2, f"min_worlds must be at least 2, got {self.min_worlds}"),
        ):
            if not is_valid:
                raise ConfigError(f"study {self.name!r}: {message}")
        check_worlds(self.worlds, tuning=False)
        check_worlds(self.tuning_worlds, tuning=True)
        if self.candidates and self.candidates[0] not in self.arms:
            raise ConfigError(f"study {self.name!r}: the first of the candidates must be one of the arms")
        for claim in self.claims:
            self.arm(claim.arm)
            self.arm(claim.against)
            allowed = (None,) if claim.at == "frontier area" else (None, *self.budgets)
            if claim.budget not in allowed:
                raise ConfigError(f"study {self.name!r}: budget of {claim} must be one of {allowed}")
            if claim.against_budget is not None:
                self._check_two_budgets(claim)

    def _check_two_budgets(self, claim: Claim) -> None:
        """Raise ConfigError unless the claim is about points of two different budgets."""
        others = [budget for budget in self.budgets if budget != claim.budget]
        for is_valid, message in (
            (claim.budget is not None, "needs a budget, because it has an against_budget"),
            (claim.at == "equal compute", "has two budgets, so it compares neither equal steps nor frontiers"),
            (claim.against_budget in others, f"needs an against_budget among {others}"),
        ):
            if not is_valid:
                raise ConfigError(f"study {self.name!r}: {claim} {message}")

    def for_tuning(self) -> Study:
        """Return the study of the candidates, or of all arms if there are none. It has no claims."""
        return msgspec.structs.replace(self, arms=self.candidates or self.arms, candidates=(), claims=())

    def arm(self, name: str) -> Arm:
        """Return the arm of this name. Raise UnknownNameError if there is none."""
        arms = {arm.name: arm for arm in self.arms}
        if name not in arms:
            raise unknown_name(f"arm of study {self.name!r}", name, arms)
        return arms[name]

    def settings_hash(self, arm: Arm) -> str:
        """Return a hash of everything in the study that changes the points of an arm."""
        content = msgspec.json.encode([arm.kind, arm.settings, self.budgets], order="sorted")
        return hashlib.sha256(content).hexdigest()[:16]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one training at one budget. All numbers are finite."""

    budget: float  # the budget of the study that the point belongs to
    train_macs: int  # training multiply-adds that were used, forward and backward
    val_quality: float
    test_quality: float
    test_loss: float
    params: int  # of the final network
    macs_per_sample: int  # multiply-adds of the final network for one sample, forward
    epochs: int  # trained until this point
    structure: dict[str, str]  # blueprint of each occupied slot
    seconds: float  # wall-clock time of training until this point


Trainer: TypeAlias = Callable[[Arm, str, int, Sequence[float]], list[Point]]
"""Trains an arm on a task in a world. Returns points at some or all of the budgets, in ascending order."""


def check_worlds(worlds: tuple[int, int], *, tuning: bool) -> None:
    """Raise ConfigError unless the worlds (first, count) are on the right side of `REPORTING_FROM`."""
    first, count = worlds
    is_valid = 0 <= first <= REPORTING_FROM - count if tuning else first >= REPORTING_FROM
    if count < 1 or not is_valid:
        rule = f"tuning worlds lie below {REPORTING_FROM}" if tuning else f"worlds start at {REPORTING_FROM} or above"
        raise ConfigError(f"{rule}, and there is at least one. Got {count} worlds from {first}")
